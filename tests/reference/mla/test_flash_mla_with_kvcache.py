"""The reference of flash_mla_with_kvcache, dense and over selected keys: queries in chunks, several cache layouts, NaN,
missing pages, and empty inputs."""

import pytest
import torch

import dsa
from dsa.cases import CASES
from dsa.reference import flash_mla_with_kvcache
from dsa.reference.mla import softmax_attention
from tests.reference.common import BYTE, E4M3, F32, INF, NAN, assert_same_bits, i32

BY_NAME = {case.name: case for case in CASES}
DENSE, SPARSE = BY_NAME["flash_mla_with_kvcache dense"], BY_NAME["flash_mla_with_kvcache v32"]
SMALL = {"d": 24, "d_v": 16, "dtype": F32, "page": 4}


def test_a_dense_query_does_not_see_later_keys_that_are_nan():
    given = DENSE.arguments(**SMALL, lengths=(5,), heads=2, causal=True)
    clean = dsa.flash_mla_with_kvcache(**given)
    given["k_cache"][given["block_table"][0, 1], 0] = NAN  # key 4: only the second query sees it
    out, lse = dsa.flash_mla_with_kvcache(**given)
    assert_same_bits((out[:, 0], lse[:, :, 0]), (clean[0][:, 0], clean[1][:, :, 0]))
    assert out[0, 1].isnan().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("missing", [-1, 1000, 2**31 - 1])
def test_dense_lengths_are_clipped_and_missing_pages_hold_no_keys(missing, causal):
    given = DENSE.arguments(**SMALL, lengths=(10, 12, 8), s_q=1, heads=2, causal=causal)
    given |= {"block_table": given["block_table"][:, :3], "cache_seqlens": i32([10, 100, -3])}
    given["block_table"][0, 1] = missing
    DENSE.check(given, dsa.flash_mla_with_kvcache(**given))


@pytest.mark.parametrize("chunk", [2**24, 600 * 6 * 4])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("extra", [None, (9, 3)])
@pytest.mark.parametrize("layout", ["bf16, 576", "fp16, 512", "656 bytes, any scales", "584 bytes, unpadded"])
def test_sparse_decoding_is_right_for_fp32_queries(layout, extra, counted, sink, chunk, monkeypatch):
    monkeypatch.setattr(softmax_attention, "_CPU_CHUNK", chunk)
    sizes = {"batch": 3, "s_q": 2, "heads": 5, "top_k": 12, "rows": 30, "page": 4, "invalid": 0.3}
    given = SPARSE.arguments(layout=layout, extra=extra, counted=counted, sink=sink, **sizes)
    given["q"] = given["q"].float()
    # The reference also accepts keys of another dtype than q's.
    SPARSE.check(given, flash_mla_with_kvcache(**{name: x for name, x in given.items() if name != "out"}))


@pytest.mark.parametrize("layout", ["656 bytes", "584 bytes"])
@pytest.mark.parametrize("dtype", [BYTE, E4M3])
def test_byte_caches_have_two_dtypes_and_decode_densely(layout, dtype):
    given = SPARSE.arguments(layout=layout, batch=3, s_q=2, heads=2, top_k=9, rows=100, page=4)
    given |= {"q": given["q"].float(), "k_cache": given["k_cache"].view(dtype)}
    SPARSE.check(given, dsa.flash_mla_with_kvcache(**given))
    numbers = dsa.read_kv_cache(given["k_cache"], torch.arange(given["k_cache"].shape[0] * 4)).isfinite().all(1)
    page = int(numbers.view(-1, 4).all(1).nonzero()[0])
    dense = {"block_table": i32([[page]] * 3), "cache_seqlens": i32([3, 0, 4]), "indices": None}
    DENSE.check(given | dense, dsa.flash_mla_with_kvcache(**given | dense))


def test_a_selected_nan_reaches_only_its_query():
    cache, indices = torch.randn(1, 4, 1, 24), i32([[[0, 1], [1, 2]]])
    cache[0, 2] = NAN
    out, lse = flash_mla_with_kvcache(torch.randn(1, 2, 3, 24), cache, None, None, 16, None, indices=indices)
    assert out[0, 0].isfinite().all() and out[0, 1].isnan().all()
    assert lse[0, :, 0].isfinite().all() and lse[0, :, 1].isnan().all()


@pytest.mark.parametrize(("batch", "s_q", "k", "pages"), [(0, 2, 6, 3), (3, 0, 6, 3), (3, 2, 0, 3), (3, 2, 6, 0)])
def test_empty_batch_queries_selection_and_cache(batch, s_q, k, pages):
    q, cache, indices = torch.randn(batch, s_q, 5, 24), torch.randn(3, 4, 1, 24), torch.arange(6).int()
    indices = indices[:k].expand(batch, s_q, k)
    out, lse = flash_mla_with_kvcache(q, cache[:pages], None, None, 16, None, indices=indices)
    assert out.shape == (batch, s_q, 5, 16) and lse.shape == (batch, 5, s_q)
    assert out.eq(0).all() and lse.eq(INF).all()
    dense = flash_mla_with_kvcache(q, cache, i32([[0]] * batch).view(batch, 1), i32([4] * batch), 16, None)
    assert dense[0].shape == out.shape and dense[1].shape == lse.shape
