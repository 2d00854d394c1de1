"""Rows of stacks: prompts and decoding steps, their time by part, and the time with the peers' kernels."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import torch

from dsa.testing import bench, calc_diff
from dsa_bench.e2e.command import Row, by_stack, free, pass_row, quiet
from dsa_bench.e2e.parts import gpu_ms
from dsa_bench.e2e.peers import replacement
from dsa_bench.e2e.runs import Model, Run, decode, prefill
from dsa_bench.e2e.stacks import STACKS, linear_shapes, stack
from dsa_bench.harness.calls import reason
from dsa_bench.peers.deep_gemm import compile_products

# PROMPTS: (number of prompts, tokens of each). STEPS: (number of decoding sequences, tokens of each in the cache).
PROMPTS = (
    *((64, 512), (16, 2000), (256, 100), (4, 3000)),
    *((1, tokens) for tokens in (4096, 8192, 16384, 65536, 131072)),
)
COUNTS, CONTEXTS = (1, 8, 32, 128), (4096, 32768, 131072)
STEPS = tuple((count, context) for context in CONTEXTS for count in COUNTS)
CHUNK = 8192
LONG, LONG_REPEATS = 40000, 3  # prompts of more than LONG tokens in all are timed only LONG_REPEATS times
# Limit of `calc_diff` between the peers' logits and ours. `calc_diff` is 1 for unrelated logits, and it was 0.1 when
# the router chose other experts for one token.
MOST_DIFFERENCE = 0.3
# Passes take milliseconds, so with few repeats one disturbance of the host would dominate.
PROMPT_REPEATS, STEP_REPEATS = 10, 20
NO_PEERS = dict.fromkeys(("peer", "peer_ms", "ratio", "peer_parts", "difference")) | {"peers": []}


def rows(
    models: Sequence[str] = tuple(STACKS),
    prompts: Sequence[tuple[int, int]] = PROMPTS,
    steps: Sequence[tuple[int, int]] = STEPS,
    done: Collection[str] = (),
) -> Iterator[Row]:
    """Yield {"shape", "model", "run", "tokens", "ms", "tokens/s", "figure", "parts", "peer", "peers", "peer_ms",
    "ratio", "peer_parts", "difference", "failed"} per prompt and step. Shapes have names like "V3.2 prefill 4096",
    "V4-Flash prefill 64 x 512" and "GLM-5 decode 8 x 4096". Runs that do not fit the GPU's memory have no row.
    done: shapes of an earlier run, which are left out.

    ms          milliseconds on the GPU's clock; a decoding step runs as one CUDA graph
    parts       {part: ms} of kernels (`parts.gpu_ms`)
    peer_ms, peer_parts  ms and parts of the run with the peers' kernels; None without peers
    ratio       peer_ms / ms
    peers, peer the names of the peers' libraries, as a list and as one string
    difference  `calc_diff` of the peers' logits and ours. Ties in selections and routing can make it large without an
                error. If it is MOST_DIFFERENCE or more, or NaN, the peers' pass counts as failed
    failed      {library: reason} of installed libraries that cannot be imported; "the pass": why the peers' pass failed
    """

    def of_stack(
        name: str, model: Model, runs: Sequence[tuple[str, int, Callable[[Model], Run], int]]
    ) -> Iterator[Row]:
        compile_products((m, *shape) for m in _row_counts(prompts, steps) for shape in linear_shapes(model))
        for run, tokens, make, repeats in runs:
            yield from _measured(name, run, tokens, model, partial(make, model), repeats)

    def todo(name: str) -> list[tuple[str, int, Callable[[Model], Run], int]]:
        return [run for run in _runs(prompts, steps) if f"{name} {run[0]}" not in done]

    return by_stack(models, todo, stack, of_stack, quiet)


def _row_counts(prompts: Sequence[tuple[int, int]], steps: Sequence[tuple[int, int]]) -> set[int]:
    """Return the numbers of tokens of all passes, which are the row counts of the linear layers' products. kv_b_proj,
    whose rows are a pass's keys, is not included."""
    tokens = [count * n for count, n in prompts]
    return {min(n, CHUNK) for n in tokens} | {n % CHUNK for n in tokens} - {0} | {count for count, _ in steps}


def _runs(
    prompts: Sequence[tuple[int, int]], steps: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, int, Callable[[Model], Run], int]]:
    """Yield (name of a run, its tokens, a function that makes the run from a model, how often it is timed)."""
    for count, each in prompts:
        tokens, run = count * each, f"prefill {each}" if count == 1 else f"prefill {count} x {each}"
        repeats = PROMPT_REPEATS if tokens <= LONG else LONG_REPEATS
        yield run, tokens, partial(prefill, count=count, tokens=each, chunk=CHUNK), repeats
    for count, context in steps:
        yield f"decode {count} x {context}", count, partial(decode, count=count, context=context), STEP_REPEATS


def _measured(name: str, run: str, tokens: int, model: Model, make: Callable[[], Run], repeats: int) -> Iterator[Row]:
    try:
        torch.manual_seed(0)
        measured = _with_peers(model, make(), repeats)
    except torch.OutOfMemoryError:
        return
    finally:
        free()
    yield pass_row(name, run, tokens, measured["ms"]) | measured


def _with_peers(model: Model, ours: Run, repeats: int) -> Row:
    """Time our run and the peers' in turns, so that clocks and heat affect both in the same way. Return the figures."""
    replaced, logits, calls = replacement(), [], {"ms": ours.timed}
    row: Row = NO_PEERS | {"failed": replaced.failed}
    if replaced.ops:
        theirs = ours.again()

        def timed() -> torch.Tensor:
            with replaced.in_place():
                return theirs.timed()

        try:
            with replaced.in_place():
                theirs.launched()  # compiles kernels and lays out weights
                theirs.timed()  # captures the graph of a decoding step
                peer_parts = gpu_ms(model, lambda: logits.append(theirs.launched()))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a peer may raise anything, and must not end other runs
            row["failed"] = {**replaced.failed, "the pass": f"failed: {reason(error)}"}
        else:
            calls["peer_ms"] = timed
            row |= {"peers": replaced.libraries, "peer": ", ".join(replaced.libraries), "peer_parts": peer_parts}
    row |= bench(calls, repeats=repeats)
    row["parts"] = gpu_ms(model, lambda: logits.append(ours.launched()))
    if row["peer_ms"] is not None:
        row["ratio"] = row["peer_ms"] / row["ms"]
        row |= _judged(row, *logits)
    return row


def _judged(row: Row, theirs: torch.Tensor, ours: torch.Tensor) -> Row:
    """Return {"difference"}, or the fields of a failed peers' pass if the logits differ too much."""
    difference = calc_diff(theirs, ours)
    if difference < MOST_DIFFERENCE:
        return {"difference": difference}
    return NO_PEERS | {
        "failed": {
            **row["failed"],
            "the pass": f"failed: its logits differ by {difference:.3g}, where ties make at most {MOST_DIFFERENCE}",
        }
    }
