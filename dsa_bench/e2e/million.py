"""Contexts of up to a million tokens on one GPU: a prompt, pass by pass, and decoding after the prompt."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

import torch

from dsa.runtime.variants import Variant
from dsa.testing import bench
from dsa_bench.e2e.clock import Clock
from dsa_bench.e2e.command import Row, Tell, asked_of, by_stack, free, in_order, of_models, pass_row, quiet
from dsa_bench.e2e.parts import gpu_ms
from dsa_bench.e2e.report import CHUNK
from dsa_bench.e2e.runs import Prompts, decode
from dsa_bench.e2e.stacks import LONG_STACKS, skeleton, stack
from dsa_layers.models.protocols import CheckpointModel
from dsa_layers.parallel.ranks import ALONE

LENGTHS = (131072, 262144, 524288, 1048576)
SEQUENCES = (1, 2, 4, 8, 16, 32)
OPTIONS = of_models(LONG_STACKS)
STEP_REPEATS = 20
# The peak memory of pass number SHORT, without weights and cache, counts as the memory of the activations, because this
# pass selects among few keys.
SHORT = 2
RESERVE = 4 << 30  # bytes: more than a step needs besides weights and caches
WARM = 8  # every WARM-th pass runs once before the timing, to load the kernels of all lengths


def rows(
    models: Sequence[str] = tuple(LONG_STACKS),
    lengths: Sequence[int] = LENGTHS,
    sequences: Sequence[int] = SEQUENCES,
    done: Collection[str] = (),
    device: torch.device | str = "cuda",
    clock: Clock | None = None,
    tell: Tell = quiet,
) -> Iterator[Row]:
    """Yield {"shape", "model", "run", "tokens", "ms", "tokens/s", "figure", "pass_ms", "parts", "memory", "workspace"}
    of prompts, and of decoding steps after the longest context. done: shapes of an earlier run, which are left out.

    A prompt's passes do not depend on later tokens. So only the longest prompt is computed, and a shorter prompt's row
    is made of the longest prompt's first passes.

    ms         milliseconds of all passes on the GPU's clock, or of a step as one CUDA graph
    pass_ms    milliseconds of the last pass; for a step, ms
    parts      {part: ms} of the kernels in the last pass or in the step, which runs once more for this
    memory     peak bytes of tensors, with weights and cache
    workspace  bytes that a long context adds to a pass's peak memory besides weights and cache: the largest peak from
               pass SHORT on, minus the peak of pass SHORT. None for a step

    Caches of decoding sequences contain random numbers. These decide which keys are selected, not how many. Steps whose
    sequences do not fit in memory have no row.
    """
    clock = clock or Clock(ALONE, torch.device(device))
    context = max(lengths)

    def todo(name: str) -> list[tuple[str, int]]:
        """Return [(run, tokens of a prompt or number of sequences)], prompts first."""
        prompts = [(f"prompt {n}", n) for n in sorted(lengths)]
        steps = [(f"decode {n} x {context}", n) for n in sorted(sequences)]
        return [(run, n) for run, n in (*prompts, *steps) if f"{name} {run}" not in done]

    def of_stack(name: str, model: CheckpointModel, runs: Sequence[tuple[str, int]]) -> Iterator[Row]:
        prompts = {n: run for run, n in runs if run.startswith("prompt")}
        if prompts:
            yield from _prompts(name, model, prompts, clock, tell)
            free()
        for run, count in runs[len(prompts) :]:
            figures = _step(model, count, context, clock)
            free()
            if figures is None:
                tell(f"{name}: no memory for {count} sequences")
                break
            tell(f"{name} {run}: {figures['pass_ms']:.2f} ms")
            yield pass_row(name, run, count, figures["pass_ms"]) | figures

    return by_stack(models, todo, partial(stack, device=device), of_stack, tell)


def _prompts(name: str, model: CheckpointModel, runs: Mapping[int, str], clock: Clock, tell: Tell) -> Iterator[Row]:
    """Yield a row per prompt. runs: {number of tokens of the prompt: name of the run}."""
    prompt = Prompts(model, 1, max(runs), CHUNK)
    begins = prompt.begins
    for begin in {*begins[:SHORT], *begins[::WARM], begins[-1]}:
        prompt.compute(begin)
    tell(f"{name}: every {WARM}th pass has run once")
    marks, memory, needed = [], 0, []
    for begin in begins:
        held = clock.held()
        clock.forget_peak()
        started = clock.mark()
        prompt.compute(begin)
        marks.append((started, clock.mark()))
        memory = max(memory, clock.peak())
        needed.append(clock.peak() - held)
        tokens = begin + CHUNK
        if tokens in runs:
            times = [clock.ms(*pair) for pair in marks]
            tell(f"{name} {runs[tokens]}: {sum(times) / 1000:.2f} s")
            yield pass_row(name, runs[tokens], tokens, sum(times)) | {
                "pass_ms": times[-1],
                "parts": gpu_ms(model, partial(prompt.compute, begin)),
                "memory": memory,
                "workspace": max(needed[SHORT - 1 :]) - needed[SHORT - 1],
            }


def _step(model: CheckpointModel, count: int, context: int, clock: Clock) -> Row | None:
    torch.manual_seed(0)
    clock.forget_peak()
    pages = count * -(-context // model.page_size)
    # Check before the capture, because running out of memory within the capture would break it.
    if model.make_cache(pages, device="meta", state_slots=count).nbytes + RESERVE > clock.free():
        return None
    try:
        step = decode(model, count, context)
        ms = bench({"step": step.timed}, repeats=STEP_REPEATS)["step"]
        parts = gpu_ms(model, step.launched)
    except torch.OutOfMemoryError:
        return None
    return {"pass_ms": ms, "parts": parts, "memory": clock.peak(), "workspace": None}


def asked(
    models: Sequence[str] = tuple(LONG_STACKS),
    lengths: Sequence[int] = LENGTHS,
    sequences: Sequence[int] = SEQUENCES,
    done: Collection[str] = (),
) -> list[Variant]:
    context = max(lengths)
    prompts = [[(CHUNK, begin)] for begin in range(0, context, CHUNK)]
    return in_order(asked_of(skeleton(name), prompts, [(n, context) for n in sequences]) for name in models)
