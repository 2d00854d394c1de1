"""Digests of kernels' sources, kept in the compile cache's folder: to parse the modules of all kernels takes a second,
more than to load what was compiled of them.

`sources.json` is of one tree, {"tree": SHA-256 of the bytes of all of dsa's modules, "digests": {module: digest}}. It
is read if no other user can have written it, and replaced when a module's digest is missing or the tree is another. Of
two processes that replace it together the later one wins, and a digest that is lost is found again. A process behind
whose back a source is edited neither reads nor replaces it from then on: it knows the tree as it was before.
"""

import contextlib
import functools
import json
import os
import re
from pathlib import Path

from dsa.cute.private_files import create_private_file, open_private_file, path_of, private_folder
from dsa.source_digest import digest_of_bytes, source_digest, unchanged

_NAME = "sources.json"


@functools.cache
def kept_source_digest(module: str, directory: Path | None) -> str:
    """`source_digest(module)`, by what lies in the folder or is put there; without one, or where it cannot be used, by
    the sources alone."""
    digests: dict[str, str] = {}
    with contextlib.suppress(OSError):
        directory = directory and private_folder(directory)
        digests = _read(directory) if directory and unchanged() else {}
        if module in digests:
            return digests[module]
    digest = source_digest(module)
    with contextlib.suppress(OSError):
        if directory:
            _write(directory, digest_of_bytes(), {**digests, module: digest})
    return digest


def _read(directory: Path) -> dict[str, str]:
    with contextlib.suppress(FileNotFoundError), open_private_file(directory / _NAME) as file:
        try:
            found = json.load(file)
            if found["tree"] == digest_of_bytes() and all(map(_is_digest, found["digests"].values())):
                return found["digests"]
        except (ValueError, LookupError, TypeError, AttributeError):  # damaged
            pass
    return {}


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{16}", value) is not None


def _write(directory: Path, tree: str, digests: dict[str, str]) -> None:
    if not unchanged():
        return
    file, partial = create_private_file(directory, f"{_NAME}.")
    try:
        with file:
            path_of(file).write_text(json.dumps({"tree": tree, "digests": digests}, indent=1))
        os.replace(partial, directory / _NAME)
    finally:
        partial.unlink(missing_ok=True)
