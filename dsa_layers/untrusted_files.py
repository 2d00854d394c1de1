"""Files of a checkpoint, which a stranger may have written: read within bounds.

What reading costs follows from the file's size, which is limited, and from no number inside it.
"""

import json
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from dsa_layers.arguments import shown_json

_MAX_VALUES = 1_000_000

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def is_there(path: Path) -> bool:
    """Whether there is something of this name; a link to nothing is a file that was not fetched, and no absent one.
    OSError where that cannot be found out."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def file_size(path: Path, error: type[ValueError]) -> int:
    """Bytes in the file `path`. Raises FileNotFoundError, or `error` for what is no file, for a link to nothing and for
    a git-LFS pointer."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise error(f"{path}: cannot be read: it is no regular file")
        with path.open("rb") as stream:
            head = stream.read(len(_LFS_POINTER))
    except FileNotFoundError:
        if path.is_symlink():
            raise error(f"{path}: no such file: the link leads nowhere") from None
        raise
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem}") from problem
    if head == _LFS_POINTER:
        raise error(f"{path}: is a git-LFS pointer in place of the file; `git lfs pull` fetches the file itself")
    return status.st_size


def read_file(path: Path, error: type[ValueError], max_bytes: int) -> bytes:
    """The content of `path`. Raises as `file_size` does, and `error` for more than `max_bytes`."""
    size = file_size(path, error)
    try:
        with path.open("rb") as stream:
            content = stream.read(max_bytes + 1) if size <= max_bytes else None
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem}") from problem
    if content is None or len(content) > max_bytes:
        raise error(f"{path}: has {size} bytes; accepted: at most {max_bytes}")
    return content


def read_text(path: Path, error: type[ValueError], max_bytes: int) -> str:
    """The content of `path`, which must be UTF-8. Raises as `read_file` does."""
    try:
        return read_file(path, error, max_bytes).decode("utf-8")
    except UnicodeDecodeError as problem:
        raise error(f"{path}: cannot be read: {problem}") from problem


def check_values(path: Path, text: str, error: type[ValueError], most: int) -> None:
    """Raises `error` if the JSON `text` of `path` may hold more than `most` values: an empty list is 3 bytes there and
    64 in memory."""
    if sum(map(text.count, "[{,")) > most:
        raise error(f"{path}: holds too many values; accepted: at most {most}")


def read_json_object(
    path: Path, error: type[ValueError], max_bytes: int, max_values: int = _MAX_VALUES
) -> dict[str, Any]:
    """The JSON object in `path`. Raises as `read_text` does, and `error` for anything else than one JSON object, for
    names that come twice in it, and for nesting, numbers or counts beyond what is accepted."""
    text = read_text(path, error, max_bytes)
    check_values(path, text, error, max_values)
    twice: list[str] = []

    def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs) and not twice:
            twice.extend(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        return values

    try:
        value = json.loads(text, object_pairs_hook=to_dict)
    except RecursionError:
        raise error(f"{path}: not valid JSON: it is nested too deeply") from None
    except ValueError as problem:  # also an integer of more digits than Python reads
        raise error(f"{path}: not valid JSON: {problem}") from problem
    if not isinstance(value, dict):
        raise error(f"{path}: must hold a JSON object, got {shown_json(value)}")
    if twice:
        raise error(f"{path}: {shown_json(twice[0])} is listed twice in one JSON object")
    return value
