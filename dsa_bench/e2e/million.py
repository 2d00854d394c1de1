"""Contexts of up to a million tokens on one GPU: a prompt, pass by pass, and decoding behind it.

usage: python -m dsa_bench.e2e.million [--models MODEL...] [--tokens N...] [--sequences N...] [--compile]

Prints a line of JSON for each row (`rows`); how long each step takes goes to the standard error. Kernels are compiled
before, in parallel; --compile does that alone, also where there is no GPU.
"""

import argparse
import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from dsa.runtime import backends
from dsa.runtime.asked_variants import asked_variants
from dsa.runtime.variants import Variant
from dsa_bench.e2e.long_prompt import LongPrompt, Watch
from dsa_bench.e2e.parallel_kernels import compile_ahead
from dsa_bench.e2e.parallel_rows import free, seconds_told
from dsa_bench.e2e.parts import gpu_ms
from dsa_bench.e2e.report import CHUNK
from dsa_bench.e2e.runs import decode, milliseconds
from dsa_bench.e2e.stacks import LONG_STACKS, skeleton, stack
from dsa_layers import options
from dsa_layers.compilation import passes
from dsa_layers.compilation.variants import with_all_tiles
from dsa_layers.families.model import CheckpointModel
from dsa_layers.layers import joint_linear

LENGTHS = (131072, 262144, 524288, 1048576)
SEQUENCES = (1, 2, 4, 8, 16, 32)
STEP_REPEATS = 20
SHORT = 2  # the pass whose memory is that of activations: it selects, and has few keys
RESERVE = 4 << 30  # bytes that a step takes beside weights and caches, and more
WARM = 8  # every so many passes run once before they are timed: kernels that lengths ask for are loaded then
Row = dict[str, Any]
Tell = Callable[[str], None]


def prompt_shape(model: str, tokens: int) -> str:
    return f"{model} prompt {tokens}"


def step_shape(model: str, count: int, context: int) -> str:
    return f"{model} decode {count} x {context}"


def rows(
    names: Sequence[str] = tuple(LONG_STACKS),
    lengths: Sequence[int] = LENGTHS,
    sequences: Sequence[int] = SEQUENCES,
    done: Collection[str] = (),
    device: torch.device | str = "cuda",
    tell: Tell = lambda step: None,
) -> Iterator[Row]:
    """Of prompts {"shape", "model", "run", "tokens", "ms", "tokens/s", "figure", "pass_ms", "parts", "memory",
    "workspace"}, and of decoding steps behind contexts of the longest length the same with None for the last one. done:
    shapes that are left out, as an earlier run has them.

    A prompt's passes do not depend on what comes behind it: all lengths are of the longest one's passes, each up to its
    own last pass.
    ms         of all passes on the GPU's clock; of a step as one CUDA graph
    pass_ms    of the last pass; of a step, ms
    parts      {part: ms} of kernels alone in the last pass, which runs once more for that
    memory     bytes that tensors, weights and cache among them, took at most
    workspace  bytes that a pass took at most beside weights and cache, less those of the pass that is the SHORT-th:
               what a long context adds to them

    Sequences that decode have random numbers in their caches. What these are decides which keys are selected, not
    how many; how many sequences there are is bounded by memory, and the rows of more than fit are left out.
    """
    for name in names:
        prompts = [n for n in sorted(lengths) if prompt_shape(name, n) not in done]
        counts = [n for n in sorted(sequences) if step_shape(name, n, max(lengths)) not in done]
        if not prompts and not counts:
            continue
        model = stack(name, device)
        watch = Watch(torch.device(device))
        tell(f"{name}: drawn")
        if prompts:
            yield from _prompts(name, model, prompts, watch, tell)
            free()
        for count in counts:
            row = _step(name, model, count, max(lengths), watch)
            free()
            if row is None:
                tell(f"{name}: no memory for {count} sequences")
                break
            tell(f"{row['shape']}: {row['ms']:.2f} ms")
            yield row
        del model
        free()


def _prompts(name: str, model: CheckpointModel, lengths: Sequence[int], watch: Watch, tell: Tell) -> Iterator[Row]:
    prompt = LongPrompt(model, max(lengths), CHUNK)
    begins = range(0, prompt.tokens, CHUNK)
    for begin in {*begins[:SHORT], *begins[::WARM], begins[-1]}:
        prompt.compute(begin)
    tell(f"{name}: every {WARM}th pass has run once")
    marks, memory, needed = [], 0, []
    for begin in begins:
        held = watch.held()
        watch.forget_peak()
        started = watch.mark()
        prompt.compute(begin)
        marks.append((started, watch.mark()))
        memory = max(memory, watch.peak())
        needed.append(watch.peak() - held)
        tokens = begin + CHUNK
        if tokens not in lengths:
            continue
        times = [watch.ms(*pair) for pair in marks]
        row = _row(name, prompt_shape(name, tokens), tokens, sum(times))
        row |= {"pass_ms": times[-1], "parts": gpu_ms(model, lambda begin=begin: prompt.compute(begin))}
        workspace = max(needed[SHORT - 1 :]) - needed[SHORT - 1]
        tell(f"{row['shape']}: {row['ms'] / 1000:.2f} s")
        yield row | {"memory": memory, "workspace": workspace}


def _step(name: str, model: CheckpointModel, count: int, context: int, watch: Watch) -> Row | None:
    """None where memory does not suffice."""
    torch.manual_seed(0)
    watch.forget_peak()
    pages = count * -(-context // model.page_size)
    # Before anything is captured, which memory that is not there would end.
    if model.make_cache(pages, device="meta", state_slots=count).nbytes + RESERVE > watch.free():
        return None
    try:
        run = decode(model, count, context)
        ms = milliseconds(run.timed, STEP_REPEATS)
        parts = gpu_ms(model, run.launched)
    except torch.OutOfMemoryError:
        return None
    row = _row(name, step_shape(name, count, context), count, ms)
    return row | {"pass_ms": ms, "parts": parts, "memory": watch.peak(), "workspace": None}


def _row(name: str, shape: str, tokens: int, ms: float) -> Row:
    rate = tokens / ms * 1e3
    row = {"shape": shape, "model": name, "run": shape.removeprefix(f"{name} "), "tokens": tokens, "ms": ms}
    return row | {"tokens/s": rate, "figure": f"{rate:.0f} tokens/s"}


def asked(
    names: Sequence[str] = tuple(LONG_STACKS),
    lengths: Sequence[int] = LENGTHS,
    sequences: Sequence[int] = SEQUENCES,
    arch: str = "sm_90",
) -> list[Variant]:
    """The kernels that the rows ask for; sorted."""
    context = max(lengths)
    prompts = [(CHUNK, begin) for begin in range(0, context, CHUNK)]
    found = (asked_by(skeleton(name), prompts, sequences, context, arch) for name in names)
    return sorted({variant for own in found for variant in own}, key=repr)


def asked_by(
    model: CheckpointModel, prompts: Sequence[tuple[int, int]], sequences: Sequence[int], context: int, arch: str
) -> list[Variant]:
    """Those that a model on the meta device asks for: in passes over (new, earlier) tokens of a prompt, and in steps of
    so many sequences behind `context` tokens; sorted."""
    model.init_buffers(passes.META)
    joint_linear.join(model)
    count = max(sequences, default=1)
    pages = count * -(-context // model.page_size)
    cache = model.eval().make_cache(pages, model.page_size, passes.META, state_slots=count)
    with asked_variants(arch) as found:
        for prompt in prompts:
            passes.prefill(model, cache, [prompt])
        for count in sequences:
            passes.decode(model, cache, count, context)
    return sorted(with_all_tiles(found), key=repr)


def compiled_rows(done: Collection[str] = ()) -> Iterator[Row]:
    """All rows, once their kernels are compiled in parallel: one after the other, in the passes that are timed, they
    would take most of the time. done: as of `rows`."""
    tell = seconds_told()
    compile_ahead(asked, tell)
    yield from rows(done=done, tell=tell)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m dsa_bench.e2e.million", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=[*LONG_STACKS], default=[*LONG_STACKS], help="default: all")
    for option, default, what in (("tokens", LENGTHS, "of a prompt"), ("sequences", SEQUENCES, "that decode")):
        listed = " ".join(map(str, default))
        parser.add_argument(
            f"--{option}", nargs="+", type=options.positive, default=default, metavar="N", help=f"{what}: {listed}"
        )
    parser.add_argument("--compile", action="store_true", help="compile the kernels alone, which needs no GPU")
    args = parser.parse_args(arguments)
    if wrong := [n for n in args.tokens if n % CHUNK or n < SHORT * CHUNK]:
        parser.error(f"--tokens: must be multiples of {CHUNK}, at least {SHORT * CHUNK}, got {wrong[0]}")
    if not args.compile and (reason := backends.why_no_kernels()):
        parser.error(f"a benchmark needs a GPU with kernels: {reason}")
    tell = seconds_told()
    tell("modules are imported")
    compile_ahead(partial(asked, args.models, args.tokens, args.sequences), tell)
    if args.compile:
        return 0
    for row in rows(args.models, args.tokens, args.sequences, tell=tell):
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
