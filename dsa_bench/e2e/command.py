"""Shared by the commands of whole passes: options, kernels compiled in advance, and a line of JSON per row."""

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from dsa.runtime import backends
from dsa.runtime.asked_variants import asked_variants
from dsa.runtime.variants import Variant
from dsa_layers.cache.cache import Cache
from dsa_layers.compilation.build import build
from dsa_layers.compilation.passes import META
from dsa_layers.compilation.variants import with_all_tiles
from dsa_layers.families.model import CheckpointModel
from dsa_layers.layers import joint_linear

Row = dict[str, Any]
Tell = Callable[[str], None]


def parser(name: str, doc: str, models: Iterable[str]) -> argparse.ArgumentParser:
    """Make the parser of `python -m dsa_bench.e2e.NAME`, with the options that all of these commands have."""
    made = argparse.ArgumentParser(prog=f"python -m dsa_bench.e2e.{name}", description=doc.splitlines()[0])
    made.add_argument("--models", nargs="+", choices=[*models], default=[*models], help="default: all")
    made.add_argument("--compile", action="store_true", help="only compile the kernels, which needs no GPU")
    return made


def need_a_gpu(parser: argparse.ArgumentParser) -> None:
    if reason := backends.why_no_kernels():
        parser.error(f"a benchmark needs a GPU with kernels: {reason}")


def main_of_models(
    options: argparse.ArgumentParser,
    arguments: Sequence[str],
    asked: Callable[[Sequence[str]], Collection[Variant]],
    rows: Callable[..., Iterator[Row]],
) -> int:
    """Run a command whose only options are those of `parser`: `asked` and `rows` take the models' names."""
    args = options.parse_args(arguments)
    return run(options, args.compile, partial(asked, args.models), partial(rows, args.models))


def run(
    parser: argparse.ArgumentParser,
    only_compile: bool,
    asked: Callable[[], Collection[Variant]],
    rows: Callable[..., Iterator[Row]],
) -> int:
    """Print the rows, or only compile their kernels."""
    if only_compile:
        compile_ahead(asked, seconds_told())
        return 0
    need_a_gpu(parser)
    print_rows(compiled(asked, rows))
    return 0


def compiled(
    asked: Callable[[], Collection[Variant]], rows: Callable[..., Iterator[Row]], **options: Any
) -> Iterator[Row]:
    """Compile the kernels that rows ask for in parallel, then yield `rows(tell=..., **options)`.

    Compiled one after the other within the timed passes, the kernels would take most of the time.
    """
    tell = seconds_told()
    compile_ahead(asked, tell)
    yield from rows(tell=tell, **options)


def print_rows(rows: Iterable[Row]) -> None:
    for row in rows:
        print(json.dumps(row), flush=True)


def compile_ahead(asked: Callable[[], Collection[Variant]], tell: Tell) -> None:
    """Compile the variants that are not in the compile cache yet. Without a cache directory, do nothing."""
    from dsa.runtime.compile_cache import cache_dir, private_folder  # needs the DSL, which only runs on Linux

    directory = cache_dir()
    if directory is None:
        return  # each process compiles its kernels
    variants = asked()
    new = sum(is_new for _, is_new in build(variants, private_folder(directory), len(os.sched_getaffinity(0))))
    tell(f"{new} kernels compiled, {len(variants) - new} were there")


def asked_of(
    model: CheckpointModel, tokens: int, slots: int, run: Callable[[CheckpointModel, Cache], None], arch: str = "sm_90"
) -> set[Variant]:
    """Return the kernels that `run(model, cache)` asks for, with a model on the meta device.

    The cache has room for `slots` sequences with `tokens` tokens in all, each a multiple of the page size.
    """
    model.init_buffers(META)
    joint_linear.join(model)
    cache = model.eval().make_cache(-(-tokens // model.page_size), model.page_size, META, state_slots=slots)
    with asked_variants(arch) as found:
        run(model, cache)
    return with_all_tiles(found)


def in_order(found: Iterable[set[Variant]]) -> list[Variant]:
    """Sort all variants of several models."""
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


def free() -> None:
    """Free what is no longer referenced, and the GPU memory that torch caches."""
    gc.collect()
    torch.cuda.empty_cache()
