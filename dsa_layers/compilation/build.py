"""Compile variants of kernels into the compile cache, and pack those that a wheel ships.

usage: python -m dsa_layers.compilation.build FOLDER [MODULE...]        MODULE: dsa.kernels.FAMILY.NAME

Compiles all shipped variants of all kernel modules, or of MODULE..., into the compile cache unless they are there, and
writes FOLDER/MODULE.tar.xz (`dsa.runtime.compile_cache`). An archive that exists keeps its other objects, so that a run
with another version of the DSL adds to it.
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
    """Compile in several processes, because the DSL compiles in one thread. Yield each variant once the folder, as a
    compile cache, holds it, and whether it had to be compiled.

    Raises RuntimeError, which names the variant, for one that does not compile or that the folder does not take.
    Variants that were compiled before the error stay in the folder.
    """
    context = multiprocessing.get_context("spawn")  # a fork would copy the locks of this process's threads
    with ProcessPoolExecutor(jobs, context, _prepare_process, (directory,)) as pool:
        work = {pool.submit(_compile, variant): variant for variant in variants}
        try:
            for future in as_completed(work):
                variant = work[future]
                yield variant, future.result()
        except Exception as error:  # the compiler may raise anything
            call = f"{variant.function}({', '.join(map(repr, variant.arguments))})"
            raise RuntimeError(f"{call} does not compile: {type(error).__name__}: {error}") from error
        finally:
            pool.shutdown(cancel_futures=True)


def _prepare_process(directory: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the process that waits
    os.environ["DSA_CACHE_DIR"] = str(directory)


def _compile(variant: Variant) -> bool:
    from dsa.runtime.compile_cache import fill

    function = getattr(importlib.import_module(variant.module), variant.function)
    return fill(function, *variant.arguments)


def kernel_modules() -> list[str]:
    """Return the names of the modules that ship variants."""
    names = [name for _, name, _ in pkgutil.walk_packages(dsa.kernels.__path__, f"{dsa.kernels.__name__}.")]
    return sorted(name for name in names if hasattr(importlib.import_module(name), "shipped_variants"))


def pack(folder: Path, modules: Sequence[str], jobs: int) -> Iterator[Path]:
    """Yield each archive once it is written. Raises what `build` raises."""
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
