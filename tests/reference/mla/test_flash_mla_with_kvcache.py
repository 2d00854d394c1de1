import math

import pytest
import torch

from dsa.reference import flash_mla_with_kvcache, make_v4_cache, read_kv_cache, write_kv_cache
from dsa.reference.mla import softmax_attention
from tests.reference.common import assert_refused, i32
from tests.reference.mla.attention_oracle import assert_near, attend, attend_rows

INF, NAN = math.inf, math.nan


def dense_case(lengths, page_size, d=24, h_k=1, dtype=torch.float32, seed=0):
    """A NaN cache with the sequences' keys scattered over it: (cache, block_table, keys [n, h_k, d] per sequence)."""
    g = torch.Generator().manual_seed(seed)
    width = -(-max(lengths) // page_size) + 1
    cache = torch.full((len(lengths) * width + 2, page_size, h_k, d), NAN, dtype=dtype)
    pages = torch.randperm(len(cache), generator=g).tolist()
    garbage = [-1, 2**31 - 1, -(2**31), len(cache), 0]
    table = i32([[garbage[(b + j) % 5] for j in range(width)] for b in range(len(lengths))])
    keys = []
    for b, length in enumerate(lengths):
        rows = torch.randn(length, h_k, d, generator=g).to(dtype)
        for s in range(length):
            if s % page_size == 0:
                table[b, s // page_size] = pages.pop()
            cache[table[b, s // page_size], s % page_size] = rows[s]
        keys.append(rows)
    return cache, table, keys


def dense_oracle(q, keys, scale, d_v, causal):
    """q [B, s_q, h_q, d] -> out [B, s_q, h_q, d_v] and lse [B, h_q, s_q]. Heads of q share those of the keys."""
    batch, s_q = q.shape[:2]
    outs, lses = [], []
    for b in range(batch):
        for i in range(s_q):
            seen = max(0, len(keys[b]) - s_q + i + 1) if causal else len(keys[b])
            groups = q[b, i].unflatten(0, (keys[b].shape[1], -1))
            out, lse, _ = zip(*(attend(own, keys[b][:seen, h], scale, d_v) for h, own in enumerate(groups)))
            outs.append(torch.cat(out))
            lses.append(torch.cat(lse))
    return torch.stack(outs).unflatten(0, (batch, s_q)), torch.stack(lses).unflatten(0, (batch, s_q)).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("s_q", [1, 2, 4])
@pytest.mark.parametrize(("h_q", "h_k", "page_size"), [(3, 1, 4), (6, 2, 1), (4, 4, 64)])
def test_dense_against_float64(causal, s_q, h_q, h_k, page_size):
    """One sequence has no keys, and one has a single key, so that up to three queries come before it."""
    lengths = [9, 0, 1, 2, 17]
    cache, table, keys = dense_case(lengths, page_size, h_k=h_k)
    q = torch.randn(len(lengths), s_q, h_q, 24)
    out, lse = flash_mla_with_kvcache(q, cache, table, i32(lengths), 16, None, causal=causal)
    expected, expected_lse = dense_oracle(q, keys, 24**-0.5, 16, causal)
    assert out.dtype == torch.float32
    assert_near(out, expected)
    assert_near(lse, expected_lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dense_dtypes_and_scale(dtype):
    cache, table, keys = dense_case([7, 3], 2, d=576, dtype=dtype)
    q = torch.randn(2, 1, 2, 576).to(dtype)
    out, lse = flash_mla_with_kvcache(q, cache, table, i32([7, 3]), 512, None, softmax_scale=0.1)
    expected, expected_lse = dense_oracle(q, keys, 0.1, 512, False)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert_near(lse, expected_lse)
    assert_near(out, expected, 1e-2)
    default = flash_mla_with_kvcache(q, cache, table, i32([7, 3]), 512, None)
    assert_near(default[1], dense_oracle(q, keys, 1 / 24, 512, False)[1])


def test_dense_queries_are_not_touched_by_later_keys_that_are_nan():
    cache, table, keys = dense_case([5], 4)
    q = torch.randn(1, 2, 2, 24)
    cache[table[0, 1], 0] = NAN  # key 4: only the second query sees it
    out, lse = flash_mla_with_kvcache(q, cache, table, i32([5]), 16, None, causal=True)
    expected, expected_lse = dense_oracle(q[:, :1], [keys[0][:4]], 24**-0.5, 16, True)
    assert_near(out[:, :1], expected)
    assert_near(lse[:, :, :1], expected_lse)
    assert out[0, 1].isnan().all()


@pytest.mark.parametrize("causal", [False, True])
def test_dense_lengths_are_clipped_and_pages_that_do_not_exist_hold_no_keys(causal):
    cache, table, keys = dense_case([10, 12, 8], 4)
    q = torch.randn(3, 1, 2, 24)
    expected, expected_lse = dense_oracle(q, [keys[0][[0, 1, 2, 3, 8, 9]], keys[1], keys[2][:0]], 24**-0.5, 16, causal)
    for bad in (-1, len(cache), 2**31 - 1):
        table[0, 1] = bad
        out, lse = flash_mla_with_kvcache(q, cache, table[:, :3], i32([10, 100, -3]), 16, None, causal=causal)
        assert_near(out, expected)
        assert_near(lse, expected_lse)


def selected(cache_rows, indices, lengths=None):
    """The rows that indices [B, s_q, K] name, one tensor per query, without what is no key."""
    rows = []
    for b, queries in enumerate(indices):
        for listed in queries if lengths is None else queries[:, : lengths[b]]:
            rows.append(cache_rows[listed[(listed >= 0) & (listed < len(cache_rows))].long()])
    return rows


def sparse_oracle(q, rows, scale, d_v, sink=None):
    out, lse, _ = attend_rows(q.flatten(0, 1), rows, scale, d_v, sink)
    return out.view(*q.shape[:3], d_v), lse.view(q.shape[:3]).transpose(1, 2)


INDICES = i32(
    [
        [[3, 0, 3, 11, -1, 5], [-1, -1, -1, -1, -1, -1]],
        [[12, 2**31 - 1, -(2**31), 7, -5, 1], [12, 100, -2, 2**30, -1, -1]],
        [[0, 1, 2, 3, 4, 5], [11, 10, 9, 8, 7, 6]],
    ]
)
EXTRA_INDICES = i32([[[5, 0], [-1, 1]], [[6, -1], [7, 6]], [[2, 2], [3, 4]]])


def sparse(q, cache, d_v=16, **options):
    return flash_mla_with_kvcache(q, cache, None, None, d_v, None, **options)


@pytest.mark.parametrize(("dtype", "chunk"), [(torch.float32, 2**24), (torch.bfloat16, 24 * 6 * 4)])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("with_length", [False, True])
@pytest.mark.parametrize("with_extra", [False, True])
def test_sparse_against_float64(with_extra, with_length, with_sink, dtype, chunk, monkeypatch):
    monkeypatch.setattr(softmax_attention, "_CPU_CHUNK", chunk)
    q, cache, extra = torch.randn(3, 2, 5, 24), torch.randn(3, 4, 1, 24).to(dtype), torch.randn(2, 3, 1, 24).to(dtype)
    sink = torch.tensor([INF, -INF, 0.5, 80.0, -80.0]) if with_sink else None
    lengths, extra_lengths = ([3, 0, 100], [1, 2, 0]) if with_length else (None, None)
    rows = selected(cache.view(12, 24), INDICES, lengths)
    options = {"indices": INDICES, "attn_sink": sink, "topk_length": i32(lengths) if with_length else None}
    if with_extra:
        more = selected(extra.view(6, 24), EXTRA_INDICES, extra_lengths)
        rows = [torch.cat(pair) for pair in zip(rows, more)]
        options |= {"extra_k_cache": extra, "extra_indices_in_kvcache": EXTRA_INDICES}
        options |= {"extra_topk_length": i32(extra_lengths) if with_length else None}
    out, lse = sparse(q, cache, **options)
    expected, expected_lse = sparse_oracle(q, rows, 24**-0.5, 16, sink)
    assert out.dtype == q.dtype and lse.transpose(1, 2).is_contiguous()
    assert_near(out, expected)
    assert_near(lse, expected_lse)


def test_sparse_rows_that_no_query_selects_may_be_nan():
    cache = torch.full((4, 4, 1, 24), NAN)
    cache.view(16, 24)[[3, 5, 8]] = torch.randn(3, 24)
    indices = i32([[[3, -1, 8, 5, 0]], [[5, 16, -1, -1, 1]]])
    q = torch.randn(2, 1, 2, 24)
    # the last index of both rows names a NaN key, but lies beyond topk_length
    out, lse = sparse(q, cache, indices=indices, topk_length=i32([4, 4]))
    expected, expected_lse = sparse_oracle(q, selected(cache.view(16, 24), indices[:, :, :4]), 24**-0.5, 16)
    assert_near(out, expected)
    assert_near(lse, expected_lse)


def test_a_selected_nan_reaches_its_own_query_only():
    cache = torch.randn(1, 4, 1, 24)
    cache[0, 2] = NAN
    out, lse = sparse(torch.randn(1, 2, 3, 24), cache, indices=i32([[[0, 1], [1, 2]]]))
    assert out[0, 0].isfinite().all() and out[0, 1].isnan().all()
    assert lse[0, :, 0].isfinite().all() and lse[0, :, 1].isnan().all()


def byte_cache(layout, pages, page_size):
    """A cache of random rows, and what its bytes mean."""
    cache = make_v4_cache(pages, page_size) if layout == "v4" else torch.zeros(pages, page_size, 1, 656).byte()
    slots = torch.arange(pages * page_size)
    write_kv_cache(torch.randn(len(slots), 512 if layout == "v4" else 576), cache, slots)
    return cache, read_kv_cache(cache, slots)


@pytest.mark.parametrize(("layout", "d"), [("v32", 576), ("v4", 512)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_byte_caches(layout, d, dtype):
    (cache, rows), (extra, extra_rows) = byte_cache(layout, 3, 4), byte_cache(layout, 2, 3)
    q = torch.randn(3, 2, 2, d) * 0.3
    extra_indices = i32([[[5, -1], [1, 6]]] * 3)
    pages = torch.cat((rows[8:12], rows[0:4]))
    main, more = selected(rows, INDICES), selected(extra_rows, extra_indices)
    for options, keys in (
        ({"indices": INDICES}, main),
        (
            {
                "indices": INDICES,
                "extra_k_cache": extra.view(dtype),
                "extra_indices_in_kvcache": extra_indices,
            },
            [torch.cat(pair) for pair in zip(main, more)],
        ),
        (
            {"block_table": i32([[2, 0]] * 3), "cache_seqlens": i32([6, 0, 4])},
            [pages[:n] for n in (6, 6, 0, 0, 4, 4)],
        ),
    ):
        given = {"block_table": None, "cache_seqlens": None, "head_dim_v": 512, "tile_scheduler_metadata": None}
        out, lse = flash_mla_with_kvcache(q, cache.view(dtype), **given | options, is_fp8_kvcache=True)
        expected, expected_lse = sparse_oracle(q, keys, d**-0.5, 512)
        assert_near(out, expected)
        assert_near(lse, expected_lse)


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
SPARSE = {"block_table": None, "cache_seqlens": None, "indices": INDICES}
DENSE = {"block_table": i32([[0]] * 3), "cache_seqlens": i32([1] * 3)}


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (SPARSE, {"causal": True}, "causal: must be False with indices, got True"),
        (SPARSE, {"attn_sink": torch.zeros(4)}, r"attn_sink: shape must be \[5\], got \[4\]"),
        (SPARSE, {"topk_length": i32([1])}, r"topk_length: shape must be \[3\], got \[1\]"),
        (SPARSE, {"indices": INDICES.long()}, "indices: dtype must be int32, got int64"),
        (SPARSE, {"indices": INDICES[:2]}, r"indices: shape must be \[3, 2, K\], got \[2, 2, 6\]"),
        (
            SPARSE,
            {"k_cache": CACHE.expand(3, 4, 5, 24)},
            r"k_cache: shape must be \[pages, P, 1, row\], got \[3, 4, 5,",
        ),
        (SPARSE, {"k_cache": CACHE[..., :20]}, "k_cache: a last dimension of 20 means d = 20, but q has d = 24"),
        (SPARSE, {"k_cache": BYTES}, "k_cache: dtype must be float32, .* got uint8"),
        (SPARSE, {"is_fp8_kvcache": True}, "k_cache: dtype must be uint8, .* got float32"),
        (SPARSE, {"k_cache": BYTES, "is_fp8_kvcache": True}, "of 656 means d = 576, but q has d = 24"),
        (SPARSE, {"head_dim_v": 25}, "head_dim_v: must be at most d = 24, got 25"),
        (SPARSE, {"extra_topk_length": i32([1] * 3)}, "extra_topk_length: must be None without extra_k_cache"),
        (SPARSE, {"extra_indices_in_kvcache": INDICES}, "extra_indices_in_kvcache: must be None without extra_k_cache"),
        (SPARSE, {"extra_k_cache": CACHE}, r"extra_indices_in_kvcache: must be a torch.Tensor, got NoneType"),
        (DENSE, {"attn_sink": torch.zeros(5)}, "attn_sink: must be None without indices, got Tensor"),
        (DENSE, {"topk_length": i32([1] * 3)}, "topk_length: must be None without indices, got Tensor"),
        (DENSE, {"k_cache": CACHE.expand(3, 4, 2, 24)}, "k_cache: its h_k heads must divide q's h_q = 5, got h_k = 2"),
        (DENSE, {"cache_seqlens": i32([1])}, r"cache_seqlens: shape must be \[3\], got \[1\]"),
        (DENSE, {"block_table": None}, r"block_table: must be a torch.Tensor, got NoneType"),
    ],
)
def test_wrong_arguments_are_named(base, change, message):
    good = {"q": torch.zeros(3, 2, 5, 24), "k_cache": CACHE, "head_dim_v": 16, "tile_scheduler_metadata": None} | base
    flash_mla_with_kvcache(**good)
    assert_refused(message, flash_mla_with_kvcache, **good | change)
