"""A folder, and files in it, that no other user can have written: what is loaded from there runs as our own code.

The folder, and what is missing above it, is created with mode 0700. It is used if it belongs to this user and neither
its group nor others may write to it. Then only this user can add, rename or replace what is in it.

Whoever may rename the folder itself could put another one in its place. A folder above it that everyone may write to is
therefore accepted only with the sticky bit, as /tmp has it, which lets nobody rename what is not theirs. The owner or
the group of a parent folder can still rename it at any time, e.g. the user whose HOME root keeps under sudo. So a file
is opened once, and the DSL, which opens files by their paths, gets the path of the descriptor: what was checked is what
is loaded, and what is written goes into the file that was created. Links on the way are followed once, before anything
is checked.
"""

import os
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def private_folder(directory: Path) -> Path:
    """`directory` without links, created if it is missing; an OSError says why it cannot be used."""
    missing, existing = [], directory
    while not (existing.exists() or existing.is_symlink()):
        missing.append(existing)
        existing = existing.parent
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    directory = Path(os.path.realpath(directory, strict=True))  # Path.resolve raises no OSError for a loop of links
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory} is not a folder")
    for above in directory.parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise PermissionError(f"everyone may rename what is in {above}: chmod +t {above}")
    _check("folder", directory, directory.stat())
    return directory


def open_private_file(path: Path) -> BinaryIO:
    """A regular file of this user that nobody else may write, to be read; else an OSError says what is wrong."""
    # A pipe that nobody writes to would block without O_NONBLOCK, which means nothing for regular files.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise PermissionError("it is not a regular file")
        _check("file", path, status)
    except OSError:
        os.close(handle)
        raise
    return open(handle, "rb")


def create_private_file(directory: Path, prefix: str) -> tuple[BinaryIO, Path]:
    """A new, empty file of mode 0600 under a name that did not exist, not even as a link; to be written and read."""
    handle, path = tempfile.mkstemp(prefix=prefix, suffix=".part", dir=directory)
    return open(handle, "w+b"), Path(path)


def path_of(file: BinaryIO) -> Path:
    """A path of this very file while it is open, whatever has come to lie where it was opened."""
    return Path(f"/proc/self/fd/{file.fileno()}")


def open_lock(path: Path) -> int:
    """A descriptor of the file, created with mode 0600 if it is missing; a link is an OSError."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _check(what: str, path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise PermissionError(f"the {what} belongs to user {status.st_uid} and not to {os.geteuid()}")
    if status.st_mode & _OTHERS_WRITE:
        raise PermissionError(f"other users may write to the {what}: chmod go-w {path}")
