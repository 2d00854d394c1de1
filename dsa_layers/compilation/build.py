"""Compile kernel variants into the compile cache, and pack the variants that a wheel ships into archives.

usage: python -m dsa_layers.compilation.build FOLDER [MODULE...]        MODULE: dsa.kernels.FAMILY.NAME

The command compiles all shipped variants of the given modules, by default of all kernel modules, into the compile
cache. It skips variants that the cache already contains. Then it writes FOLDER/MODULE.tar.xz for each module
(`dsa.runtime.compile_cache`). An existing archive keeps its other objects, so runs with several versions of the DSL
accumulate in one archive.
"""

import importlib
import multiprocessing
import os
import pkgutil
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import dsa.kernels
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


def kernel_modules() -> list[str]:
    """Return the sorted names of the kernel modules that have the function `shipped_variants`."""
    names = [name for _, name, _ in pkgutil.walk_packages(dsa.kernels.__path__, f"{dsa.kernels.__name__}.")]
    return sorted(name for name in names if hasattr(importlib.import_module(name), "shipped_variants"))


def pack(folder: Path, modules: Sequence[str], jobs: int) -> Iterator[Path]:
    """Compile the shipped variants of `modules` and write one archive per module to `folder`. Yield the path of each
    archive once it is written.

    Raises OSError if DSA_CACHE_DIR is empty, and RuntimeError if a variant does not compile (`build`).
    """
    from dsa.runtime.compile_cache import archive_of, cache_dir, object_file, read_archive, stem_of, write_archive

    directory = cache_dir()
    if directory is None:
        raise OSError("DSA_CACHE_DIR is empty: compiled kernels are not kept")
    shipped = {module: importlib.import_module(module).shipped_variants() for module in modules}
    variants = [Variant(f.__module__, f.__name__, args) for found in shipped.values() for f, args in found]
    list(build(variants, directory, jobs))
    folder.mkdir(parents=True, exist_ok=True)
    for module, found in shipped.items():
        path = archive_of(folder, module)
        before = read_archive(path) if path.exists() else {}
        write_archive(path, before | {stem_of(f, args): object_file(f, *args) for f, args in found})
        yield path


if __name__ == "__main__":
    folder, *modules = sys.argv[1:]
    paths = list(pack(Path(folder), modules or kernel_modules(), len(os.sched_getaffinity(0))))
    print(f"{len(paths)} archives, {sum(path.stat().st_size for path in paths) / 1e6:.1f} MB")
