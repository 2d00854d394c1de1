"""Attention over sliding windows on the GPU: sliding_window_attention and window_sparse_attention (with selected
compressed keys) over packed keys, and sliding_window_decode over paged caches and ring buffers."""

import pytest
import torch

import dsa
from dsa.cases.mla_windows import LENGTHS, window_list
from tests.gpu.attention import BF16, D_V, INF, KINDS, NAN, case_of, checked, int32, replayed
from tests.gpu.op_checks import assert_same_bits

ALONE, JOINED, DECODE = map(case_of, ("sliding_window_attention", "window_sparse_attention", "sliding_window_decode"))
by_op = pytest.mark.parametrize("case", [ALONE, JOINED], ids=lambda case: case.name)
BOUNDS = "cu_seqlens_q", "cu_seqlens_k"


def inputs(case, **sizes):
    return case.arguments("cuda", **{"window": 128} | sizes)


def empty(found, rows=slice(None)):
    return found[0][rows].eq(0).all() and found[1][rows].eq(INF).all()


@pytest.mark.parametrize(("d", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("heads", [1, 8, 16, 32, 64, 80, 128])
@by_op
def test_heads_are_right(case, heads, d, dtype, record_error):
    checked(case, inputs(case, heads=heads, d=d, dtype=dtype), record_error)


@pytest.mark.parametrize("d", [576, 512])
@pytest.mark.parametrize("heads", [8, 128])
@pytest.mark.parametrize("window", [1, 7, 63, 64, 65, 128, 1000, 10**9])
def test_windows_of_any_size_are_right(window, heads, d, record_error):
    """Queries before the first key of their sequence, and queries of no sequence, have no keys."""
    given = inputs(ALONE, heads=heads, d=d, window=window)
    found, without = checked(ALONE, given, record_error), window_list(given | {"window": 1}).eq(-1).all(1)
    assert 7 < int(without.sum()) < 20 and empty(found, without)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (50, 7), (900, 64), (5000, 512), (900, 1024)])
@pytest.mark.parametrize("d", [576, 512])
@pytest.mark.parametrize("window", [1, 100, 128])
def test_window_and_selected_are_right(window, d, n, k, record_error):
    given = inputs(JOINED, entries=n, top_k=k, d=d, window=window, counted=False)
    given["indices"][3], given["indices"][4, : k // 2] = -1, 2**31 - 1
    checked(JOINED, given, record_error)
    lengths = int32([k, 0, -1, 2**31 - 1, k // 2, 1]).repeat(100)[: len(given["q"])]
    checked(JOINED, given | {"topk_length": lengths}, record_error)


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("length", [131, 133, 3000])
@by_op
def test_a_chunk_is_right(case, length, heads, record_error):
    """V4's sizes. An H200 has 132 SMs."""
    sizes = {"entries": 1250, "top_k": 512} if case is JOINED else {}
    checked(case, inputs(case, sequences=((length, length + 5000),), heads=heads, **sizes), record_error)


@pytest.mark.parametrize("window", [7, 128, 3000])
@by_op
def test_a_list_made_before_gives_the_same_bits(case, window):
    given = inputs(case, window=window)
    name = "window_indices" if case is JOINED else "indices"
    assert_same_bits(case.run(given | {name: window_list(given)}), case.run(given))


@pytest.mark.parametrize("heads", [16, 128])
@by_op
def test_keys_that_no_query_attends_to_change_no_bit(case, heads):
    given = inputs(case, sequences=((40, 700), (3, 3), (9, 400)), heads=heads, window=50)
    given |= {"indices": given["indices"] // 2 * 2} if case is JOINED else {}
    clean = checked(case, given)
    unseen = torch.isin(torch.arange(len(given["kv"]), device="cuda"), window_list(given), invert=True)
    assert unseen.sum() > 600
    for bad in (NAN, INF, -INF):
        given["kv"][unseen] = bad
        if case is JOINED:
            given["compressed"][1::2] = bad
        assert_same_bits(case.run(given), clean)


@pytest.mark.parametrize("seed", range(10))
@by_op
def test_whatever_cu_seqlens_hold_results_are_between_the_keys(case, seed):
    torch.manual_seed(seed)
    memory = torch.full((900, 1, 512), NAN, dtype=BF16, device="cuda")
    given = inputs(case, sequences=((198, 298),), seed=seed)
    kv = memory[300:600].copy_(given["kv"])
    garbage = int32([-(2**31), 2**31 - 1, -1, 0, 1, 50, 200, 299, 300, 301, 1000, 2**30])
    given |= {"kv": kv} | {name: garbage[torch.randint(len(garbage), (9,), device="cuda")] for name in BOUNDS}
    out, lse = case.run(given | ({"compressed": kv} if case is JOINED else {}))
    assert out.isfinite().all() and out.abs().max() <= 1.01 * kv.abs().max() and not lse.isnan().any()


def test_without_any_keys_results_are_zero():
    given, alone = inputs(JOINED, counted=False, invalid=0.0), inputs(ALONE)
    none = {"compressed": given["compressed"][:0]}, {"indices": given["indices"][:, :0]}
    zeros = torch.zeros_like(given["cu_seqlens_q"])
    for change in (
        {"kv": given["kv"][:0], "cu_seqlens_k": zeros},
        {"cu_seqlens_q": zeros},
        dict.fromkeys(BOUNDS, int32([0])),
    ):
        assert empty(checked(ALONE, alone | change)) and all(empty(checked(JOINED, given | change | x)) for x in none)
        checked(JOINED, given | change)
    same = alone | {name: given[name] for name in ("q", "kv", "attn_sink")}
    for nothing_selected in none:
        assert_same_bits(checked(JOINED, given | nothing_selected), ALONE.run(same))


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(
    ("window", "s_q", "heads", "page"),
    [(1, 1, 16, 64), (7, 4, 64, 48), (128, 1, 8, 64), (128, 2, 1, 256), (128, 3, 128, 48), (1000, 4, 80, 64)],
)
@pytest.mark.parametrize("layout", ["bf16, 576", "bf16, 512", "fp16, 512", "656 bytes", "584 bytes"])
def test_decoding_is_sparse_attention_to_the_windows_slots(layout, window, s_q, heads, page, ring, record_error):
    page = max(page, window + s_q - 1) if ring else page
    sizes = {"layout": layout, "lengths": LENGTHS, "s_q": s_q, "heads": heads, "page": page, "ring": ring}
    given = inputs(DECODE, window=window, **sizes)
    found = checked(DECODE, given, record_error)
    assert empty(found, 0) and found[1][1, :, :-1].eq(INF).all()
    table, lengths, cache = given["block_table"], given["cache_seqlens"], given["cache"]
    if not ring:
        bad = int32([-1, -(2**31), 2**31 - 1, len(cache), 2**25])[torch.randint(5, table.shape, device="cuda")]
        table = given["block_table"] = torch.where(torch.rand(table.shape, device="cuda") < 0.4, bad, table)
    slots = dsa.window_slots(table, lengths, s_q, page, window)
    options = {name: given[name] for name in ("softmax_scale", "is_fp8_kvcache", "attn_sink")}
    expected = dsa.flash_mla_with_kvcache(given["q"], cache, None, None, D_V, None, indices=slots, **options)
    assert_same_bits(checked(DECODE, given, record_error), expected)


@pytest.mark.parametrize("heads", [16, 128])
@by_op
def test_a_graph_takes_new_bounds(case, heads, record_error):
    """The captured call has cu_seqlens of 0. A graph that kept them would give every query the results of a query
    without keys."""

    def fresh(seed, queries=200, keys=900):
        bounds = (int32(torch.randint(0, most + 1, (9,)).sort().values) for most in (queries, keys))
        return inputs(case, sequences=((198, 898),), heads=heads, window=100, seed=seed) | dict(zip(BOUNDS, bounds))

    given = fresh(0, 0, 0)
    for found in replayed(lambda: case.run(given), given, map(fresh, range(1, 5))):
        record_error(case.check(given, found))


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(
    ("layout", "batch", "heads"), [("584 bytes", 40, 64), ("bf16, 512", 3, 16), ("656 bytes", 1, 128)]
)
def test_decoding_in_a_graph_takes_new_lengths(layout, batch, heads, ring, record_error):
    """The first sequence is always long, so the block table keeps its shape."""
    sizes = {"layout": layout, "s_q": 2, "heads": heads, "window": 100, "page": 128 if ring else 48, "ring": ring}

    def fresh(low, high):
        lengths = (999, *torch.randint(low, high, (batch,)).tolist())
        return inputs(DECODE, lengths=lengths, seed=high, **sizes)

    given, bounds = fresh(0, 1), [(0, 1), (0, 5), (90, 110), (0, 1000)]
    for found in replayed(lambda: DECODE.run(given), given, (fresh(*x) for x in bounds)):
        record_error(DECODE.check(given, found))
