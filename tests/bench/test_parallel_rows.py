"""The benchmark of models on several GPUs, with two processes on a CPU and the host's clock."""

import json
import re

import pytest
import torch

from dsa_bench.e2e.parallel import RESERVE, asked, asked_of_part, cases, layers_that_fit, names, shape
from dsa_bench.e2e.parts import collectives_share
from dsa_bench.e2e.silent import SilentRanks, without_collectives
from dsa_bench.e2e.stacks import STACKS, skeleton, with_layers
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.io.gpu_plan import plan
from dsa_layers.parallel.placement import Sharded
from dsa_layers.parallel.ranks import Ranks
from tests.bench import parallel_ranks
from tests.bench.small_stacks import small_stack
from tests.layers.parallel.processes import in_ranks
from tests.layers.parallel.ways import WAYS, split_by

RUNS = parallel_ranks.RUNS
OFTEN = [run for run in RUNS if run != "prefill 90"]


@pytest.mark.slow
def test_both_ranks_return_the_same_rows_whose_figures_follow_from_each_other():
    step, left = "decode 1 x 200", ["prefill 66", "prefill 90"]
    done = [shape("V3.2", run, 2) for run in RUNS if run != step]
    done += [shape("V4-Flash", run, 2) for run in RUNS if run not in left]
    options = {"models": ["V3.2", "V4-Flash"], "runs": RUNS, "done": done}
    (first, told), (second, _) = in_ranks(2, parallel_ranks.rows, options)
    assert first == second and json.loads(json.dumps(first)) == first
    assert [row["shape"] for row in first] == [shape("V3.2", step, 2)] + [shape("V4-Flash", run, 2) for run in left]
    for row in first:
        published = {"V3.2": 61, "V4-Flash": 43}[row["model"]]
        assert row == row | {
            **{"gpus": 2, "layers": 3, "published_layers": published, "memory": 10**9 + 1},
            "tokens": int(row["run"].split()[1]),
            "tokens/s": pytest.approx(row["tokens"] / row["ms"] * 1e3),
            "figure": f"{row['tokens/s']:.0f} tokens/s",
        }
        if row["run"] in OFTEN:
            assert row["collectives"] == 1 / 3 and row["few_layers"] == 4
            assert row["efficiency"] == row["shard_ms"] / row["ms"]
            assert row["speedup"] == row["one_gpu_ms"] / row["few_ms"]
        else:
            assert row["collectives"] is row["efficiency"] is row["speedup"] is row["shard_ms"] is None
    assert told[0].startswith("V3.2, 4 layers on 1: made")
    found = re.compile(r"V4-Flash \S+ .*, 4 layers on 2: [\d.]+ ms")
    assert [found.fullmatch(step) is not None for step in told].count(True) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (parallel_ranks.error_of_other_weights, "layers.1.mlp.gate.weight is not the same on rank"),
        (parallel_ranks.error_of_other_logits, "prefill 40: ranks have computed other logits"),
    ],
)
def test_ranks_that_compute_different_models_are_found(function, message):
    for error in in_ranks(2, function, {"models": ["V3.2"], "runs": ["prefill 40"], "layers": 3}):
        assert message in error


def test_the_clock_aligns_gpus_before_each_call_and_waits_at_the_end():
    for times, peak, free, done in in_ranks(2, parallel_ranks.clock_of_stubs, None):
        assert torch.equal(times, torch.tensor([[2.0, 2.0], [4.0, 4.0]]))
        assert peak == (44 << 20) + 1 and free == 999
        assert done == ["reset", *2 * ["align", "record", "call", "record"], *2 * ["synchronize"]]


def test_cases_are_prompts_within_the_context_and_steps():
    assert [case.name for case in cases("V4-Flash")][:4] == [f"prefill {n}" for n in (4096, 32768, 131072, 1048576)]
    assert "prefill 1048576" not in [case.name for model in ("V3.2", "GLM-5") for case in cases(model)]
    assert [case.repeats for case in cases("V4-Flash")] == [10, 3, 1, 0, *5 * [20]]
    assert {case.held for case in cases("V3.2")} == {4096, 32768, 131072} | {n * 8192 for n in (1, 8, 32, 128, 256)}
    assert len(names()) == 9


def test_layers_that_fit():
    assert layers_that_fit("V4-Flash", 2, 140 * 10**9, 256 * 8192) == 43
    assert layers_that_fit("V4-Flash", 2, 80 * 10**9, 256 * 8192) < 36
    model = skeleton("V3.2", **with_layers("V3.2", 9))
    enough = plan(model.config, model.precision, 2).bytes(2**20) + RESERVE
    assert enough - RESERVE > sum(x.nbytes for x in model.state_dict().values()) / 2
    assert [layers_that_fit("V3.2", 2, memory, 2**20) for memory in (enough, enough - 1)] == [9, 8]
    with pytest.raises(ValueError, match=r"memory: must be at least \d+\.\d GB a GPU for 3 layers of V3.2 .*, got 9.0"):
        layers_that_fit("V3.2", 2, 9 * 10**9, 8192)


@pytest.mark.slow
def test_kernels_that_are_asked_for():
    """Every pass runs without a GPU up to its launches, so the kernels of all launches are known."""
    of_two = asked(2)
    functions = {variant.function for variant in of_two}
    assert {"compile_mha_varlen_fwd", "compile_fp8_paged_mqa_logits", "compile_topk_indices"} < functions
    assert len(asked(2, ["V3.2"], ["decode 1 x 8192"])) < len(of_two) / 2
    assert asked(2, ["V3.2"], ["prefill 1048576"]) == []
    assert asked(8, ["GLM-5"], layers=3)


def test_long_passes_of_a_part_ask_for_kernels_of_all_heads():
    """`compile_sparse_mla_cast` exists only for more than 32 heads. If 8 ranks divide the queries of a long pass, each
    has all 64 heads of V4-Flash. If they divide the heads, each has 8."""
    functions = {}
    for way in WAYS:
        with split_by(way):
            case = next(case for case in cases("V4-Flash") if case.name == "prefill 4096")
            found = asked_of_part("V4-Flash", SilentRanks(0, 8), [case])
            functions[way] = {variant.function for variant in found}
    assert "compile_sparse_mla_cast" in functions["queries"] - functions["heads"]


def kernel(name, ts, ms, kind="kernel"):
    return {"cat": kind, "name": name, "ts": 10**6 * ts, "dur": 1000 * ms}


def test_the_share_of_collectives_counts_from_the_first_collective():
    sum_kernel = "kernel_cutlass_kernel_dsakernelsparallelone_shot_sum_sm90OneShotSumSm90_object_at__tensorptrbf16"
    events = [
        *(kernel("fill", 0, 50.0), kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)", 1, 90.0)),
        *(kernel(sum_kernel, 30, 1.0), kernel("gemm", 20, 4.0), kernel("Memset", 40, 1.0, "gpu_memset")),
        *(kernel("ncclDevKernel_SendRecv(args)", 50, 2.0), kernel("not_nccl", 60, 2.0)),
        *(kernel("nccl:all_reduce", 70, 99.0, "cpu_op"), {"cat": "cuda_runtime", "name": "cudaLaunchKernel"}),
    ]
    assert collectives_share(events) == collectives_share(events[::-1]) == 3 / 10
    # Time in which a collective and a GEMM run at once does not count, whichever starts or ends first.
    meanwhile = [
        kernel("ncclDevKernel_SendRecv(args)", 80, 2000.0),
        kernel("gemm", 79, 2000.0),
        kernel("gemm", 81, 500.0),
    ]
    assert collectives_share([*events, *meanwhile]) == 503 / 3010
    # These count as collectives: copies between GPUs, waits for these copies, and the experts' sum over GPUs. Copies
    # within a GPU do not.
    copies = [kernel("Memcpy PtoP (Device -> Device)", 90, 4000.0, "gpu_memcpy"), kernel("gemm", 91, 2000.0)]
    waits = [kernel("void c10d::symmetric_memory::wait_signal_kernel(unsigned int**)", 93, 1500.0)]
    copied = kernel("Memcpy DtoD (Device -> Device)", 95, 500.0, "gpu_memcpy")
    experts = kernel("kernel_cutlass_kernel_dsakernelsparallelexperts_sum_sm90ExpertsSumSm90_object_at_", 97, 500.0)
    assert collectives_share([*events, *copies, *waits, copied, experts]) == (3 + 3000) / (10 + 5500)
    with pytest.raises(ValueError, match="events: must have kernels after a collective, got 1 in 2 events"):
        collectives_share([kernel("gemm", 0, 1.0), {"cat": "cpu_op", "name": "nccl", "ts": 0, "dur": 1}])


def test_one_process_computes_the_rows_of_one_of_many_gpus():
    done = [shape("V4-Flash", "prefill 40", 2, one=True)]
    (rows,) = in_ranks(1, parallel_ranks.rows_of_a_part, {"models": ["V4-Flash"], "layers": 3, "done": done})
    assert [row["run"] for row in rows] == [run for run in OFTEN if run != "prefill 40"]
    for row in rows:
        assert row["shape"] == shape("V4-Flash", row["run"], 2, one=True) and row["ms"] == row["shard_ms"] > 0
        assert (row["gpus"], row["layers"], row["published_layers"], row["memory"]) == (2, 3, 43, 10**9)


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize(("rank", "count"), [(0, 30), (1, 300)])
def test_a_part_computes_without_other_ranks_and_is_restored(name, rank, count):
    ranks, rows = Ranks(rank, 2), Sharded(Ranks(rank, 2), count)
    model = small_stack(name, ranks=ranks)
    before, tokens = (Sharded.all_gather, Sharded.reduce), torch.arange(512 - count, 512)
    with torch.inference_mode(), without_collectives(model, ranks):
        logits = model(tokens, SequenceBatch.without_cache([count]), all_tokens=True)
        # Here `gather` repeats this rank's rows in place of the other rank's, and `sum` adds nothing.
        (whole,) = rows.all_gather(rows.local(tokens))
        assert {*whole.tolist()} == {*rows.local(tokens).tolist()} and len(whole) == count
        assert torch.equal(rows.reduce(tokens), rows.local(tokens))
    assert logits.shape == (count, 256) and logits.isfinite().all()
    # The other rank's rows are copies of this rank's, so half of the logits may be equal.
    assert len(logits.unique(dim=0)) >= count // 2
    assert (Sharded.all_gather, Sharded.reduce) == before
    assert all(module.ranks is ranks for module in model.modules() if hasattr(module, "ranks"))
    assert not any(module._forward_pre_hooks for module in model.modules())
