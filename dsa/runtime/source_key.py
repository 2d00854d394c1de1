"""A key of a kernel's sources: the bytes of its family's folder and of dsa/cute. Kernels import nothing else.

A comment changes the key too, and then the family's kernels compile again. That costs less than telling which bytes of
a file matter.
"""

import functools
import hashlib
import sys
from pathlib import Path

_SHARED = Path(__file__).resolve().parent.parent / "cute"


@functools.cache
def source_key(module: str) -> str:
    """The key of an imported kernel module, as its folder was at the first call in this process."""
    return key_on_disk(module)


def key_on_disk(module: str) -> str:
    """The same key, of the files as they are now."""
    return folder_key(Path(sys.modules[module].__file__).resolve().parent)


def folder_key(family: Path) -> str:
    """SHA-256 (16 hex digits) over the paths and bytes of the Python files of `family` and of dsa/cute."""
    digest = hashlib.sha256()
    for folder in (family, _SHARED):
        for path in sorted(filter(Path.is_file, folder.rglob("*.py"))):  # an editor's lock is a link to nothing
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]
