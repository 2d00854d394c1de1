"""What steps find in caches that no pass has filled."""

import pytest
import torch

import dsa
from dsa_bench.e2e.runs import fill
from dsa_bench.e2e.stacks import stack
from dsa_layers.cache.kv_cache import PagedKVCache
from tests.bench.small_stacks import FEWER, SMALL


def is_normal(rows):
    """Of order one, and no row like another."""
    return rows.isfinite().all() and 0.9 < rows.std() < 1.1 and len(rows.unique(dim=0)) == len(rows)


@pytest.mark.parametrize("kind", ["fp8", torch.bfloat16])
def test_pages_hold_normal_numbers(kind):
    cache = PagedKVCache(2, 3, 64, latent=kind, index=kind)
    fill(cache)
    slots = torch.arange(3 * 64)
    for i in range(2):
        layer = cache.layer(i)
        assert is_normal(dsa.read_kv_cache(layer.latent, slots))
        if kind != "fp8":
            assert is_normal(layer.index.flatten(0, 2).float())
            continue
        keys, scales = dsa.read_indexer_cache(layer.index, slots)
        assert is_normal(keys.float() * scales[:, None])


def test_of_compressed_attention_states_are_small():
    model = stack("V4-Flash", "cpu", **SMALL, **FEWER["V4-Flash"])
    cache = model.make_cache(4, state_slots=2)
    fill(cache)
    floats = [tensor for tensor in cache.state_tensors() if tensor.dtype == torch.float32]
    assert floats and all(0 < tensor.std() < 0.01 for tensor in floats)
    assert all(
        tensor.view(torch.uint8).float().std() > 10 for tensor in cache.tensors() if tensor.dtype != torch.float32
    )
