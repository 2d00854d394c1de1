"""The rows of a stack: prompts and decoding steps, their time by part, and the peers' time beside it."""

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from dsa_bench.e2e.parts import gpu_ms
from dsa_bench.e2e.peers import peer_kernels
from dsa_bench.e2e.runs import Model, Run, decode, milliseconds, prefill
from dsa_bench.e2e.stacks import STACKS, stack

# Tokens of a prompt, all of which are computed; and sequences by the tokens that they already have.
PROMPTS = (4096, 16384, 65536, 131072)
STEPS = tuple((count, context) for context in (4096, 32768, 131072) for count in (1, 8, 32, 128))
CHUNK = 8192
LONG = 32768
Row = dict[str, Any]


def rows(
    names: Sequence[str] = tuple(STACKS),
    prompts: Sequence[int] = PROMPTS,
    steps: Sequence[tuple[int, int]] = STEPS,
) -> Iterator[Row]:
    """{"model", "run", "tokens", "ms", "parts": {part: ms}, "peer_ms", "peer_parts"} of every prompt and step.

    ms on the GPU's clock, of a decoding step as one graph; parts are of kernels alone. peer_ms and peer_parts are None
    where no peer can be imported. A run that does not fit the GPU's memory is left out.
    """
    for name in names:
        yield from _of_model(name, prompts, steps)
        _free()


def _of_model(name: str, prompts: Sequence[int], steps: Sequence[tuple[int, int]]) -> Iterator[Row]:
    model = stack(name)
    for tokens in prompts:
        make, repeats = partial(prefill, model, tokens, CHUNK), 3 if tokens <= LONG else 1
        yield from _measured(name, f"prefill {tokens}", tokens, model, make, repeats)
    for count, context in steps:
        make = partial(decode, model, count, context)
        yield from _measured(name, f"decode {count} x {context}", count, model, make, 5)


def _measured(name: str, label: str, tokens: int, model: Model, make: Callable[[], Run], repeats: int) -> Iterator[Row]:
    def measure() -> tuple[float, dict[str, float]]:
        run = make()
        return milliseconds(run.timed, repeats), gpu_ms(model, run.launched)

    try:
        ms, parts = measure()
        _free()
        with peer_kernels() as replaced:
            peer_ms, peer_parts = measure() if replaced else (None, None)
    except torch.OutOfMemoryError:
        return
    finally:
        _free()
    row = {"model": name, "run": label, "tokens": tokens, "ms": ms, "parts": parts}
    yield row | {"peer_ms": peer_ms, "peer_parts": peer_parts}


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
