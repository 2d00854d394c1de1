"""Pack the compiled kernels that a wheel ships.

usage: python -m dsa_layers.compilation.pack FOLDER [MODULE...]

Compiles all shipped variants of all kernel modules, or of MODULE..., into the compile cache, where they are not there
yet, and writes FOLDER/MODULE.tar.xz (`dsa.runtime.packed_kernels`). An archive that exists keeps its other objects, so
that a run with another version of the DSL adds to it.
"""

import importlib
import os
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import dsa.kernels
from dsa.runtime.compile_cache import cache_dir, object_file, stem_of
from dsa.runtime.packed_kernels import archive_of, read_archive, write_archive
from dsa.runtime.variants import Variant
from dsa_layers.compilation.build import build


def kernel_modules() -> list[str]:
    """Names of the modules that ship variants."""
    names = [name for _, name, _ in pkgutil.walk_packages(dsa.kernels.__path__, f"{dsa.kernels.__name__}.")]
    return sorted(name for name in names if hasattr(importlib.import_module(name), "shipped_variants"))


def pack(folder: Path, modules: Sequence[str], jobs: int) -> Iterator[Path]:
    """Each archive once it is written. Raises what `build` raises."""
    directory = cache_dir()
    if directory is None:
        raise OSError("DSA_CACHE_DIR is empty: compiled kernels are not kept")
    shipped = {module: importlib.import_module(module).shipped_variants() for module in modules}
    variants = [Variant(f.__module__, f.__name__, args) for found in shipped.values() for f, args in found]
    for _ in build(variants, directory, jobs):
        pass

    folder.mkdir(parents=True, exist_ok=True)
    for module, found in shipped.items():
        path = archive_of(folder, module)
        before = read_archive(path) if path.exists() else {}
        write_archive(path, before | {stem_of(f, args): object_file(f, *args) for f, args in found})
        yield path


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        print(__doc__.strip(), file=sys.stderr)
        return 2
    folder, *modules = arguments
    paths = list(pack(Path(folder), modules or kernel_modules(), len(os.sched_getaffinity(0))))
    print(f"{len(paths)} archives, {sum(path.stat().st_size for path in paths) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
