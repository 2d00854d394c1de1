"""Compiles variants of kernels into the compile cache, in processes of their own: the DSL compiles in one thread."""

import concurrent.futures
import importlib
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

from dsa.ops.asked_variants import Variant


def build(variants: Iterable[Variant], directory: Path, jobs: int) -> Iterator[tuple[Variant, bool]]:
    """Each variant once the folder, as a compile cache, holds it, and whether it had to be compiled for that.

    Raises OSError for a folder that cannot be used, and RuntimeError that names the variant for one that does not
    compile or whose process ended; what was compiled until then stays.
    """
    # Fresh processes: a fork would copy this one's threads' locks.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context, _begin, (directory,)) as pool:
        work = {pool.submit(_compile, variant): variant for variant in variants}
        try:
            for future in concurrent.futures.as_completed(work):
                yield work[future], _result(work[future], future)
        finally:
            pool.shutdown(cancel_futures=True)


def _begin(directory: Path) -> None:
    """What a process does first. Ctrl-C is for the one that waits for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["DSA_CACHE_DIR"] = str(directory)


def _compile(variant: Variant) -> bool:
    from dsa.cute.compile_cache import fill

    return fill(getattr(importlib.import_module(variant.module), variant.function), *variant.arguments)


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
