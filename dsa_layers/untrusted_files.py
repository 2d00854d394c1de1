"""Reading the files of a checkpoint, which a stranger may have written.

The cost of reading follows from the file's size, which is limited, and not from any number in the file.
"""

import json
import os
from pathlib import Path
from typing import Any

from dsa_layers.arguments import shown_json

_MAX_VALUES = 1_000_000  # of a JSON file: an empty list takes 3 bytes there and 64 in memory
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def is_there(path: Path) -> bool:
    """Whether a file of this name exists. A link to nothing counts: it is a file that was not downloaded."""
    return os.path.lexists(path)


def check_file(path: Path, error: type[ValueError]) -> None:
    """Raises FileNotFoundError, or `error` for a path that is no regular file, a link to nothing and a git-LFS
    pointer."""
    try:
        if not path.is_file():
            if path.exists():
                raise error(f"{path}: cannot be read: it is no regular file")
            if is_there(path):
                raise error(f"{path}: no such file: the link leads nowhere")
        with path.open("rb") as stream:
            head = stream.read(len(_LFS_POINTER))
    except FileNotFoundError:
        raise
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem}") from problem
    if head == _LFS_POINTER:
        raise error(f"{path}: is a git-LFS pointer in place of the file; `git lfs pull` fetches the file itself")


def read_text(path: Path, error: type[ValueError], max_bytes: int) -> str:
    """The content of `path`, which must be UTF-8. Raises as `check_file` does, and `error` for a larger file."""
    check_file(path, error)
    try:
        with path.open("rb") as stream:
            content = stream.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise error(f"{path}: has {path.stat().st_size} bytes; accepted: at most {max_bytes}")
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise error(f"{path}: cannot be read: {problem}") from problem


def read_json_object(path: Path, error: type[ValueError], max_bytes: int) -> dict[str, Any]:
    """The JSON object in `path`. Raises as `read_text` does, and `error` for anything but one JSON object, and for a
    file with too many values or levels."""
    text = read_text(path, error, max_bytes)
    if sum(map(text.count, "[{,")) > _MAX_VALUES:
        raise error(f"{path}: holds too many values; accepted: at most {_MAX_VALUES}")
    try:
        value = json.loads(text)
    except RecursionError:
        raise error(f"{path}: not valid JSON: it is nested too deeply") from None
    except ValueError as problem:  # also for an integer of more digits than Python reads
        raise error(f"{path}: not valid JSON: {problem}") from problem
    if not isinstance(value, dict):
        raise error(f"{path}: must hold a JSON object, got {shown_json(value)}")
    return value
