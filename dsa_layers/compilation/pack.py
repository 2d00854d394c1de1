"""Pack the compiled kernels that a wheel ships.

usage: python -m dsa_layers.compilation.pack FOLDER [MODULE...]        MODULE: dsa.kernels.FAMILY.NAME

Compiles all shipped variants of all kernel modules, or of MODULE..., into the compile cache unless they are there, and
writes FOLDER/MODULE.tar.xz (`dsa.runtime.compile_cache`). An archive that exists keeps its other objects, so that a run
with another version of the DSL adds to it.
"""

import importlib
import os
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import dsa.kernels
from dsa.runtime.compile_cache import archive_of, cache_dir, object_file, read_archive, stem_of, write_archive
from dsa.runtime.variants import Variant
from dsa_layers.compilation.build import build


def kernel_modules() -> list[str]:
    """Return the names of the modules that ship variants."""
    names = [name for _, name, _ in pkgutil.walk_packages(dsa.kernels.__path__, f"{dsa.kernels.__name__}.")]
    return sorted(name for name in names if hasattr(importlib.import_module(name), "shipped_variants"))


def pack(folder: Path, modules: Sequence[str], jobs: int) -> Iterator[Path]:
    """Yield each archive once it is written. Raises what `build` raises."""
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
