import math
import struct

import pytest
import torch

from dsa.reference import flash_mla_with_kvcache, make_v4_cache
from dsa.reference.mla import softmax_attention
from tests.reference.gemm import e4m3
from tests.reference.mla.attention_oracle import assert_near, attend_one, attend_rows

INF, NAN = math.inf, math.nan


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


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
    batch, s_q, h_q, _ = q.shape
    out = torch.zeros(batch, s_q, h_q, d_v, dtype=torch.float64)
    lse = torch.zeros(batch, h_q, s_q, dtype=torch.float64)
    for b in range(batch):
        for i in range(s_q):
            seen = max(0, len(keys[b]) - s_q + i + 1) if causal else len(keys[b])
            for h in range(h_q):
                k = keys[b][:seen, h * keys[b].shape[1] // h_q]
                out[b, i, h], lse[b, h, i], _ = attend_one(q[b, i, h], k, scale, d_v)
    return out, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("s_q", [1, 2, 4])
@pytest.mark.parametrize(("h_q", "h_k", "page_size"), [(3, 1, 4), (6, 2, 1), (4, 4, 64)])
def test_dense_against_float64(causal, s_q, h_q, h_k, page_size):
    lengths = [9, 0, 1, 2, 17]
    cache, table, keys = dense_case(lengths, page_size, h_k=h_k)
    q = torch.randn(len(lengths), s_q, h_q, 24)
    got = flash_mla_with_kvcache(q, cache, table, i32(lengths), 16, None, causal=causal)
    out, lse = dense_oracle(q, keys, 24**-0.5, 16, causal)
    assert got[0].dtype == torch.float32 and got[1].shape == (5, h_q, s_q)
    assert_near(got[0], out)
    assert_near(got[1], lse)
    assert got[0][1].eq(0).all() and got[1][1].eq(INF).all()
    if causal and s_q == 4:
        # sequence 2 has one key: its first three queries come before it
        assert got[0][2, :3].eq(0).all() and got[1][2, :, :3].eq(INF).all() and got[1][2, :, 3].isfinite().all()


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


def test_dense_pages_that_do_not_exist_hold_no_keys():
    cache, table, keys = dense_case([10], 4)
    q = torch.randn(1, 1, 2, 24)
    for bad in (-1, len(cache), 2**31 - 1):
        table[0, 1] = bad
        got = flash_mla_with_kvcache(q, cache, table, i32([10]), 16, None)
        out, lse = dense_oracle(q, [keys[0][[0, 1, 2, 3, 8, 9]]], 24**-0.5, 16, False)
        assert_near(got[0], out)
        assert_near(got[1], lse)


@pytest.mark.parametrize("causal", [False, True])
def test_dense_negative_lengths_are_empty(causal):
    cache, table, _ = dense_case([8], 4)
    out, lse = flash_mla_with_kvcache(torch.randn(1, 2, 2, 24), cache, table, i32([-3]), 16, None, causal=causal)
    assert out.eq(0).all() and lse.eq(INF).all()


@pytest.mark.parametrize("causal", [False, True])
def test_dense_lengths_beyond_the_table(causal):
    cache, table, keys = dense_case([8], 4)
    q = torch.randn(1, 2, 2, 24)
    got = flash_mla_with_kvcache(q, cache, table[:, :2], i32([100]), 16, None, causal=causal)
    assert_near(got[0], dense_oracle(q, keys, 24**-0.5, 16, False)[0])


def sparse_oracle(q, selected, scale, d_v, sink=None):
    """selected[b][i]: the key rows, already decoded."""
    batch, s_q, h_q, _ = q.shape
    rows = [selected[b][i] for b in range(batch) for i in range(s_q)]
    out, lse, _ = attend_rows(q.flatten(0, 1), rows, scale, d_v, sink)
    return out.view(batch, s_q, h_q, d_v), lse.view(batch, s_q, h_q).transpose(1, 2)


def pick(cache_rows, indices, lengths=None):
    """The rows that indices [B, s_q, K] name, in order, without those that are no key."""
    return [
        [
            torch.stack([cache_rows[j] for j in kept]) if kept else torch.zeros(0, cache_rows.shape[1])
            for kept in (
                [
                    j
                    for position, j in enumerate(row.tolist())
                    if 0 <= j < len(cache_rows) and (lengths is None or position < lengths[b])
                ]
                for row in indices[b]
            )
        ]
        for b in range(len(indices))
    ]


INDICES = i32(
    [
        [[3, 0, 3, 11, -1, 5], [-1, -1, -1, -1, -1, -1]],
        [[12, 2**31 - 1, -(2**31), 7, -5, 1], [12, 100, -2, 2**30, -1, -1]],
        [[0, 1, 2, 3, 4, 5], [11, 10, 9, 8, 7, 6]],
    ]
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_length", [False, True])
def test_sparse_against_float64(dtype, with_length):
    cache = torch.randn(3, 4, 1, 24).to(dtype)
    q = torch.randn(3, 2, 5, 24)
    lengths = [3, 0, 100] if with_length else None
    got = flash_mla_with_kvcache(
        q, cache, None, None, 16, None, indices=INDICES, topk_length=i32(lengths) if with_length else None
    )
    out, lse = sparse_oracle(q, pick(cache.view(12, 24), INDICES, lengths), 24**-0.5, 16)
    assert got[0].dtype == q.dtype and got[1].shape == (3, 5, 2) and got[1].transpose(1, 2).is_contiguous()
    assert_near(got[0], out)
    assert_near(got[1], lse)
    empty = got[1].transpose(1, 2) == INF
    assert empty[0, 1].all() and empty[1, 1].all() and empty[1, 0].all() == with_length
    assert got[0][empty].eq(0).all()


def test_sparse_rows_that_no_query_selects_may_be_nan():
    cache = torch.full((4, 4, 1, 24), NAN)
    for slot in (3, 5, 8):
        cache[slot // 4, slot % 4] = torch.randn(24)
    indices = i32([[[3, -1, 8, 5, 0]], [[5, 16, -1, -1, 1]]])
    q = torch.randn(2, 1, 2, 24)
    # the last index of both rows names a NaN key, but lies beyond topk_length
    got = flash_mla_with_kvcache(q, cache, None, None, 16, None, indices=indices, topk_length=i32([4, 4]))
    out, lse = sparse_oracle(q, pick(cache.view(16, 24), indices[:, :, :4]), 24**-0.5, 16)
    assert_near(got[0], out)
    assert_near(got[1], lse)


def test_a_selected_nan_reaches_its_own_query_only():
    cache = torch.randn(1, 4, 1, 24)
    cache[0, 2] = NAN
    indices = i32([[[0, 1], [1, 2]]])
    out, lse = flash_mla_with_kvcache(torch.randn(1, 2, 3, 24), cache, None, None, 16, None, indices=indices)
    assert out[0, 0].isfinite().all() and out[0, 1].isnan().all()
    assert lse[0, :, 0].isfinite().all() and lse[0, :, 1].isnan().all()


def test_sinks():
    cache, q = torch.randn(3, 4, 1, 24), torch.randn(3, 2, 5, 24)
    sink = torch.tensor([INF, -INF, 0.5, 80.0, -80.0])
    args = (q, cache, None, None, 16, None)
    plain, lse = flash_mla_with_kvcache(*args, indices=INDICES)
    got, got_lse = flash_mla_with_kvcache(*args, indices=INDICES, attn_sink=sink)
    assert torch.equal(got_lse, lse)
    assert got[:, :, 0].eq(0).all() and torch.equal(got[:, :, 1], plain[:, :, 1])
    out, _ = sparse_oracle(q, pick(cache.view(12, 24), INDICES), 24**-0.5, 16, sink)
    assert_near(got, out)
    assert got.isfinite().all()


def test_sink_by_hand():
    # two equal logits ln 2: e^lse = 4, and a sink of ln 4 halves the mean of the values
    q = torch.tensor([[[[1.0, 0.0]]]])
    cache = torch.tensor([[math.log(2), 6.0], [math.log(2), 2.0]]).view(1, 2, 1, 2)
    sink = torch.tensor([math.log(4)])
    out, lse = flash_mla_with_kvcache(
        q, cache, None, None, 2, None, softmax_scale=1.0, indices=i32([[[0, 1]]]), attn_sink=sink
    )
    torch.testing.assert_close(lse, torch.tensor([[[math.log(4)]]]))
    torch.testing.assert_close(out, torch.tensor([[[[math.log(2) / 2, 2.0]]]]))


def test_extra_cache_joins_the_softmax():
    cache, extra = torch.randn(3, 4, 1, 24), torch.randn(2, 3, 1, 24)
    q, sink = torch.randn(3, 2, 5, 24), torch.randn(5)
    extra_indices = i32([[[5, 0], [-1, 1]], [[6, -1], [7, 6]], [[2, 2], [3, 4]]])
    for lengths in (None, [1, 2, 0]):
        got = flash_mla_with_kvcache(
            q,
            cache,
            None,
            None,
            16,
            None,
            indices=INDICES,
            attn_sink=sink,
            extra_k_cache=extra,
            extra_indices_in_kvcache=extra_indices,
            topk_length=i32([6, 2, 4]),
            extra_topk_length=None if lengths is None else i32(lengths),
        )
        main_rows = pick(cache.view(12, 24), INDICES, [6, 2, 4])
        extra_rows = pick(extra.view(6, 24), extra_indices, lengths)
        rows = [[torch.cat((main_rows[b][i], extra_rows[b][i])) for i in range(2)] for b in range(3)]
        out, lse = sparse_oracle(q, rows, 24**-0.5, 16, sink)
        assert_near(got[0], out)
        assert_near(got[1], lse)


def random_byte_cache(layout, pages, page_size, seed=0):
    """(cache, rows): random finite bytes, and what they mean, decoded byte by byte."""
    g = torch.Generator().manual_seed(seed)

    def e4m3_bytes(n):
        return [
            int(x) for x in torch.randint(0, 0x50, (n,), generator=g) + 128 * torch.randint(0, 2, (n,), generator=g)
        ]

    cache = make_v4_cache(pages, page_size) if layout == "v4" else torch.zeros(pages, page_size, 1, 656).byte()
    raw = torch.as_strided(cache, (pages, cache.stride(0)), (cache.stride(0), 1))
    nope, group = (448, 64) if layout == "v4" else (512, 128)
    rows = []
    for slot in range(pages * page_size):
        page, offset = divmod(slot, page_size)
        values = e4m3_bytes(nope)
        rope = torch.randn(64, generator=g).bfloat16()
        rope_bytes = b"".join(struct.pack("<f", x)[2:] for x in rope.tolist())
        if layout == "v4":
            exponents = torch.randint(122, 127, (7,), generator=g).tolist()
            scales = [2.0 ** (e - 127) for e in exponents]
            raw[page, offset * 576 : offset * 576 + 576] = torch.tensor([*values, *rope_bytes], dtype=torch.uint8)
            at = page_size * 576 + offset * 8
            raw[page, at : at + 8] = torch.tensor([*exponents, 0xEE], dtype=torch.uint8)
        else:
            packed = struct.pack("<4f", *(torch.rand(4, generator=g) * 0.3 + 0.01).tolist())
            scales = struct.unpack("<4f", packed)
            row = torch.tensor([*values, *packed, *rope_bytes], dtype=torch.uint8)
            raw[page, offset * 656 : (offset + 1) * 656] = row
        decoded = [e4m3.decode(b) * scales[i // group] for i, b in enumerate(values)]
        rows.append(torch.tensor(decoded + rope.tolist(), dtype=torch.float64))
    return cache, torch.stack(rows)


@pytest.mark.parametrize(("layout", "d"), [("v32", 576), ("v4", 512)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_byte_caches(layout, d, dtype):
    cache, rows = random_byte_cache(layout, 3, 4)
    extra, extra_rows = random_byte_cache(layout, 2, 3, seed=1)
    q = torch.randn(3, 2, 2, d) * 0.3
    got = flash_mla_with_kvcache(q, cache.view(dtype), None, None, 512, None, is_fp8_kvcache=True, indices=INDICES)
    out, lse = sparse_oracle(q, pick(rows, INDICES), d**-0.5, 512)
    assert_near(got[0], out)
    assert_near(got[1], lse)
    extra_indices = i32([[[5, -1], [1, 6]]] * 3)
    got = flash_mla_with_kvcache(
        q,
        cache.view(dtype),
        None,
        None,
        512,
        None,
        is_fp8_kvcache=True,
        indices=INDICES,
        extra_k_cache=extra.view(dtype),
        extra_indices_in_kvcache=extra_indices,
    )
    main, more = pick(rows, INDICES), pick(extra_rows, extra_indices)
    joined = [[torch.cat((main[b][i], more[b][i])) for i in range(2)] for b in range(3)]
    out, lse = sparse_oracle(q, joined, d**-0.5, 512)
    assert_near(got[0], out)
    assert_near(got[1], lse)
    # dense reads the same bytes
    got = flash_mla_with_kvcache(
        q, cache.view(dtype), i32([[2, 0]] * 3), i32([6, 0, 4]), 512, None, is_fp8_kvcache=True
    )
    order = torch.cat((rows[8:12], rows[0:4]))
    out, lse = sparse_oracle(q, [[order[:n]] * 2 for n in (6, 0, 4)], d**-0.5, 512)
    assert_near(got[0], out)
    assert_near(got[1], lse)


def test_chunks_of_queries_change_nothing(monkeypatch):
    cache, q = torch.randn(3, 4, 1, 24), torch.randn(3, 2, 5, 24)
    whole = flash_mla_with_kvcache(q, cache, None, None, 16, None, indices=INDICES)
    monkeypatch.setattr(softmax_attention, "_CPU_CHUNK", 24 * 6 * 4)
    parts = flash_mla_with_kvcache(q, cache, None, None, 16, None, indices=INDICES)
    torch.testing.assert_close(parts, whole)


def test_empty_batch_queries_selection_and_cache():
    cache = torch.randn(3, 4, 1, 24)
    for batch, s_q, k in ((0, 2, 6), (3, 0, 6), (3, 2, 0)):
        q, indices = torch.randn(batch, s_q, 5, 24), INDICES[:batch, :s_q, :k]
        out, lse = flash_mla_with_kvcache(q, cache, None, None, 16, None, indices=indices)
        assert out.shape == (batch, s_q, 5, 16) and lse.shape == (batch, 5, s_q)
        assert out.eq(0).all() and lse.eq(INF).all()
        dense = flash_mla_with_kvcache(q, cache, i32([[0]] * batch).view(batch, 1), i32([4] * batch), 16, None)
        assert dense[0].shape == out.shape and dense[1].shape == lse.shape
    out, lse = flash_mla_with_kvcache(torch.randn(3, 2, 5, 24), cache[:0], None, None, 16, None, indices=INDICES)
    assert out.eq(0).all() and lse.eq(INF).all()


def test_refuses_bad_arguments():
    q, cache = torch.randn(3, 2, 5, 24), torch.randn(3, 4, 1, 24)
    sparse = {"block_table": None, "cache_seqlens": None, "indices": INDICES}
    dense = {"block_table": i32([[0]] * 3), "cache_seqlens": i32([1] * 3)}
    byte_cache = torch.zeros(3, 4, 1, 656, dtype=torch.uint8)
    bad = [
        (sparse, {"causal": True}, "causal: must be False with indices, got True"),
        (sparse, {"attn_sink": torch.zeros(4)}, r"attn_sink: shape must be \[5\], got \[4\]"),
        (sparse, {"topk_length": i32([1])}, r"topk_length: shape must be \[3\], got \[1\]"),
        (sparse, {"indices": INDICES.long()}, "indices: dtype must be int32, got int64"),
        (sparse, {"indices": INDICES[:2]}, r"indices: shape must be \[3, 2, K\], got \[2, 2, 6\]"),
        (
            sparse,
            {"k_cache": cache.expand(3, 4, 5, 24)},
            r"k_cache: shape must be \[pages, P, 1, row\], got \[3, 4, 5, 24\]",
        ),
        (sparse, {"k_cache": cache[..., :20]}, "k_cache: a last dimension of 20 means d = 20, but q has d = 24"),
        (sparse, {"k_cache": byte_cache}, "k_cache: dtype must be float32, .* got uint8"),
        (sparse, {"is_fp8_kvcache": True}, "k_cache: dtype must be uint8, .* got float32"),
        (sparse, {"k_cache": byte_cache, "is_fp8_kvcache": True}, "of 656 means d = 576, but q has d = 24"),
        (sparse, {"head_dim_v": 25}, "head_dim_v: must be at most d = 24, got 25"),
        (sparse, {"extra_topk_length": i32([1] * 3)}, "extra_topk_length: must be None without extra_k_cache"),
        (sparse, {"extra_indices_in_kvcache": INDICES}, "extra_indices_in_kvcache: must be None without extra_k_cache"),
        (dense, {"attn_sink": torch.zeros(5)}, "attn_sink: must be None without indices, got Tensor"),
        (dense, {"topk_length": i32([1] * 3)}, "topk_length: must be None without indices, got Tensor"),
        (dense, {"k_cache": cache.expand(3, 4, 2, 24)}, "k_cache: its h_k heads must divide q's h_q = 5, got h_k = 2"),
        (dense, {"cache_seqlens": i32([1])}, r"cache_seqlens: shape must be \[3\], got \[1\]"),
    ]
    for base, change, message in bad:
        arguments = {
            "q": q,
            "k_cache": cache,
            "head_dim_v": 16,
            "tile_scheduler_metadata": None,
            **base,
        }
        flash_mla_with_kvcache(**arguments)
        with pytest.raises(ValueError, match=message):
            flash_mla_with_kvcache(**{**arguments, **change})
    with pytest.raises(TypeError, match=r"block_table: must be a torch.Tensor, got NoneType"):
        flash_mla_with_kvcache(q, cache, None, i32([1] * 3), 16, None)
    with pytest.raises(TypeError, match=r"extra_indices_in_kvcache: must be a torch.Tensor, got NoneType"):
        flash_mla_with_kvcache(q, cache, None, None, 16, None, indices=INDICES, extra_k_cache=cache)
