"""What this package's files looked like when a process imported it, before it read any other of its modules.

After an edit a process may have the constants of the old sources and the code of the new ones: what it compiles then
must not be kept under a digest (`dsa.source_digest.unchanged`).
"""

import functools
import os
from pathlib import Path


def stamp(path: str) -> tuple[int, int] | None:
    """Size and time of change, which an edit changes. None for what is gone, and for a link to nothing, as editors lay
    beside a file that is being edited."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


@functools.cache
def first_stamps(package: Path) -> dict[str, tuple[int, int] | None]:
    """The stamp of each of its modules at the first call."""
    return {path: stamp(path) for path in map(str, package.rglob("*.py"))}


first_stamps(Path(__file__).resolve().parent)
