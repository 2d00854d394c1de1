"""Documents that have what a receipt's entry says between two marks."""

import argparse
import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsa_layers import options

Row = dict[str, Any]


def measured(entry: Mapping[str, Any]) -> tuple[Sequence[Row], str]:
    """(The entry's rows, where and when they were measured and whether today's code is that code). ValueError without
    rows.

    entry: {"bench": the rows, "device", "date", "commit", "torch", "dsl", "unverified": None, nothing or the reason}
    """
    if not entry["bench"]:
        raise ValueError("entry: must have rows in 'bench', got none")
    place = f"Measured on {entry['device']}, torch {entry['torch']}, CuTe DSL {entry['dsl']}, on {entry['date']}"
    place += f", of commit {entry['commit']}."
    if entry.get("unverified"):
        place += f" Today's code is unverified: {entry['unverified']}."
    return entry["bench"], place


def not_measured(entry: Mapping[str, Any]) -> str | None:
    """What stands for the tables of an entry that has no rows and says why."""
    has_rows = entry.get("bench") or not entry.get("unverified")
    return None if has_rows else f"Nothing is measured on this code: {entry['unverified']}."


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    rules = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*rules, *(f"| {' | '.join(line)} |" for line in lines)])


def list_of(lines: Sequence[str]) -> list[str]:
    """A section with a line each, or none."""
    return ["\n".join(f"- {line}" for line in lines)] if lines else []


def between_marks(text: str, begin: str, end: str, generated: str) -> str:
    """The text with `generated` between the lines `begin` and `end`."""
    before, first, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    if not (first and last):
        raise ValueError(f"text: must have the lines {begin!r} and {end!r}, in this order")
    return f"{before}{begin}\n\n{generated}\n\n{end}{after}"


def entry_of(receipt: Path, name: str, arch: str | None) -> Mapping[str, Any]:
    """The receipt's entry of that name, of this arch or of the only one that has it."""
    try:
        entries = json.loads(receipt.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"receipt: must be JSON, got {receipt}: {error}") from None
    if not isinstance(entries, dict) or not all(isinstance(of_arch, dict) for of_arch in entries.values()):
        raise ValueError(f"receipt: must have the entries of each arch, got {receipt} with something else")
    archs = [found for found in entries if name in entries[found]]
    if not archs:
        raise ValueError(f"receipt: must have an entry {name}, got {receipt} without one")
    if (arch is None and len(archs) != 1) or (arch is not None and arch not in archs):
        raise ValueError(f"arch: must be one of {', '.join(archs)}, which have an entry {name}, got {arch}")
    return entries[arch or archs[0]][name]


def command(module: str, about: str, write: Callable[[Path, Path, str | None], None], arguments: Sequence[str]) -> int:
    """`python -m MODULE RECEIPT DOCUMENT [ARCH]`, which calls `write` with these. about: the module's docstring."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about.splitlines()[0])
    parser.add_argument("receipt", type=options.path, metavar="RECEIPT", help="tests/gpu/receipt.json, or one like it")
    parser.add_argument("document", type=options.path, metavar="DOCUMENT", help="with the marks; it is written anew")
    parser.add_argument("arch", nargs="?", metavar="ARCH", help="default: the only one that has the entry")
    args = parser.parse_args(arguments)
    with wrong_files(parser):
        write(args.receipt, args.document, args.arch)
    return 0


@contextlib.contextmanager
def wrong_files(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Errors about files and what is in them, and a missing matplotlib, end the command as a wrong call does."""
    try:
        yield
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (ValueError, RuntimeError) as error:
        parser.error(re.sub(r"^text: ", "document: ", str(error)))
