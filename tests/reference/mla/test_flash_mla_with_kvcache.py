"""The reference of decoding: dense and sparse in fp32, of every cache, NaN, missing pages, and refused arguments."""

import math

import pytest
import torch

import dsa
from dsa.cases import CASES
from dsa.reference import flash_mla_with_kvcache
from dsa.reference.mla import softmax_attention
from tests.reference.common import assert_refused, i32

BY_NAME = {case.name: case for case in CASES}
DENSE, SPARSE = BY_NAME["flash_mla_with_kvcache dense"], BY_NAME["flash_mla_with_kvcache v32"]
INF, NAN = math.inf, math.nan
SMALL = {"d": 24, "d_v": 16, "dtype": torch.float32, "page": 4}


def run(given):
    """The reference, which takes fp32 queries with keys of any dtype."""
    return flash_mla_with_kvcache(**{name: x for name, x in given.items() if name != "out"})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("s_q", [1, 2, 4])
@pytest.mark.parametrize(("heads", "kv_heads", "page"), [(3, 1, 4), (6, 2, 1), (4, 4, 64)])
def test_dense_decoding_is_right_in_fp32(causal, s_q, heads, kv_heads, page):
    """One sequence has no keys, and one has a single key, so that up to three queries come before it."""
    sizes = {"lengths": (9, 0, 1, 2, 17), "s_q": s_q, "heads": heads, "kv_heads": kv_heads, "page": page}
    DENSE.verify(**SMALL | sizes, causal=causal)
    DENSE.verify(**SMALL | sizes, causal=causal, scale=0.1)


def test_dense_queries_are_not_touched_by_later_keys_that_are_nan():
    given = DENSE.arguments(**SMALL, lengths=(5,), heads=2, causal=True)
    clean = dsa.flash_mla_with_kvcache(**given)
    given["k_cache"][given["block_table"][0, 1], 0] = NAN  # key 4: only the second query sees it
    out, lse = dsa.flash_mla_with_kvcache(**given)
    assert torch.equal(out[:, 0], clean[0][:, 0]) and torch.equal(lse[:, :, 0], clean[1][:, :, 0])
    assert out[0, 1].isnan().all()


@pytest.mark.parametrize("causal", [False, True])
def test_dense_lengths_are_clipped_and_pages_that_do_not_exist_hold_no_keys(causal):
    given = DENSE.arguments(**SMALL, lengths=(10, 12, 8), s_q=1, heads=2, causal=causal)
    given |= {"block_table": given["block_table"][:, :3], "cache_seqlens": i32([10, 100, -3])}
    for bad in (-1, len(given["k_cache"]), 2**31 - 1):
        given["block_table"][0, 1] = bad
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
    SPARSE.check(given, run(given))


@pytest.mark.parametrize("layout", ["656 bytes", "584 bytes"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_bytes_are_decoded_by_other_names_and_densely(layout, dtype):
    given = SPARSE.arguments(layout=layout, batch=3, s_q=2, heads=2, top_k=9, rows=100, page=4)
    given |= {"q": given["q"].float(), "k_cache": given["k_cache"].view(dtype)}
    SPARSE.check(given, dsa.flash_mla_with_kvcache(**given))
    numbers = dsa.read_kv_cache(given["k_cache"], torch.arange(given["k_cache"].shape[0] * 4)).isfinite().all(1)
    page = int(numbers.view(-1, 4).all(1).nonzero()[0])
    dense = {"block_table": i32([[page]] * 3), "cache_seqlens": i32([3, 0, 4]), "indices": None}
    DENSE.check(given | dense, dsa.flash_mla_with_kvcache(**given | dense))


INDICES = i32(
    [
        [[3, 0, 3, 11, -1, 5], [-1, -1, -1, -1, -1, -1]],
        [[12, 2**31 - 1, -(2**31), 7, -5, 1], [12, 100, -2, 2**30, -1, -1]],
        [[0, 1, 2, 3, 4, 5], [11, 10, 9, 8, 7, 6]],
    ]
)


def sparse(q, cache, d_v=16, **options):
    return flash_mla_with_kvcache(q, cache, None, None, d_v, None, **options)


def test_a_selected_nan_reaches_its_own_query_only():
    cache = torch.randn(1, 4, 1, 24)
    cache[0, 2] = NAN
    out, lse = sparse(torch.randn(1, 2, 3, 24), cache, indices=i32([[[0, 1], [1, 2]]]))
    assert out[0, 0].isfinite().all() and out[0, 1].isnan().all()
    assert lse[0, :, 0].isfinite().all() and lse[0, :, 1].isnan().all()


def test_empty_batch_queries_selection_and_cache():
    cache = torch.randn(3, 4, 1, 24)
    for batch, s_q, k, pages in ((0, 2, 6, 3), (3, 0, 6, 3), (3, 2, 0, 3), (3, 2, 6, 0)):
        q, indices = torch.randn(batch, s_q, 5, 24), INDICES[:batch, :s_q, :k]
        out, lse = sparse(q, cache[:pages], indices=indices)
        assert out.shape == (batch, s_q, 5, 16) and lse.shape == (batch, 5, s_q)
        assert out.eq(0).all() and lse.eq(INF).all()
        dense = flash_mla_with_kvcache(q, cache, i32([[0]] * batch).view(batch, 1), i32([4] * batch), 16, None)
        assert dense[0].shape == out.shape and dense[1].shape == lse.shape


CACHE = torch.zeros(3, 4, 1, 24)
BYTES = torch.zeros(3, 4, 1, 656, dtype=torch.uint8)
LISTED = {"block_table": None, "cache_seqlens": None, "indices": INDICES}
WHOLE = {"block_table": i32([[0]] * 3), "cache_seqlens": i32([1] * 3)}


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (LISTED, {"causal": True}, "causal: must be False with indices, got True"),
        (LISTED, {"attn_sink": torch.zeros(4)}, r"attn_sink: shape must be \[5\], got \[4\]"),
        (LISTED, {"topk_length": i32([1])}, r"topk_length: shape must be \[3\], got \[1\]"),
        (LISTED, {"indices": INDICES.long()}, "indices: dtype must be int32, got int64"),
        (LISTED, {"indices": INDICES[:2]}, r"indices: shape must be \[3, 2, K\], got \[2, 2, 6\]"),
        (
            LISTED,
            {"k_cache": CACHE.expand(3, 4, 5, 24)},
            r"k_cache: shape must be \[pages, P, 1, row\], got \[3, 4, 5,",
        ),
        (
            LISTED,
            {"k_cache": CACHE[..., :20]},
            "k_cache: a last dimension of 20 means d = 20, but q has d = 24",
        ),
        (LISTED, {"k_cache": BYTES}, "k_cache: dtype must be float32, .* got uint8"),
        (LISTED, {"is_fp8_kvcache": True}, "k_cache: dtype must be uint8, .* got float32"),
        (LISTED, {"k_cache": BYTES, "is_fp8_kvcache": True}, "of 656 means d = 576, but q has d = 24"),
        (LISTED, {"head_dim_v": 25}, "head_dim_v: must be at most d = 24, got 25"),
        (
            LISTED,
            {"extra_topk_length": i32([1] * 3)},
            "extra_topk_length: must be None without extra_k_cache",
        ),
        (
            LISTED,
            {"extra_indices_in_kvcache": INDICES},
            "extra_indices_in_kvcache: must be None without extra_k_cache",
        ),
        (LISTED, {"extra_k_cache": CACHE}, r"extra_indices_in_kvcache: must be a torch.Tensor, got NoneType"),
        (WHOLE, {"attn_sink": torch.zeros(5)}, "attn_sink: must be None without indices, got Tensor"),
        (WHOLE, {"topk_length": i32([1] * 3)}, "topk_length: must be None without indices, got Tensor"),
        (
            WHOLE,
            {"k_cache": CACHE.expand(3, 4, 2, 24)},
            "k_cache: its h_k heads must divide q's h_q = 5, got h_k = 2",
        ),
        (WHOLE, {"cache_seqlens": i32([1])}, r"cache_seqlens: shape must be \[3\], got \[1\]"),
        (WHOLE, {"block_table": None}, r"block_table: must be a torch.Tensor, got NoneType"),
    ],
)
def test_wrong_arguments_are_named(base, change, message):
    good = {"q": torch.zeros(3, 2, 5, 24), "k_cache": CACHE, "head_dim_v": 16, "tile_scheduler_metadata": None} | base
    dsa.flash_mla_with_kvcache(**good)
    assert_refused(message, dsa.flash_mla_with_kvcache, **good | change)
