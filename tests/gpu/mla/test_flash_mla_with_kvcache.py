"""Dense decoding by flash_mla_with_kvcache on the GPU: numbers of heads, lengths, page sizes, split sequences, plans in
both calling styles, and CUDA graphs."""

from itertools import product

import pytest
import torch

import dsa
from dsa.cases.mla import old_plan, plan_cuts
from dsa.ops.mla.flash_mla_with_kvcache import _mla_metadata, _parts
from dsa.testing import poison_free_memory
from tests.gpu.attention import BF16, D_V, FP16, NAN, assert_writes_a_part, case_of, checked, int32, replayed
from tests.gpu.op_checks import assert_rows_stand_alone, assert_runs_have_the_same_bits, assert_same_bits, captured

CASE = case_of("flash_mla_with_kvcache dense")
BOUNDARIES = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 1000)
SEQUENCE = "q", "block_table", "cache_seqlens"
HEADS = [(1, 1), (3, 1), (8, 1), (9, 3), (16, 1), (32, 1), (63, 1), (64, 1), (96, 1), (126, 2), (128, 1), (128, 8)]
SPLIT = [[1], [64], [130], [100_000], [40_000, 3], [2048] * 9, [777] * 300, [0] * 5, [20_000] * 70]
MANY_SPLIT = [*product(SPLIT, (64, 128)), ([i * 77 % 200 for i in range(5000)], 8), ([1_000_003, 70], 16)]


def inputs(lengths, s_q=1, heads=128, **options):
    return CASE.arguments("cuda", lengths=tuple(lengths), s_q=s_q, heads=heads, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("s_q", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_heads_and_queries_are_right(heads, kv_heads, s_q, causal, record_error):
    checked(CASE, inputs([700, *BOUNDARIES, 5000], s_q, heads, kv_heads=kv_heads, causal=causal), record_error)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("page", [16, 32, 48, 64, 80, 96, 128, 256])
def test_pages_of_any_size_are_right(page, heads, dtype, record_error):
    checked(CASE, inputs([*BOUNDARIES, 3333], 2, heads, page=page, dtype=dtype, causal=True), record_error)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("lengths", "heads"), MANY_SPLIT)
def test_splits_and_many_sequences_are_right(lengths, heads, invariant, record_error):
    checked(CASE, inputs(lengths, 1, heads, invariant=invariant), record_error)


def keys_of(given, b):
    page, position = given["k_cache"].shape[1], torch.arange(int(given["cache_seqlens"][b]), device="cuda")
    return given["block_table"][b, position // page].long() * page + position % page


@pytest.mark.parametrize("scale", [10.0, 2400.0])
@pytest.mark.parametrize("heads", [16, 128])
def test_large_logits_do_not_overflow(heads, scale, record_error):
    """Exponentials would overflow if the maximum were not subtracted."""
    _, lse = checked(CASE, inputs([500, 65, 3000], 2, heads, causal=True, scale=scale), record_error)
    assert lse.max() > 5 * scale


def test_a_maximum_that_rises_from_tile_to_tile(record_error):
    """The maximum of a sequence's logits rises from tile to tile by less or by more than the threshold for rescaling O.
    In one sequence it falls."""
    given = inputs([1024] * 6, 1, 64)
    rows, tile = given["k_cache"].view(-1, 576), torch.arange(1024, device="cuda")[:, None] // 64
    for b, step in enumerate((0.5, 3.0, 6.0, 20.0, -6.0, 0.0)):
        lift = given["q"][b].float().mean((0, 1)).sign() * tile * step / 320
        slots = keys_of(given, b)
        rows[slots] = (rows[slots].float() * 0.1 + lift).bfloat16()
    checked(CASE, given, record_error)


def test_one_key_gives_its_value_exactly():
    given = inputs([1, 1, 1])
    out, _ = checked(CASE, given)
    keys = given["k_cache"].view(-1, 576)[torch.cat([keys_of(given, b) for b in range(3)])]
    assert torch.equal(out, keys[:, None, None, :D_V].expand(-1, 1, 128, -1))


def test_pages_outside_the_cache_and_its_block_table_hold_no_keys():
    given = inputs([300, 300, 128, 256], 1, 64)
    table = given["block_table"]
    table[0, 1], table[1, 4], table[2, :2] = -1, len(given["k_cache"]), 10**9
    given["cache_seqlens"][3] = 2**31 - 1
    checked(CASE, given | {"block_table": table[:, :5]})


def test_plans_of_both_styles_are_right():
    given = inputs([700, 0, 5000, 64], 2, scale=0.1, causal=True)
    meta, nothing = dsa.get_mla_metadata()
    # The other plans know an upper limit of the lengths from the width of the block table. `old_plan` does not, so it
    # can split the sequences at other keys, and its bits can differ.
    plans = [old_plan(given).values(), (meta, nothing), (meta, None), (None, None)]
    names = "tile_scheduler_metadata", "num_splits"
    got = [checked(CASE, given | dict(zip(names, plan))) for plan in plans]
    assert_same_bits(got[2:], (got[1], got[1]))


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_a_batch_invariant_result_does_not_depend_on_other_sequences(heads):
    """Without enable_batch_invariant the bits can depend on the other sequences, and here they do."""
    given = inputs([2500, 64, 9000, 0, 40_000, 2048, 2049], 2, heads, causal=True, invariant=True)
    parts = [torch.randperm(7).cuda(), *(slice(b, b + 1) for b in range(7))]
    whole = assert_rows_stand_alone(CASE.run, given, SEQUENCE, parts)
    wide = torch.nn.functional.pad(given["block_table"], (0, 5000), value=-1)
    assert_same_bits(CASE.run(given | {"block_table": wide}), whole)
    planned = given | {"enable_batch_invariant": False}
    alone = planned | {name: given[name][4:5] for name in SEQUENCE}
    assert not torch.equal(CASE.run(planned)[0][4], CASE.run(alone)[0][0])


@pytest.mark.parametrize("heads", [16, 128])
def test_two_hundred_runs_have_the_same_bits(heads):
    given = inputs([2500, 64, 9000, 0, 40_000, 777, 1], 2, heads, plan="old")
    assert_runs_have_the_same_bits(CASE.run, given, times=200)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("s_q", [1, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (16, 1), (126, 2), (128, 1)])
def test_a_part_of_a_tensor_is_written(heads, kv_heads, s_q, dtype):
    given = inputs([700, *BOUNDARIES, 9000], s_q, heads, kv_heads=kv_heads, dtype=dtype)
    for options in ({"causal": True}, {"enable_batch_invariant": True}):
        assert_writes_a_part(CASE, given | options)


@pytest.mark.parametrize("style", ["planned in the graph", "planned before it", "batch-invariant"])
@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("heads", [16, 128])
def test_a_graph_of_short_sequences_is_replayed_for_long_and_empty_ones(heads, into, style):
    lengths = [[5, 60, 0, 1], [3000, 64, 9000, 0], [0, 0, 0, 0], [1, 4000, 65, 20_000]]
    given = inputs([max(column) for column in zip(*lengths)], 2, heads, causal=True)
    given["cache_seqlens"].copy_(int32(lengths[0]))
    given |= old_plan(given) if style == "planned before it" else {"enable_batch_invariant": style == "batch-invariant"}
    whole = torch.full((4, 2, heads + 8, D_V), NAN, dtype=BF16, device="cuda")
    given |= {"out": whole[:, :, 4:-4]} if into else {}

    def call():
        plan = {"tile_scheduler_metadata": dsa.get_mla_metadata()[0]} if style == "planned in the graph" else {}
        return CASE.run(given | plan)

    tensors = {"cache_seqlens": given["cache_seqlens"]}
    for found in replayed(call, tensors, ({"cache_seqlens": int32(new)} for new in lengths)):
        CASE.check(given, found)
        assert whole[:, :, :4].isnan().all() and whole[:, :, -4:].isnan().all()


def test_a_plan_that_comes_with_a_graph_serves_that_graph_alone():
    """A plan made in a capture contains no numbers until the graph is replayed. Calls outside the graph, or in another
    graph, must not use this plan."""
    given, (meta, _) = inputs([700, 64, 20_000], 2, 16, causal=True), dsa.get_mla_metadata()
    CASE.run(given)
    given["tile_scheduler_metadata"] = meta
    graphs, got = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            got.append([CASE.run(given) for _ in range(2)])
    in_graph = meta.tile_scheduler_metadata
    checked(CASE, given)
    assert meta.tile_scheduler_metadata is not in_graph and meta.capture is None
    for graph, results in zip(reversed(graphs), reversed(got)):
        graph.replay()
        for found in results:
            CASE.check(given, found)


def test_the_host_does_not_wait_for_the_gpu_when_it_makes_plans():
    """In a capture PyTorch raises an error if the host waits for the GPU or copies from pageable host memory."""
    lengths = int32([700, 64, 0, 2000])
    requests = ((lengths, 16, 1), (lengths, 16, 1, 16, True, 2048))

    def plans():
        return [dsa.get_mla_metadata(*request) for request in requests]

    graph, got = captured(plans)
    graph.replay()
    assert_same_bits(got, plans())


PLANNED = [[4096] * 128, [131072], [1], [0], [0, 0, 5, 0], [64] * 1000, [100_000, 1, 1, 1], [7] * 400]
PLANNED.append([i * i * 8 % 50_000 for i in range(77)])


@pytest.mark.parametrize("lengths", PLANNED, ids=lambda lengths: f"{len(lengths)} of {max(lengths)}")
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("rows", "kv_heads"), [(16, 1), (128, 1), (1024, 8)])
def test_parts_of_a_plan_are_full_up_to_the_mean_and_one_overhead(lengths, rows, kv_heads, known):
    """A part costs its key tiles plus an overhead for each sequence. No part costs more than the mean plus one
    overhead. known: whether the call passes the largest length, on which the number of parts and the overhead depend"""
    poison_free_memory(mebibytes=8)
    most = max(lengths) if known else 0
    _, overhead = _parts(int32(lengths), rows, kv_heads, most)
    plan, splits = _mla_metadata(int32(lengths), rows, kv_heads, most)
    cuts = [iter(own) for own in plan_cuts(lengths, plan, splits)]
    costs = []
    for first, _, last, *_ in plan.tolist():
        tiles = [next(cuts[b]) for b in range(first, last + 1)]
        costs.append(sum(end - begin + overhead for begin, end in tiles))
    assert max(costs) <= -(-sum(-(-n // 64) + overhead for n in lengths) // len(plan)) + overhead
