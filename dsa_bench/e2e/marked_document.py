"""Documents that have what a receipt's entry says between two marks."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
    entries = json.loads(receipt.read_text(encoding="utf-8"))
    archs = [found for found in entries if name in entries[found]]
    if (arch is None and len(archs) != 1) or (arch is not None and arch not in archs):
        raise ValueError(f"arch: must be one of {', '.join(archs)}, which have an entry {name}, got {arch}")
    return entries[arch or archs[0]][name]
