"""Sliding-window attention on the CPU: the lists that kernels get and their lengths, calls without keys or queries, and
compiled graphs."""

import math

import pytest
import torch

import dsa
from dsa import reference
from dsa.cases import CASES
from dsa.kernels.mla.limits import TILE_N
from dsa.ops.mla import _sparse_attention as launch
from tests.reference.common import i32

BY_NAME = {case.name: case for case in CASES}
WINDOW, JOINED, DECODE = (
    BY_NAME[name] for name in ("sliding_window_attention", "window_sparse_attention", "sliding_window_decode")
)
SEQUENCES = {"sequences": ((3, 5), (0, 4), (4, 11)), "heads": 4, "window": 6}


def alone():
    return WINDOW.arguments(**SEQUENCES)


def joined():
    return JOINED.arguments(**SEQUENCES, entries=9, top_k=5)


def decode(layout="bf16, 576", window=6, **sizes):
    return DECODE.arguments(layout=layout, lengths=(24, 0, 9), heads=4, page=8, window=window, **sizes)


def layout(x):
    return x.shape, x.stride(), x.dtype


def assert_same(got, expected):
    for x, y in zip(got, expected, strict=True):
        assert layout(x) == layout(y) and torch.equal(x, y)


def test_a_list_has_no_more_columns_than_there_are_keys(named_launches):
    given, cached = alone(), decode()
    WINDOW.run(given | {"window": 10**9})
    assert named_launches.pop(0)[2][2].shape == (len(given["q"]), len(given["kv"]))
    named_launches.clear()
    DECODE.run(cached | {"window": 2**31 - 1})
    assert named_launches[0][2][2].shape == (3, 2, cached["block_table"].shape[1] * 8)


@pytest.mark.parametrize("pages", [None, 0])
def test_a_window_of_any_size_decodes_in_little_memory(pages):
    given = decode(window=100) | {"window": 2**31 - 1}
    table = given["block_table"] = given["block_table"][:, :pages]
    whole = DECODE.run(given)
    assert_same(whole, DECODE.run(given | {"window": max(1, table.shape[1] * 8)}))
    assert_same(whole, reference.sliding_window_decode(**given))


SHORT_WINDOW = (launch.SPLIT_COST + 1) * TILE_N  # in keys; for longer windows, queries may be split


@pytest.mark.parametrize("window", [1, 64, 128, SHORT_WINDOW])
def test_queries_with_short_windows_are_not_split(window):
    """If queries were split, the rounding of a query's result would depend on the number of queries in the call."""
    for queries in range(1, 300):
        for head_tiles in (1, 2):
            assert launch.stream_k(queries, head_tiles, -(-window // TILE_N), 132, may_split=True)[2] == 0


def test_the_docstring_says_which_windows_are_short():
    assert f"with windows of up to {SHORT_WINDOW} keys" in dsa.sliding_window_decode.__doc__


def test_nothing_to_attend_to(named_launches):
    given, few = joined() | {"topk_length": None}, alone()
    none = {"compressed": given["compressed"][:0]}, {"indices": given["indices"][:, :0]}
    no_keys, no_queries = {"kv": given["kv"][:0]}, {"q": given["q"][:0], "indices": given["indices"][:0]}
    for case, call in (
        (WINDOW, few | no_keys),
        (WINDOW, few | {"q": few["q"][:0]}),
        (WINDOW, few | {"q": few["q"][:, :0], "attn_sink": None}),
        *((JOINED, given | no_keys | x) for x in none),
        (JOINED, given | no_queries),
    ):
        bounds = torch.zeros_like(call["cu_seqlens_q"])
        out, lse = case.run(call | {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds})
        assert not out.any() and (lse == math.inf).all() and out.shape[:2] == lse.shape
    assert not named_launches
    for change in (no_keys, *none):
        JOINED.run(given | change)
    attended = [arguments for name, _, arguments in named_launches if name == "sparse_mla_swap_ab"]
    caches = [cache.data_ptr() for _, caches, *_ in attended for cache in caches]
    assert caches == [x.data_ptr() for x in (given["compressed"], given["kv"], given["kv"])]
    named_launches.clear()
    given = decode()
    sequences = {name: given[name][:0] for name in ("q", "block_table", "cache_seqlens")}
    for change in (sequences, {"q": given["q"][:, :0]}, {"cache": given["cache"][:0]}):
        out, lse = DECODE.run(given | change)
        assert not out.any() and (lse == math.inf).all()
    assert {name for name, _, _ in named_launches} <= {"window_slots"}


def test_parts_of_larger_tensors_are_used_where_they_are(named_launches):
    given = alone()
    wide = torch.nn.functional.pad(given["kv"], (8, 56))[..., 8:520]
    WINDOW.run(given | {"kv": wide})
    _, [keys], *_ = named_launches[-1][2]
    assert keys.stride()[1:] == (576, 1) and keys.data_ptr() == wide.data_ptr()
    # A list or a sink whose last dimension is not contiguous is copied, because it is small.
    near = torch.zeros(len(given["q"]), 12, dtype=torch.int32)[:, ::2]
    WINDOW.run(given | {"attn_sink": torch.randn(8)[::2], "indices": near})
    _, _, [indices], _, _, sink, *_ = named_launches[-1][2]
    assert indices.stride() == (6, 1) and sink.stride() == (1,)


def test_the_reference_refuses_what_cu_seqlens_hold_and_the_kernel_does_not_look(request):
    given, bad = alone(), i32([0, 9, 2, 7])
    for name, numbers in (("cu_seqlens_q", bad), ("cu_seqlens_k", bad * 3)):
        with pytest.raises(ValueError, match=f"{name}: must be non-decreasing numbers"):
            WINDOW.run(given | {name: numbers})
    named_launches = request.getfixturevalue("named_launches")
    WINDOW.run(given | {"cu_seqlens_q": bad, "cu_seqlens_k": bad})
    assert [name for name, _, _ in named_launches] == ["window_indices", "sparse_mla_swap_ab"]


@pytest.mark.parametrize("dynamic", [None, True])
def test_nodes_of_a_compiled_graph(dynamic):
    def layer(alone, joined, paged, ring):
        q = alone["q"]
        near = dsa.window_indices(alone["cu_seqlens_q"], alone["cu_seqlens_k"], q.shape[0], 6)
        first = dsa.sliding_window_attention(**alone | {"indices": near})
        second = dsa.window_sparse_attention(**joined | {"window_indices": near})
        return *first, *second, *dsa.sliding_window_decode(**paged), *dsa.sliding_window_decode(**ring)

    calls = alone(), joined(), decode("584 bytes"), decode(ring=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert_same(compiled(*calls), layer(*calls))
