"""The tables of docs/e2e.md and their picture, written from the receipt's entry `e2e`.

usage: python -m dsa_bench.e2e.document RECEIPT DOCUMENT [ARCH]

ARCH need not be given where the receipt has the entry of one arch alone. The picture is beside the document, once
something is measured.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsa_bench.e2e import plot
from dsa_bench.e2e.marked_document import between_marks, command, entry_of, list_of, measured, not_measured, table
from dsa_bench.e2e.parts import GLUE, PARTS
from dsa_bench.e2e.report import Row

BEGIN, END = "<!-- e2e tables -->", "<!-- end of e2e tables -->"
PICTURE = "e2e.png"
BESIDE = ("indexer", "top-k", "attention")  # parts whose kernels are the peers'
# The least share of a pass' time that its kernels fill; with less, what is measured is the host.
_FILLED = 0.75
HEAD = ("run", "ms", "tokens/s", *PARTS, "peers, whole pass", "without glue", *BESIDE)


def generated(entry: Mapping[str, Any]) -> str:
    """What stands between the marks: where and when, a table for each model, and what the peers' kernels change.
    entry: as of `measured`, or {"unverified": the reason} alone."""
    if why := not_measured(entry):
        return why
    rows, place = measured(entry)
    models = list(dict.fromkeys(row["model"] for row in rows))
    sections = [place]
    for model in models:
        of_model = [row for row in rows if row["model"] == model]
        sections += [f"## {model}", table(HEAD, map(_cells, of_model)), *_sentences(of_model)]
    sections.append(f"![where the time goes]({PICTURE})")
    return "\n\n".join(sections)


def waits_for_host(row: Row) -> bool:
    """Whether a pass with our kernels or the peers' leaves the GPU idle for a large part of its time, beside a peer."""
    if not row.get("ratio") or not row.get("peer_parts"):
        return False
    filled = sum(row["parts"].values()) / row["ms"], sum(row["peer_parts"].values()) / row["peer_ms"]
    return min(filled) < _FILLED


def without_glue(row: Row) -> float:
    """A row's ratio, of a peers' pass that takes as much less as its glue's kernels take."""
    return (row["peer_ms"] - row["peer_parts"].get(GLUE, 0.0)) / row["ms"]


def _cells(row: Row) -> list[str]:
    cells = [row["run"], f"{row['ms']:.2f}", f"{row['tokens/s']:.0f}", *(f"{row['parts'][part]:.3f}" for part in PARTS)]
    if row["ratio"] is None:
        return [*cells, *[""] * (2 + len(BESIDE))]
    ratios = (row["peer_parts"][part] / row["parts"][part] if row["parts"][part] else None for part in BESIDE)
    whole = f"{row['ratio']:.2f}" + (" (host)" if waits_for_host(row) else "")
    without = "" if GLUE not in row["peer_parts"] else f"{without_glue(row):.2f}"
    return [*cells, whole, without, *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)]


def _sentences(rows: Sequence[Row]) -> list[str]:
    """A line on prompts, one on steps, and which peers these are; what could not be used."""
    lines = []
    timed = [row for row in rows if row["ratio"] is not None]
    waiting = [row for row in timed if waits_for_host(row)]
    for kind, what in (("prefill", "a prompt"), ("decode", "a decoding step")):
        ratios = [row["ratio"] for row in timed if row["run"].startswith(kind) and row not in waiting]
        if ratios:
            least, most = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
            span = least if least == most else f"{least} to {most}"
            lines.append(f"With the peers' kernels {what} takes {span} times as long as with ours.")
        glued = [
            row for row in timed if row["run"].startswith(kind) and row not in waiting and GLUE in row["peer_parts"]
        ]
        if glued:
            bare = [without_glue(row) for row in glued]
            lines.append(f"Without glue it would be {min(bare):.2f} to {max(bare):.2f} times.")
    for row in waiting:
        own, theirs = row["ms"] - sum(row["parts"].values()), row["peer_ms"] - sum(row["peer_parts"].values())
        lines.append(
            f"{row['run']} (host) is not among them: no kernel ran for {own:.1f} ms of its pass with our kernels, and "
            f"for {theirs:.1f} ms with the peers'."
        )
    libraries = sorted({library for row in rows for library in row["peers"]})
    if libraries:
        lines.append(f"The peers are {', '.join(libraries)}.")
    reasons = dict.fromkeys((name, why) for row in rows for name, why in row["failed"].items())
    for name, why in reasons:
        runs = [row["run"] for row in rows if row["failed"].get(name) == why]
        where = "" if len(runs) == len(rows) else f" in {', '.join(runs)}"
        lines.append(f"Not beside ours: {name}{where}, {why}.")
    return list_of(lines)


def inserted(text: str, entry: Mapping[str, Any]) -> str:
    """The document's text with the entry's tables between the marks."""
    return between_marks(text, BEGIN, END, generated(entry))


def main(receipt: Path, document: Path, arch: str | None = None) -> None:
    entry = entry_of(receipt, "e2e", arch)
    document.write_text(inserted(document.read_text(encoding="utf-8"), entry), encoding="utf-8")
    if entry.get("bench"):
        plot.write_png(entry["bench"], document.parent / PICTURE)


if __name__ == "__main__":
    sys.exit(command("dsa_bench.e2e.document", __doc__, main, sys.argv[1:]))
