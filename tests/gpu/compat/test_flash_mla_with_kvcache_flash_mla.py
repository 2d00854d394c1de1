"""Decoding called through FlashMLA's signatures (`dsa.compat.flash_mla`), at sizes of FlashMLA's own tests."""

import itertools

import pytest
import torch

from dsa.compat import flash_mla
from tests.gpu.attention import D_V, case_of
from tests.gpu.case_checks import by_sizes, grid

DENSE, SPARSE = case_of("flash_mla_with_kvcache dense"), case_of("flash_mla_with_kvcache v32")


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3), (63, 1), (64, 2), (128, 1), (128, 8)])
@pytest.mark.parametrize(("batch", "mean"), [(1, 20), (2, 140), (6, 4096), (64, 140)])
@by_sizes(grid(s_q=(1, 2, 4), causal=(False, True)))
def test_dense_decoding_is_right(sizes, batch, mean, heads, kv_heads, record_error):
    some = itertools.cycle((mean, 0, 2 * mean - 1, mean // 3 + sizes["s_q"]))
    for lengths in ([mean] * batch, [next(some) for _ in range(batch)]):
        given = DENSE.arguments("cuda", lengths=lengths, heads=heads, kv_heads=kv_heads, **sizes)
        names = "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v"
        arguments, plan = [given[name] for name in names], flash_mla.get_mla_metadata()
        for _ in range(2):
            found = flash_mla.flash_mla_with_kvcache(*arguments, *plan, causal=sizes["causal"])
            record_error(DENSE.check(given, found))


@pytest.mark.parametrize("use_legacy", [False, True])
@pytest.mark.parametrize(("batch", "top_k", "extra"), [(2, 128, None), (74, 512, (128, 64)), (4, 2048, (592, 2))])
@by_sizes(grid(layout=("656 bytes", "584 bytes"), s_q=(1, 2), heads=(64, 128), rows=(4096,), sink=(True,)))
def test_sparse_decoding_is_right(sizes, batch, top_k, extra, use_legacy, record_error):
    given = SPARSE.arguments("cuda", batch=batch, top_k=top_k, extra=extra, **sizes)
    given["attn_sink"][::3], given["attn_sink"][1::3] = torch.inf, -torch.inf
    given["topk_length"] = torch.randint(0, top_k + 1, (batch,), dtype=torch.int32, device="cuda")
    names = "indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length"
    plan, scale = flash_mla.get_mla_metadata(), given["q"].shape[3] ** -0.5
    arguments = (given["q"], given["k_cache"], None, None, D_V, *plan, scale, False, True, *map(given.get, names))
    heads = given["q"].shape[2]
    whole = torch.full((batch, sizes["s_q"], heads + 8, D_V), torch.nan, dtype=torch.bfloat16, device="cuda")
    for out in (None, whole[:, :, :heads]):
        got = flash_mla.flash_mla_with_kvcache(*arguments, None, out=out, use_legacy=use_legacy)
        assert got[1].transpose(1, 2).is_contiguous() and (out is None or got[0] is out)
        record_error(SPARSE.check(given, got))
    assert whole[:, :, heads:].isnan().all()
