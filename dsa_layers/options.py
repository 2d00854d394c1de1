"""Types of command line options, which check the value that the parser passes them."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path


def at_least(least: int) -> Callable[[str], int]:
    def integer(text: str) -> int:  # argparse shows this name: "invalid integer value"
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return integer


positive = at_least(1)


def gigabytes(text: str) -> int:
    """Return the number of bytes in `text` x 10^9 bytes."""
    value = float(text) * 1e9
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text}")
    return int(value)


def path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return Path(text)


def check_output(option: str, path: Path | None) -> None:
    """Raise ValueError for a path that no file can have, before the work whose result it would hold."""
    if path is not None and path.is_dir():
        raise ValueError(f"{option}: must be a file, got the directory {path}")
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"{option}: there is no directory {path.parent}")
