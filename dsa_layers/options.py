"""Values of options, checked as they are parsed, and the files and texts that they name."""

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path

from dsa_layers.arguments import shown

# Threads or processes at most, for each CPU that the machine has. More take longer than fewer; where the system has no
# more threads to give, OpenMP ends the process.
OF_A_CPU = 4


def integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, got {text[:60]!r}") from None


def _at_least(least: int) -> Callable[[str], int]:
    def checked(text: str) -> int:
        value = integer(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return checked


not_negative, positive, several = map(_at_least, (0, 1, 2))


def of_cpus(text: str) -> int:
    """Threads or processes."""
    value, cpus = positive(text), os.cpu_count() or 1
    if value > OF_A_CPU * cpus:
        raise argparse.ArgumentTypeError(
            f"must be at most {OF_A_CPU * cpus}, {OF_A_CPU} for each of {cpus} CPUs, got {value}"
        )
    return value


def temperature(text: str) -> float:
    value = number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number of at least 0, got {value}")
    return value


def top_p(text: str) -> float:
    value = number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {value}")
    return value


def size(text: str) -> float:
    value = number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {value}")
    return value


def seed(text: str) -> int:
    value = integer(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 2^63, got {value}")
    return value


def some_text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty, got ''")
    return text


def path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return Path(text)


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text[:60]!r}") from None


def check_output(option: str, path: Path | None) -> None:
    """Raises ValueError for a file that cannot be written, before the work whose result it would hold."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option}: must be a file, got the directory {path}")
    if not path.parent.is_dir():
        raise ValueError(f"{option}: there is no directory {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option}: {path} cannot be written")


def text(option: str, text: str) -> str:
    """The text of an option. Bytes unknown to the locale come as surrogates; ValueError if they are no UTF-8."""
    if not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    try:
        content = os.fsencode(text)
    except UnicodeEncodeError:  # surrogates that stand for no byte
        raise ValueError(f"{option}: must be UTF-8, got {shown(text)}") from None
    return decoded(option, content)


def decoded(source: str, content: bytes) -> str:
    """The text of `content`. ValueError, which names the source and shows the wrong bytes, unless it is UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(source, error) from None


def not_utf8(source: str, error: UnicodeDecodeError) -> ValueError:
    return ValueError(f"{source}: must be UTF-8, got {shown(error.object[error.start : error.end])}")
