"""Types of command line options for argparse. Each type converts and checks the text of an option."""

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
    """Convert a number of gigabytes (10^9 bytes) to bytes."""
    value = float(text) * 1e9
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text}")
    return int(value)


def path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return Path(text)
