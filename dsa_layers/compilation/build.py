"""Compile variants of kernels into the compile cache, in several processes: the DSL compiles in one thread."""

import importlib
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from dsa.runtime.variants import Variant


def build(variants: Iterable[Variant], directory: Path, jobs: int) -> Iterator[tuple[Variant, bool]]:
    """Yield each variant once the folder, as a compile cache, holds it, and whether it had to be compiled.

    Raises OSError for a folder that cannot be used, and RuntimeError, which names the variant, for one that does not
    compile or whose process ended. Variants that were compiled before the error stay in the folder.
    """
    context = multiprocessing.get_context("spawn")  # a fork would copy the locks of this process's threads
    with ProcessPoolExecutor(jobs, context, _prepare_process, (directory,)) as pool:
        work = {pool.submit(_compile, variant): variant for variant in variants}
        try:
            for future in as_completed(work):
                variant = work[future]
                yield variant, future.result()
        except OSError:
            raise
        except Exception as error:  # the compiler may raise anything
            call = f"{variant.function}({', '.join(map(repr, variant.arguments))})"
            first = next(iter(str(error).strip().splitlines()), "")
            raise RuntimeError(f"{call} does not compile: {type(error).__name__}: {first}") from error
        finally:
            pool.shutdown(cancel_futures=True)


def _prepare_process(directory: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the process that waits
    os.environ["DSA_CACHE_DIR"] = str(directory)


def _compile(variant: Variant) -> bool:
    from dsa.runtime.compile_cache import fill

    function = getattr(importlib.import_module(variant.module), variant.function)
    return fill(function, *variant.arguments)
