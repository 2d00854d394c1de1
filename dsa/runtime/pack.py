"""Pack the variants that a wheel ships into archives.

usage: python -m dsa.runtime.pack FOLDER [MODULE...]        MODULE: dsa.kernels.FAMILY.NAME

The command compiles all shipped variants of the given modules, by default of all kernel modules, into the compile
cache. It skips variants that the cache already contains. Then it writes FOLDER/MODULE.tar.xz for each module
(`dsa.runtime.compile_cache`). An existing archive keeps its other objects, so runs with several versions of the DSL
accumulate in one archive.
"""

import importlib
import os
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dsa.runtime.build import build
from dsa.runtime.compile_cache import archive_of, cache_dir, object_file, read_archive, stem_of, write_archive
from dsa.runtime.variants import Variant

KERNELS = Path(__file__).parent.parent / "kernels"


def kernel_modules() -> list[str]:
    """Return the sorted names of the kernel modules that have the function `shipped_variants`."""
    names = [name for _, name, _ in pkgutil.walk_packages([str(KERNELS)], "dsa.kernels.")]
    return sorted(name for name in names if hasattr(importlib.import_module(name), "shipped_variants"))


def pack(folder: Path, modules: Sequence[str], jobs: int) -> Iterator[Path]:
    """Compile the shipped variants of `modules` and write one archive per module to `folder`. Yield the path of each
    archive once it is written.

    Raises OSError if DSA_CACHE_DIR is empty, and RuntimeError if a variant does not compile (`build`).
    """
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
