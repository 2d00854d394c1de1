"""Fused compressed attention: the ops that it calls, and the memory that it frees before attention."""

import weakref

import pytest
import torch

from dsa_layers import RotaryEmbedding, SequenceBatch, fuse, rope_frequencies
from dsa_layers.engine import joint_linear
from dsa_layers.engine.paged_compressed_attention import PagedCompressedAttention
from tests.layers.layers import small_layers
from tests.layers.layers.calls import record
from tests.layers.layers.small_layers import HIDDEN, RATIO, ROTARY

DIM, WINDOW, BF16 = 512, 4, torch.bfloat16


def fused_attention(**options):
    return fuse(small_layers.compressed_attention(**{"dtype": BF16} | options))


def surroundings(length):
    batch = SequenceBatch.without_cache([length])
    return ROTARY(batch.positions), ROTARY(batch.entries(RATIO).positions), batch


@pytest.fixture
def products(monkeypatch):
    """Return two growing lists: each fp32 product's number of columns, and a weak reference to its result's storage."""
    columns, results, product = [], [], joint_linear.fp32_product

    def recorded(x, weight, *scale, **options):
        y = product(x, weight, *scale, **options)
        columns.append(len(weight))
        results.append(weakref.ref(y.untyped_storage()))
        return y

    monkeypatch.setattr(joint_linear, "fp32_product", recorded)
    return columns, results


@pytest.mark.parametrize(
    ("length", "heads", "expected"),
    [
        (12, 4, [4 * DIM]),  # attention reads all 3 entries, so the indexer does not run
        (40, 4, [4 * DIM + 512 + 4]),
        (40, 6, [4 * DIM + 512]),  # with 6 more fp32 columns, rows would not begin at multiples of 16 bytes
    ],
)
def test_both_compressors_have_one_product_that_attention_frees(length, heads, expected, products, monkeypatch):
    layer, prefill, alive = fuse(small_layers.indexed_attention(heads)), PagedCompressedAttention._prefill, []

    def attended(*arguments):
        alive.extend(result() for result in products[1])
        return prefill(*arguments)

    monkeypatch.setattr(PagedCompressedAttention, "_prefill", attended)
    layer(torch.randn(length, HIDDEN), *surroundings(length))
    assert products[0] == expected and alive == [None]


@pytest.mark.parametrize(
    ("heads", "fp8", "rope_dim", "casts"),
    [(34, True, 64, 1), (32, True, 64, 0), (34, False, 64, 0)],
    ids=["many heads", "few heads", "bf16 weights"],
)
def test_attention_of_many_heads_casts_its_results_for_fp8_weights(heads, fp8, rope_dim, casts, monkeypatch):
    layer, batch = fused_attention(heads=heads, fp8=fp8), SequenceBatch.without_cache([5, 3])
    rope = RotaryEmbedding(rope_frequencies(rope_dim, 1e4))(batch.positions)
    called, x = record(monkeypatch, "window_attention_cast_to_fp8"), torch.randn(8, HIDDEN).to(BF16)
    found = layer(x, rope, None, batch)
    assert len(called) == casts
    monkeypatch.setattr(PagedCompressedAttention, "_casts_results", lambda *_: False)
    assert torch.equal(layer(x, rope, None, batch), found) and len(called) == casts


@pytest.mark.parametrize(("channels", "joined"), [(64, True), (36, False)])
def test_rope_is_one_op_with_the_norm_and_the_cast(channels, joined, monkeypatch):
    batch, x = SequenceBatch.without_cache([5]), torch.randn(5, HIDDEN).to(BF16)
    rope = RotaryEmbedding(rope_frequencies(channels, 1e4))(batch.positions)
    called = record(monkeypatch, "rms_norm_rotary", "rotary_cast_to_fp8", "apply_rotary")
    fused_attention(heads=32, fp8=True)(x, rope, None, batch)
    of_keys = ["apply_rotary"]
    assert sorted(called) == of_keys + (["rms_norm_rotary", "rotary_cast_to_fp8"] if joined else 2 * of_keys)
