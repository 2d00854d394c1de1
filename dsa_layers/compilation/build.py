"""Compiles variants of kernels into the compile cache, in processes of their own: the DSL compiles in one thread."""

import concurrent.futures
import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from dsa.runtime.variants import Variant


def build(variants: Iterable[Variant], directory: Path, jobs: int) -> Iterator[tuple[Variant, bool]]:
    """Each variant once the folder, as a compile cache, holds it, and whether it had to be compiled for that.

    Raises OSError for a folder that cannot be used, and RuntimeError that names the variant for one that does not
    compile or whose process ended; what was compiled until then stays.
    """
    variants = list(variants)
    # A process takes seconds to begin, so one looks for what is there before many compile the rest.
    kept = [False] * len(variants)
    if variants and any(directory.glob("*.o")):
        with _processes(1, directory) as pool:
            kept = pool.submit(_are_kept, variants).result()
    yield from ((variant, False) for variant, there in zip(variants, kept) if there)
    missing = [variant for variant, there in zip(variants, kept) if not there]
    if not missing:
        return
    with _processes(min(jobs, len(missing)), directory) as pool:
        work = {pool.submit(_compile, variant): variant for variant in missing}
        try:
            for future in concurrent.futures.as_completed(work):
                yield work[future], _result(work[future], future)
        finally:
            pool.shutdown(cancel_futures=True)


def _processes(count: int, directory: Path) -> concurrent.futures.ProcessPoolExecutor:
    """Fresh ones: a fork would copy this one's threads' locks."""
    return concurrent.futures.ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _begin, (directory,))


def _begin(directory: Path) -> None:
    """What a process does first. Ctrl-C is for the one that waits for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["DSA_CACHE_DIR"] = str(directory)


def _are_kept(variants: list[Variant]) -> list[bool]:
    """Whether the folder has each variant's object file, undamaged and safe to load."""
    from dsa.runtime.compile_cache import is_on_disk

    return [is_on_disk(_function(variant), *variant.arguments) for variant in variants]


def _compile(variant: Variant) -> bool:
    from dsa.runtime.compile_cache import fill

    return fill(_function(variant), *variant.arguments)


def _function(variant: Variant) -> Callable:
    return getattr(importlib.import_module(variant.module), variant.function)


def _result(variant: Variant, future: "concurrent.futures.Future[bool]") -> bool:
    try:
        return future.result()
    except OSError:
        raise
    except Exception as error:  # whatever the compiler says
        first = next(iter(str(error).strip().splitlines()), "")
        raise RuntimeError(f"{described(variant)} does not compile: {type(error).__name__}: {first}") from error


def described(variant: Variant) -> str:
    """The variant as a call."""
    return f"{variant.function}({', '.join(map(repr, variant.arguments))})"
