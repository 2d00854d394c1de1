"""How long sequences that decode wait for their next tokens while a long prompt is computed among them.

usage: python -m dsa_bench.e2e.latency [--models MODEL...] [--prompt N] [--sequences N] [--context N] [--chunks N...]
                                       [--steps N] [--device DEVICE] [--compile]

Prints a line of JSON for each model and size of a chunk (`rows`). Each runs twice, and the second time counts: in the
first one decoding passes are captured. Kernels are compiled before, in parallel; --compile does that alone, also where
there is no GPU.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from dsa.runtime import backends
from dsa.runtime.asked_variants import asked_variants
from dsa.runtime.variants import Variant
from dsa_bench.e2e.parallel_kernels import compile_ahead
from dsa_bench.e2e.parallel_rows import free, seconds_told
from dsa_bench.e2e.stacks import STACKS, skeleton, stack
from dsa_layers import options
from dsa_layers.compilation import passes
from dsa_layers.compilation.variants import with_all_tiles
from dsa_layers.families.model import CheckpointModel, Model
from dsa_layers.families.precision import check_device
from dsa_layers.generation.captured_step import power_of_two
from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.layers import joint_linear

CHUNKS = (2048, 8192)
Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """prompt: tokens of the long prompt. sequences, context: how many others decode, and their tokens when they begin.
    steps: passes that are timed without the prompt."""

    prompt: int = 131072
    sequences: int = 32
    context: int = 4096
    steps: int = 50


def rows(model: Model, chunks: Sequence[int], sizes: Sizes = Sizes()) -> Iterator[Row]:
    """{"prompt", "sequences", "context", "prefill_chunk", "ms", "ms_max", "alone_ms", "alone_ms_max",
    "first_token_s"} for each number of `prefill_chunk`.

    ms, ms_max              between two tokens of a decoding sequence while the prompt is computed: median and largest,
                            over all sequences
    alone_ms, alone_ms_max  the same of these sequences once it is
    first_token_s           of the prompt, from when it is the next one to be computed
    """
    model.config = replace(model.config, eos_token_ids=())  # random weights say anything
    for chunk in chunks:
        generator, prompts, params = _call(model, chunk, sizes)
        for steps in (1, sizes.steps):
            row = _timed(generator, prompts, params, replace(sizes, steps=steps))
        yield {"prompt": sizes.prompt, "sequences": sizes.sequences, "context": sizes.context} | row
        del generator
        gc.collect()


def _call(model: Model, chunk: int, sizes: Sizes) -> tuple[Generator, list[list[int]], list[SamplingParams]]:
    """The long prompt comes last, and ends with its first token. The others have tokens enough for all passes."""
    lengths, new = _lengths(sizes), _new_tokens(chunk, sizes)
    tokens = sum(-(-(n + new) // model.page_size) * model.page_size for n in lengths)
    vocabulary = model.config.vocab_size
    prompts = [[(i + position) % vocabulary for position in range(n)] for i, n in enumerate(lengths)]
    params = [SamplingParams(max_tokens=new)] * sizes.sequences + [SamplingParams(max_tokens=1)]
    count = sizes.sequences + 1
    return Generator(model, cache_tokens=tokens, max_sequences=count, prefill_chunk=chunk), prompts, params


def _lengths(sizes: Sizes) -> list[int]:
    return [sizes.context] * sizes.sequences + [sizes.prompt]


def _new_tokens(chunk: int, sizes: Sizes) -> int:
    """At least as many as a decoding sequence gets."""
    return -(-sum(_lengths(sizes)) // chunk) + sizes.sequences + sizes.steps + 2


def _timed(
    generator: Generator, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], sizes: Sizes
) -> Row:
    times: list[list[float]] = [[] for _ in prompts]
    *others, prompts_own = times
    with closing(generator.stream(prompts, params)) as events:
        for event in events:
            if event.error is not None:
                raise RuntimeError(event.error)
            times[event.sequence].append(time.perf_counter())
            if prompts_own and sum(at > prompts_own[0] for at in others[-1]) > sizes.steps:
                break
    begin, end = max(own[0] for own in others), prompts_own[0]
    gaps = [(first, (second - first) * 1e3) for own in others for first, second in pairwise(own)]
    among = [ms for first, ms in gaps if begin < first < end]
    alone = [ms for first, ms in gaps if first > end]
    row = {"prefill_chunk": generator.prefill_chunk, "ms": statistics.median(among), "ms_max": max(among)}
    row |= {"alone_ms": statistics.median(alone), "alone_ms_max": max(alone)}
    return row | {"first_token_s": end - begin}


def asked(
    names: Sequence[str] = tuple(STACKS),
    chunks: Sequence[int] = CHUNKS,
    sizes: Sizes = Sizes(),
    arch: str = "sm_90",
) -> list[Variant]:
    """The kernels that the rows ask for; sorted."""
    found = (_asked_by(skeleton(name), chunks, sizes, arch) for name in names)
    return sorted(with_all_tiles({variant: None for own in found for variant in own}), key=repr)


def _asked_by(model: CheckpointModel, chunks: Sequence[int], sizes: Sizes, arch: str) -> dict[Variant, None]:
    """Those that a model on the meta device asks for."""
    model.init_buffers(passes.META)
    joint_linear.join(model)
    pages = -(-sum(_lengths(sizes)) // model.page_size) + sizes.sequences
    cache = model.eval().make_cache(pages, model.page_size, passes.META, state_slots=sizes.sequences + 1)
    most = sizes.context + _new_tokens(min(chunks), sizes)
    with asked_variants(arch) as found:
        for chunk in chunks:
            different = list(dict.fromkeys(_work(chunk, sizes)))
            for number in passes.growing(len(different), 1.5):  # those behind many tokens are alike
                passes.prefill(model, cache, list(different[number - 1]))
        for count in {power_of_two(n) for n in range(1, sizes.sequences + 1)}:
            for context in (sizes.context, most):
                passes.decode(model, cache, count, context)
    return dict(found)


def _work(chunk: int, sizes: Sizes) -> list[tuple[tuple[int, int], ...]]:
    """(new, earlier) tokens of each prompt in each pass, in the order in which a generator computes them."""
    found, of_pass = [], []
    for length in _lengths(sizes):
        cached = 0
        while cached < length:
            new = min(length - cached, chunk - sum(n for n, _ in of_pass))
            of_pass.append((new, cached))
            cached += new
            if sum(n for n, _ in of_pass) == chunk:
                found.append(tuple(of_pass))
                of_pass = []
    return [*found, tuple(of_pass)] if of_pass else found


def compiled_rows(
    names: Sequence[str] = tuple(STACKS),
    chunks: Sequence[int] = CHUNKS,
    sizes: Sizes = Sizes(),
    device: torch.device | str = "cuda",
) -> Iterator[Row]:
    """The rows of all models, with "shape", "model" and "figure", once their kernels are compiled in parallel."""
    tell = seconds_told()
    if torch.device(device).type == "cuda":
        compile_ahead(partial(asked, names, chunks, sizes), tell)
    for name in names:
        model = stack(name, device)
        tell(f"{name}: drawn")
        for row in rows(model, chunks, sizes):
            tell(f"{name}, chunks of {row['prefill_chunk']}: {row['ms']:.1f} ms, {row['first_token_s']:.2f} s")
            shape = f"{name}, chunks of {row['prefill_chunk']}"
            yield {"shape": shape, "model": name} | row | {"figure": f"{row['ms']:.1f} ms between tokens"}
        del model
        free()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m dsa_bench.e2e.latency", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=[*STACKS], default=[*STACKS], help="default: all")
    parser.add_argument(
        "--chunks", nargs="+", type=options.positive, default=CHUNKS, metavar="N", help="default: 2048 8192"
    )
    for name, default in vars(Sizes()).items():
        text = "(default: %(default)s)"
        parser.add_argument(f"--{name}", type=options.positive, default=default, metavar="N", help=text)
    parser.add_argument("--device", default="cuda", help="(default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="compile the kernels alone, which needs no GPU")
    args = parser.parse_args(arguments)
    on_gpu = args.device.partition(":")[0] == "cuda"
    if on_gpu and not args.compile and (reason := backends.why_no_kernels()):
        parser.error(f"a benchmark needs a GPU with kernels: {reason}")
    if not args.compile:
        try:
            device = check_device(args.device)
        except ValueError as error:
            parser.error(f"--{error}")
    sizes = Sizes(**{name: getattr(args, name) for name in vars(Sizes())})
    if args.compile:
        compile_ahead(partial(asked, args.models, args.chunks, sizes), seconds_told())
        return 0
    for row in compiled_rows(args.models, args.chunks, sizes, device):
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
