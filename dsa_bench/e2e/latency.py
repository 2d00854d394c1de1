"""The time between tokens of decoding sequences while the engine prefills a long prompt.

There is a row per model and chunk size. The workload runs twice and the second run counts, because in the first the
engine captures its decoding passes.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch

from dsa.runtime.variants import Variant, growing
from dsa_bench.e2e.command import Row, Tell, asked_of, by_stack, free, in_order, of_models, quiet
from dsa_bench.e2e.runs import parts_of_prompts
from dsa_bench.e2e.stacks import STACKS, skeleton, stack
from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.generation.steps import power_of_two
from dsa_layers.models.protocols import CheckpointModel, Model

CHUNKS = (2048, 8192)
OPTIONS = of_models(STACKS)


@dataclass(frozen=True)
class Sizes:
    """Sizes of the workload. prompt: tokens of the long prompt. sequences, context: the number of decoding sequences,
    and their tokens at the start. steps: timed passes after the prompt."""

    prompt: int = 131072
    sequences: int = 32
    context: int = 4096
    steps: int = 50


def _call(model: Model, chunk: int, sizes: Sizes) -> tuple[Generator, list[list[int]], list[SamplingParams]]:
    """Return (generator, prompts, sampling parameters). The long prompt is the last one and generates one token. The
    other sequences decode until the timing ends."""
    lengths, new = _lengths(sizes), _new_tokens(chunk, sizes)
    tokens = sum(-(-(n + new) // model.page_size) * model.page_size for n in lengths)
    prompts = [[(i + position) % model.config.vocab_size for position in range(n)] for i, n in enumerate(lengths)]
    params = [SamplingParams(max_tokens=new)] * sizes.sequences + [SamplingParams(max_tokens=1)]
    return (
        Generator(model, cache_tokens=tokens, max_sequences=sizes.sequences + 1, prefill_chunk=chunk),
        prompts,
        params,
    )


def _lengths(sizes: Sizes) -> list[int]:
    return [sizes.context] * sizes.sequences + [sizes.prompt]


def _new_tokens(chunk: int, sizes: Sizes) -> int:
    return -(-sum(_lengths(sizes)) // chunk) + sizes.sequences + sizes.steps + 2


def _timed(
    generator: Generator, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], sizes: Sizes
) -> Row:
    times: list[list[float]] = [[] for _ in prompts]
    *others, of_prompt = times
    with closing(generator.stream(prompts, params)) as events:
        for event in events:
            if event.error is not None:
                raise RuntimeError(event.error)
            times[event.sequence].append(time.perf_counter())
            if of_prompt and sum(at > of_prompt[0] for at in others[-1]) > sizes.steps:
                break
    begin, end = max(each[0] for each in others), of_prompt[0]
    gaps = [(first, (second - first) * 1e3) for each in others for first, second in pairwise(each)]
    among = [ms for first, ms in gaps if begin < first < end]
    alone = [ms for first, ms in gaps if first > end]
    return {
        "prefill_chunk": generator.options.prefill_chunk,
        "ms": statistics.median(among),
        "ms_max": max(among),
        "alone_ms": statistics.median(alone),
        "alone_ms_max": max(alone),
        "first_token_s": end - begin,
    }


def asked(
    models: Sequence[str] = tuple(STACKS), chunks: Sequence[int] = CHUNKS, sizes: Sizes = Sizes()
) -> list[Variant]:
    most, prompts = sizes.context + _new_tokens(min(chunks), sizes), []
    for chunk in chunks:
        different = list(dict.fromkeys(_work(chunk, sizes)))
        # The kernels of a pass change little with the number of earlier tokens, so the passes of a geometric sample
        # need the same kernels as all passes.
        prompts += [different[number - 1] for number in growing(len(different), 1.5)]
    counts = {power_of_two(n) for n in range(1, sizes.sequences + 1)}
    steps = [(count, context) for count in counts for context in (sizes.context, most)]
    return in_order(asked_of(skeleton(name), prompts, steps) for name in models)


def _work(chunk: int, sizes: Sizes) -> list[tuple[tuple[int, int], ...]]:
    """Return the numbers of (new, earlier) tokens of each prompt, for all passes in the order of the generator."""
    lengths = _lengths(sizes)
    passes_over = (parts_of_prompts(lengths, begin, begin + chunk) for begin in range(0, sum(lengths), chunk))
    return [tuple((new, cached) for _, new, cached in parts) for parts in passes_over]


def rows(
    models: Sequence[str] = tuple(STACKS),
    chunks: Sequence[int] = CHUNKS,
    sizes: Sizes = Sizes(),
    device: torch.device | str = "cuda",
    tell: Tell = quiet,
) -> Iterator[Row]:
    """Yield {"shape", "model", "prompt", "sequences", "context", "prefill_chunk", "ms", "ms_max", "alone_ms",
    "alone_ms_max", "first_token_s", "figure"} per model and `prefill_chunk` of `chunks`.

    ms, ms_max              milliseconds between two tokens of a decoding sequence during the prefill: median and
                            maximum over all sequences
    alone_ms, alone_ms_max  ms and ms_max after the prefill
    first_token_s           seconds from the last of the other sequences' first tokens to the long prompt's first token
    """

    def of_stack(name: str, model: CheckpointModel, chunks: Sequence[int]) -> Iterator[Row]:
        model.config = replace(model.config, eos_token_ids=())  # with random weights any token can end a sequence
        for chunk in chunks:
            generator, prompts, params = _call(model, chunk, sizes)
            for steps in (1, sizes.steps):
                row = _timed(generator, prompts, params, replace(sizes, steps=steps))
            del generator
            free()
            shape = f"{name}, chunks of {row['prefill_chunk']}"
            tell(f"{shape}: {row['ms']:.1f} ms, {row['first_token_s']:.2f} s")
            row |= {"prompt": sizes.prompt, "sequences": sizes.sequences, "context": sizes.context}
            yield {"shape": shape, "model": name} | row | {"figure": f"{row['ms']:.1f} ms between tokens"}

    return by_stack(models, lambda name: chunks, partial(stack, device=device), of_stack, tell)
