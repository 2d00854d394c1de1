"""Errors of files that are written."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def naming(file: object) -> Iterator[None]:
    """Name the file in an OSError: Python leaves the name out if a disk is full."""
    try:
        yield
    except OSError as error:
        error.filename = str(file)
        raise
