"""The tables of docs/parallel.md and their picture, written from the receipt's entry `parallel`.

usage: python -m dsa_bench.e2e.parallel_document RECEIPT DOCUMENT [ARCH]

ARCH need not be given where the receipt has the entry of one arch alone. The picture is beside the document, once
something is measured.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsa_bench.e2e import bars, parallel_plot
from dsa_bench.e2e.computed import computed
from dsa_bench.e2e.marked_document import between_marks, command, entry_of, list_of, measured, not_measured, table
from dsa_bench.e2e.parallel_rows import Row

BEGIN, END = "<!-- parallel tables -->", "<!-- end of parallel tables -->"
PICTURE = "parallel.png"
HEAD = ("run", "ms", "tokens/s", "GB a GPU", "in collectives", "silent, ms", "efficiency", "one GPU, ms", "speed-up")
COMPUTED_HEAD = ("run", "silent, ms", "GB a GPU", "all layers, ms, computed", "tokens/s, computed")


def generated(entry: Mapping[str, Any]) -> str:
    """What stands between the marks. entry: as of `measured`, or {"unverified": the reason} alone."""
    if why := not_measured(entry):
        return why
    rows, place = measured(entry)
    sections = [place]
    whole, silent = ([row for row in rows if ("efficiency" in row) is is_whole] for is_whole in (True, False))
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in whole if row["model"] == model]
        for gpus in dict.fromkeys(row["gpus"] for row in of_model):
            own = [row for row in of_model if row["gpus"] == gpus]
            sections += [f"### {model}, {gpus} GPUs", _layers(own), table(HEAD, map(_cells, own)), *_missed(own)]
        parts = [row for row in silent if row["model"] == model]
        if parts:
            sections += [f"### {model}, {parts[0]['gpus']} GPUs, computed", *_computed(parts, of_model)]
    if whole:
        sections.append(f"![time with and without what GPUs say to each other]({PICTURE})")
    return "\n\n".join(sections)


def _computed(parts: Sequence[Row], whole: Sequence[Row]) -> list[str]:
    first = parts[0]
    gpus = f"{first['gpus']} GPUs"
    part = f"The part of one of {gpus} was measured by itself, {first['layers']} of {first['published_layers']} layers"
    what = f"What all layers take on {gpus} is **computed** from it and from what the most GPUs above say to each other"
    lines = []
    for row in parts:
        ms = computed(row, whole)
        figures = ["", ""] if ms is None else [f"{ms:.1f}", f"{row['tokens'] / ms * 1e3:.0f}"]
        lines.append([row["run"], f"{row['shard_ms']:.2f}", f"{row['memory'] / 1e9:.1f}", *figures])
    there = any(line[3] for line in lines)
    rest = f". {what} (`dsa_bench/e2e/computed.py`)." if there else "; no pass of several GPUs was measured."
    return [part + rest, table(COMPUTED_HEAD, lines)]


def _layers(rows: Sequence[Row]) -> str:
    first = rows[0]
    all_of_them = first["layers"] == first["published_layers"]
    which = (
        f"all {first['layers']} layers" if all_of_them else f"{first['layers']} of {first['published_layers']} layers"
    )
    text = which.capitalize()
    few = next((row["few_layers"] for row in rows if row["few_layers"]), None)
    return f"{text}; speed-up over one GPU of {few} layers." if few else f"{text}."


def _cells(row: Row) -> list[str]:
    cells = [row["run"], f"{row['ms']:.2f}", f"{row['tokens/s']:.0f}", f"{row['memory'] / 1e9:.1f}"]
    if row["efficiency"] is None:
        return [*cells, *[""] * 5]
    of_collectives = [f"{row['collectives']:.0%}", f"{row['shard_ms']:.2f}", f"{row['efficiency']:.2f}"]
    return [*cells, *of_collectives, f"{row['one_gpu_ms']:.2f}", f"{row['speedup']:.2f}"]


def _missed(rows: Sequence[Row]) -> list[str]:
    """A line for each figure that is below its bar."""
    words = {"efficiency": "an efficiency", "speedup": "a speed-up"}
    lines = [
        f"{row['run']} is to have {words[name]} of {bar:g} and has {row[name]:.2f}."
        for row in rows
        for name, bar in bars.missed(row).items()
    ]
    return list_of(lines)


def inserted(text: str, entry: Mapping[str, Any]) -> str:
    """The document's text with the entry's tables between the marks."""
    return between_marks(text, BEGIN, END, generated(entry))


def main(receipt: Path, document: Path, arch: str | None = None) -> None:
    entry = entry_of(receipt, "parallel", arch)
    document.write_text(inserted(document.read_text(encoding="utf-8"), entry), encoding="utf-8")
    if any("efficiency" in row for row in entry.get("bench", ())):
        parallel_plot.write_png(entry["bench"], document.parent / PICTURE)


if __name__ == "__main__":
    sys.exit(command("dsa_bench.e2e.parallel_document", __doc__, main, sys.argv[1:]))
