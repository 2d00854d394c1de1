"""Compiled kernels that come with the package, so that a first run compiles nothing.

A wheel holds compiled/MODULE.tar.xz for each kernel module: the object files of its shipped variants, under the names
of the compile cache, `stem`.<digest of the bytes>.o. A stem names sources, arguments and versions, so an archive that
was made for other versions of the DSL has no kernel that is asked for. An editable install has no archives.
`python -m dsa_layers.compilation.pack` writes them.
"""

import functools
import hashlib
import io
import lzma
import tarfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "compiled"


def packed_object(module: str, stem: str) -> bytes | None:
    """The object file of a kernel of `module`, or None if the package does not have it."""
    return _read(archive_of(FOLDER, module)).get(stem)


def archive_of(folder: Path, module: str) -> Path:
    return folder / f"{module.rpartition('.')[2]}.tar.xz"


def name_of(stem: str, content: bytes) -> str:
    """The name of an object file in the compile cache and in an archive."""
    return f"{stem}.{hashlib.sha256(content).hexdigest()[:16]}.o"


def write_archive(path: Path, objects: Mapping[str, bytes]) -> None:
    """Write {stem: object file}. The same objects give the same bytes."""
    with lzma.open(path, "wb", preset=6) as stream, tarfile.open(fileobj=stream, mode="w") as archive:
        for stem, content in sorted(objects.items()):
            member = tarfile.TarInfo(name_of(stem, content))
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def read_archive(path: Path) -> dict[str, bytes]:
    """{stem: object file} of an archive. Raises OSError, lzma.LZMAError, tarfile.TarError or ValueError if damaged."""
    with lzma.open(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        return dict(_checked(archive))


def _checked(archive: Iterable[tarfile.TarInfo]) -> Iterable[tuple[str, bytes]]:
    for member in archive:
        content = archive.extractfile(member).read()
        stem = member.name.split(".")[0]
        if member.name != name_of(stem, content):
            raise ValueError(f"{member.name} does not have its bytes")
        yield stem, content


# One module's objects, up to 10 MB, for the variants that are asked for in a row.
@functools.lru_cache(maxsize=1)
def _read(path: Path) -> Mapping[str, bytes]:
    try:
        return read_archive(path)
    except FileNotFoundError:
        return {}
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError, ValueError) as error:
        warnings.warn(f"dsa: {path} cannot be read ({error}); compiling", RuntimeWarning, stacklevel=2)
        return {}
