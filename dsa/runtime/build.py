"""Compile kernel variants into the compile cache, in several processes."""

import importlib
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from dsa.runtime.variants import Variant


def build(variants: Iterable[Variant], directory: Path, jobs: int) -> Iterator[tuple[Variant, bool]]:
    """Compile variants into the compile cache `directory` in `jobs` processes, because the DSL compiles in one thread.

    Yield (variant, whether it was compiled now) as soon as the cache contains the variant.
    Raises RuntimeError, which names the variant, if a variant does not compile or cannot be written to `directory`.
    Variants that were compiled before the error stay in the cache.
    """
    context = multiprocessing.get_context("spawn")  # a fork would copy the locks of this process's threads
    with ProcessPoolExecutor(jobs, context, _prepare_process, (directory,)) as pool:
        work = {pool.submit(_compile, variant): variant for variant in variants}
        try:
            for future in as_completed(work):
                variant = work[future]
                yield variant, future.result()
        except Exception as error:  # the compiler may raise any exception
            call = f"{variant.function}({', '.join(map(repr, variant.arguments))})"
            raise RuntimeError(f"{call} does not compile: {type(error).__name__}: {error}") from error
        finally:
            pool.shutdown(cancel_futures=True)


def _prepare_process(directory: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent process handles Ctrl-C
    os.environ["DSA_CACHE_DIR"] = str(directory)


def _compile(variant: Variant) -> bool:
    from dsa.runtime.compile_cache import fill

    function = getattr(importlib.import_module(variant.module), variant.function)
    return fill(function, *variant.arguments)
