"""How long sequences that decode wait for their next tokens while a long prompt is computed among them.

usage: python -m dsa_bench.e2e.latency [--models MODEL...] [--prompt N] [--sequences N] [--context N] [--chunks N...]
                                       [--steps N] [--device DEVICE]

Prints a line of JSON for each model and size of a chunk (`rows`). Each runs twice, and the second time counts: in the
first one kernels are compiled and decoding passes captured.
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
from itertools import pairwise
from typing import Any

import torch

from dsa import backends
from dsa_bench.e2e.stacks import STACKS, stack
from dsa_layers import options
from dsa_layers.families.model import Model
from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams

Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """prompt: tokens of the long prompt. sequences, context: how many others decode, and their tokens when they begin.
    steps: passes that are timed without the prompt."""

    prompt: int = 131072
    sequences: int = 32
    context: int = 4096
    steps: int = 100


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
        for _ in range(2):
            row = _timed(generator, prompts, params, sizes)
        yield {"prompt": sizes.prompt, "sequences": sizes.sequences, "context": sizes.context} | row
        del generator
        gc.collect()


def _call(model: Model, chunk: int, sizes: Sizes) -> tuple[Generator, list[list[int]], list[SamplingParams]]:
    """The long prompt comes last, and ends with its first token. The others have tokens enough for all passes."""
    lengths = [sizes.context] * sizes.sequences + [sizes.prompt]
    new = -(-sum(lengths) // chunk) + sizes.sequences + sizes.steps + 2
    tokens = sum(-(-(n + new) // model.page_size) * model.page_size for n in lengths)
    vocabulary = model.config.vocab_size
    prompts = [[(i + position) % vocabulary for position in range(n)] for i, n in enumerate(lengths)]
    params = [SamplingParams(max_new_tokens=new)] * sizes.sequences + [SamplingParams(max_new_tokens=1)]
    count = sizes.sequences + 1
    return Generator(model, cache_tokens=tokens, max_sequences=count, prefill_chunk=chunk), prompts, params


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


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m dsa_bench.e2e.latency", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=[*STACKS], default=[*STACKS], help="default: all")
    parser.add_argument(
        "--chunks", nargs="+", type=options.positive, default=[2048, 8192], metavar="N", help="default: 2048 8192"
    )
    for name, default in vars(Sizes()).items():
        text = "(default: %(default)s)"
        parser.add_argument(f"--{name}", type=options.positive, default=default, metavar="N", help=text)
    parser.add_argument("--device", default="cuda", help="(default: %(default)s)")
    args = parser.parse_args(arguments)
    reason = backends.why_no_kernels()
    if torch.device(args.device).type == "cuda" and reason:
        parser.error(f"a benchmark needs a GPU with kernels: {reason}")
    sizes = Sizes(**{name: getattr(args, name) for name in vars(Sizes())})
    for name in args.models:
        model = stack(name, args.device)
        for row in rows(model, args.chunks, sizes):
            print(json.dumps({"model": name} | row), flush=True)
        del model
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
