"""Documents that have what a receipt's entry says between two marks."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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
