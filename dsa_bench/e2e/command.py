"""Functions that the benchmarks of whole passes share: compile kernels in advance, yield the rows of several stacks,
and print each step with its time.

The module dsa_bench.e2e.NAME of a benchmark (`NAMES`) has
  OPTIONS  {flag: the arguments of `add_argument`}; `rows` and `asked` have a parameter for each flag
  rows     (options, tell) -> the benchmark's rows
  asked    options -> the kernels (variants) that the rows need. Without `asked`, each pass compiles its kernels
"""

import importlib
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

from dsa.runtime.asked_variants import asked_variants
from dsa.runtime.build import build
from dsa.runtime.variants import Variant, with_all_tiles
from dsa_bench.harness.calls import free
from dsa_layers import compilation
from dsa_layers.engine.fuse import prepare
from dsa_layers.models.protocols import CheckpointModel

NAMES = ("accuracy", "against_transformers", "drafts", "latency", "million", "one_gpu", "parallel")
Row = dict[str, Any]
Tell = Callable[[str], None]
Run = TypeVar("Run")


def load(name: str) -> ModuleType:
    return importlib.import_module(f"dsa_bench.e2e.{name}")


def of_models(models: Iterable[str]) -> dict[str, dict[str, Any]]:
    return {"--models": {"nargs": "+", "choices": [*models], "default": [*models], "help": "default: all"}}


def compiled_rows(name: str, **options: Any) -> Iterator[Row]:
    """Compile the kernels that a benchmark needs (`asked`) in parallel processes, then yield its rows.

    The passes would compile them one after the other, which would take most of the benchmark's time.
    """
    module, tell = load(name), seconds_told()
    rows = module.rows(**options, tell=tell)
    if hasattr(module, "asked"):
        compile_ahead(partial(module.asked, **options), tell)
    yield from rows


def compile_ahead(asked: Callable[[], Collection[Variant]], tell: Tell) -> None:
    """Compile the variants that `asked` returns, except those that are in the compile cache already. Without a cache
    directory, do nothing."""
    from dsa.runtime.compile_cache import cache_dir, private_folder  # needs the DSL, which only runs on Linux

    directory = cache_dir()
    if directory is None:
        return  # each process compiles its kernels itself, so compiling ahead would gain nothing
    variants = asked()
    new = sum(is_new for _, is_new in build(variants, private_folder(directory), len(os.sched_getaffinity(0))))
    tell(f"{new} kernels compiled, {len(variants) - new} were there")


def asked_of(
    model: CheckpointModel,
    prompts: Iterable[Sequence[tuple[int, int]]],
    steps: Iterable[tuple[int, ...]],
    arch: str = "sm_90",
) -> set[Variant]:
    """Return the kernels that passes of a model need. The model is on the meta device, so its passes compute nothing.

    prompts: per pass, the numbers of (new, earlier) tokens of each prompt. steps: (number of sequences, tokens of each)
    per decoding step, optionally followed by the number of drafts per sequence.
    """
    prompts, steps = list(prompts), list(steps)
    held = [[new + earlier for new, earlier in each] for each in prompts] + [[n] * count for count, n, *_ in steps]
    pages = max(sum(-(-tokens // model.page_size) for tokens in each) for each in held)
    model.init_buffers(compilation.META)
    prepare(model)
    cache = model.eval().make_cache(pages, model.page_size, compilation.META, state_slots=max(map(len, held)))
    with asked_variants(arch) as found:
        for prompt in prompts:
            compilation.prefill(model, cache, list(prompt))
        for step in steps:
            compilation.decode(model, cache, *step)
    return with_all_tiles(found)


def in_order(found: Iterable[set[Variant]]) -> list[Variant]:
    """Return the variants of several models without duplicates, in an order that does not change between runs."""
    return sorted(set().union(*found), key=repr)


def seconds_told() -> Tell:
    """Make a function that prints each step to standard error with the seconds since the previous step."""
    last = time.monotonic()

    def tell(step: str) -> None:
        nonlocal last
        now = time.monotonic()
        print(f"{now - last:6.1f} s  {step}", file=sys.stderr, flush=True)
        last = now

    return tell


def quiet(step: str) -> None:
    """Print nothing."""


def by_stack(
    names: Iterable[str],
    todo: Callable[[str], Sequence[Run]],
    make: Callable[[str], CheckpointModel],
    rows: Callable[[str, CheckpointModel, Sequence[Run]], Iterator[Row]],
    tell: Tell,
) -> Iterator[Row]:
    """Yield the rows of each stack in turn, and free its model before the next stack is made.

    todo: a stack's name -> its runs; without runs the stack is not made. make: name -> the model. rows: (name, model,
    runs) -> rows.
    """
    for name in names:
        if runs := todo(name):
            model = make(name)
            tell(f"{name}: model made")
            yield from rows(name, model, runs)
            del model
            free()


def pass_row(model: str, run: str, tokens: int, ms: float) -> Row:
    rate = tokens / ms * 1e3
    return {
        "shape": f"{model} {run}",
        "model": model,
        "run": run,
        "tokens": tokens,
        "ms": ms,
        "tokens/s": rate,
        "figure": f"{rate:.0f} tokens/s",
    }
