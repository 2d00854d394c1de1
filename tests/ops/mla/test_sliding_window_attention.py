"""The bridges of attention to windows on the CPU: lists and their lengths, and compiled graphs."""

import math

import pytest
import torch

import dsa
from dsa import reference
from dsa.kernels.mla.limits import TILE_N
from dsa.ops.mla import _sparse_attention as launch

D_V, SCALE = 512, 0.05


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


CU_Q, CU_K = i32([0, 3, 3, 7]), i32([0, 5, 9, 20])


def packed(h_q=4, d=512, window=6, dtype=torch.bfloat16):
    """q, kv, cu_seqlens and window of three sequences."""
    q, kv = torch.randn(7, h_q, d).to(dtype), torch.randn(20, 1, d).to(dtype)
    return q, kv, CU_Q, CU_K, window


def selected(d=512, dtype=torch.bfloat16, k=5):
    """compressed, indices."""
    return torch.randn(9, 1, d).to(dtype), torch.randint(-2, 11, (7, k), dtype=torch.int32)


def decode_inputs(kind="bfloat16", d=512, s_q=2, page_size=8, h_q=4):
    """q, cache, block table and lengths of three sequences, one of them empty."""
    q, pages = torch.randn(3, s_q, h_q, d).bfloat16(), 10
    if kind == "bytes":
        cache = torch.zeros(pages, page_size, 1, 656, dtype=torch.uint8)
        cache = cache if d == 576 else reference.make_v4_cache(pages, page_size)
    else:
        cache = torch.zeros(pages, page_size, 1, d, dtype=getattr(torch, kind))
    reference.write_kv_cache(torch.randn(pages * page_size, d), cache, torch.arange(pages * page_size))
    return q, cache, torch.randperm(10)[:9].view(3, 3).int(), i32([3 * page_size, 0, page_size + 1])


def decoded(q, cache, table, lengths, window=6, **options):
    fp8 = cache.element_size() == 1
    return dsa.sliding_window_decode(q, cache, table, lengths, window, SCALE, is_fp8_kvcache=fp8, **options)


def layout(x):
    return x.shape, x.stride(), x.dtype


def assert_same(got, expected):
    for x, y in zip(got, expected, strict=True):
        assert layout(x) == layout(y) and torch.equal(x, y)


def test_no_more_columns_than_keys(named_launches):
    dsa.sliding_window_attention(*packed(window=10**9), SCALE)
    assert named_launches[0][2][2].shape == (7, 20)


def test_decoding_lists_no_more_keys_than_a_table_has_room_for(named_launches):
    q, cache, table, lengths = decode_inputs("bfloat16", 576)
    dsa.sliding_window_decode(q, cache, table, lengths, 2**31 - 1, SCALE)
    assert named_launches[0][2][2].shape == (3, 2, table.shape[1] * cache.shape[1])


@pytest.mark.parametrize("pages", [None, 0])
def test_a_window_of_any_size_decodes_in_little_memory(pages):
    q, cache, table, lengths = decode_inputs("bfloat16", 576)
    table = table[:, :pages]
    whole = dsa.sliding_window_decode(q, cache, table, lengths, 2**31 - 1, SCALE)
    assert_same(whole, dsa.sliding_window_decode(q, cache, table, lengths, max(1, table.shape[1] * 8), SCALE))
    assert_same(whole, reference.sliding_window_decode(q, cache, table, lengths, 2**31 - 1, SCALE))


SHORT_WINDOW = (launch.SPLIT_COST + 1) * TILE_N  # up to it a byte cache's CTAs have 16 or 32 heads


@pytest.mark.parametrize("window", [1, 64, 128, SHORT_WINDOW])
def test_queries_with_short_windows_are_not_split(window):
    """So that in decoding, too, a result does not depend on how many there are."""
    for queries in range(1, 300):
        for head_tiles in (1, 2):
            assert launch.stream_k(queries, head_tiles, -(-window // TILE_N), 132, may_split=True)[2] == 0


def test_the_docstring_says_which_windows_are_short():
    assert f"with windows of up to {SHORT_WINDOW} keys" in dsa.sliding_window_decode.__doc__


def test_nothing_to_attend_to(named_launches):
    q, kv, cu_q, cu_k, window = packed()
    compressed, indices = selected()
    for out, lse in (
        dsa.sliding_window_attention(q, kv[:0], cu_q, cu_k, window, SCALE),
        dsa.sliding_window_attention(q[:0], kv, cu_q, cu_k, window, SCALE),
        dsa.sliding_window_attention(q[:, :0], kv, cu_q, cu_k, window, SCALE),
        dsa.window_sparse_attention(q, kv[:0], cu_q, cu_k, window, compressed[:0], indices, SCALE),
        dsa.window_sparse_attention(q, kv[:0], cu_q, cu_k, window, compressed, indices[:, :0], SCALE),
        dsa.window_sparse_attention(q[:0], kv, cu_q, cu_k, window, compressed, indices[:0], SCALE),
    ):
        assert not out.any() and (lse == math.inf).all() and out.shape[:2] == lse.shape
    assert not named_launches
    dsa.window_sparse_attention(q, kv[:0], cu_q, cu_k, window, compressed, indices, SCALE)
    for none in ((compressed[:0], indices), (compressed, indices[:, :0])):
        dsa.window_sparse_attention(q, kv, cu_q, cu_k, window, *none, SCALE)
    attended = [arguments for name, _, arguments in named_launches if name == "sparse_mla_swap_ab"]
    caches = [cache for _, caches, *_ in attended for cache in caches]
    assert [cache.data_ptr() for cache in caches] == [compressed.data_ptr(), kv.data_ptr(), kv.data_ptr()]
    named_launches.clear()
    q, cache, table, lengths = decode_inputs()
    for arguments in (
        (q[:0], cache, table[:0], lengths[:0]),
        (q[:, :0], cache, table, lengths),
        (q, cache[:0], table, lengths),
    ):
        out, lse = decoded(*arguments)
        assert not out.any() and (lse == math.inf).all()
    assert {name for name, _, _ in named_launches} <= {"window_slots"}


def test_parts_of_larger_tensors_are_used_where_they_are(named_launches):
    q, kv, *rest = packed()
    wide = torch.nn.functional.pad(kv, (8, 56))[..., 8:520]
    dsa.sliding_window_attention(q, wide, *rest, SCALE)
    _, [keys], *_ = named_launches[-1][2]
    assert keys.stride()[1:] == (576, 1) and keys.data_ptr() == wide.data_ptr()
    # The list and the sink are small, and copied.
    near = torch.zeros(7, 12, dtype=torch.int32)[:, ::2]
    dsa.sliding_window_attention(q, kv, *rest, SCALE, attn_sink=torch.randn(8)[::2], indices=near)
    _, _, [indices], _, _, sink, *_ = named_launches[-1][2]
    assert indices.stride() == (6, 1) and sink.stride() == (1,)


def test_the_reference_refuses_what_cu_seqlens_hold_and_the_kernel_does_not_look(request):
    q, kv, _, _, window = packed()
    bad = i32([0, 9, 2, 7])
    for cu_q, cu_k, name in ((bad, CU_K, "cu_seqlens_q"), (CU_Q, bad * 3, "cu_seqlens_k")):
        with pytest.raises(ValueError, match=f"{name}: must be non-decreasing numbers"):
            dsa.sliding_window_attention(q, kv, cu_q, cu_k, window, SCALE)
    named_launches = request.getfixturevalue("named_launches")
    dsa.sliding_window_attention(q, kv, bad, bad, window, SCALE)
    assert [name for name, _, _ in named_launches] == ["window_indices", "sparse_mla_swap_ab"]


@pytest.mark.parametrize("dynamic", [None, True])
def test_nodes_of_a_compiled_graph(dynamic):
    def layer(q, kv, cu_q, cu_k, compressed, indices, cache, table, lengths):
        near = dsa.window_indices(cu_q, cu_k, q.shape[0], 6)
        first = dsa.sliding_window_attention(q, kv, cu_q, cu_k, 6, SCALE, indices=near)
        second = dsa.window_sparse_attention(q, kv, cu_q, cu_k, 6, compressed, indices, SCALE, window_indices=near)
        third = decoded(q[:6].unflatten(0, (3, 2)), cache, table, lengths)
        return *first, *second, *third, *decoded(q[:6].unflatten(0, (3, 2)), cache, None, lengths)

    arguments = (*packed()[:4], *selected(), *decode_inputs()[1:])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert_same(compiled(*arguments), layer(*arguments))
