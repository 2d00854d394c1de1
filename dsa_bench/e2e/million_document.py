"""The tables of docs/million.md and their picture, written from the receipt's entry `million`.

usage: python -m dsa_bench.e2e.million_document RECEIPT DOCUMENT [ARCH]

ARCH need not be given where the receipt has the entry of one arch alone. The picture is beside the document, once
something is measured.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsa_bench.e2e import million_plot
from dsa_bench.e2e.marked_document import between_marks, command, entry_of, measured, not_measured, table
from dsa_bench.e2e.million import Row
from dsa_bench.e2e.parts import PARTS
from dsa_bench.e2e.stacks import LONG_STACKS

BEGIN, END = "<!-- million tables -->", "<!-- end of million tables -->"
PICTURE = "million.png"
PARTS_MS = tuple(f"{part}, ms" for part in PARTS)
PROMPT_HEAD = ("prompt", "s", "tokens/s", "GB", "workspace, MiB", "last pass, ms", *PARTS_MS)
STEP_HEAD = ("sequences", "ms", "tokens/s", "GB", *PARTS_MS)


def generated(entry: Mapping[str, Any]) -> str:
    """What stands between the marks. entry: as of `measured`, or {"unverified": the reason} alone."""
    if why := not_measured(entry):
        return why
    rows, place = measured(entry)
    sections = [place]
    for model in dict.fromkeys(row["model"] for row in rows):
        layers = LONG_STACKS[model][1]["num_hidden_layers"]
        prompts, steps = (
            [row for row in rows if row["model"] == model and (row["workspace"] is None) is step]
            for step in (False, True)
        )
        if prompts:
            lines = [_prompt(row) for row in prompts]
            sections += [f"### {model}, {layers} layers: one prompt", table(PROMPT_HEAD, lines), _growth(prompts)]
        if steps:
            context = steps[0]["run"].rpartition(" ")[2]
            lines = [_step(row) for row in steps]
            sections += [f"### {model}, {layers} layers: a step behind {context} tokens", table(STEP_HEAD, lines)]
    sections.append(f"![how the parts grow with the context]({PICTURE})")
    return "\n\n".join(sections)


def _prompt(row: Row) -> list[str]:
    cells = [str(row["tokens"]), f"{row['ms'] / 1000:.2f}", f"{row['tokens/s']:.0f}", f"{row['memory'] / 1e9:.1f}"]
    cells += [f"{row['workspace'] / 2**20:.0f}", f"{row['pass_ms']:.1f}"]
    return [*cells, *(f"{row['parts'][part]:.2f}" for part in PARTS)]


def _step(row: Row) -> list[str]:
    cells = [str(row["tokens"]), f"{row['ms']:.2f}", f"{row['tokens/s']:.0f}", f"{row['memory'] / 1e9:.1f}"]
    return [*cells, *(f"{row['parts'][part]:.3f}" for part in PARTS)]


def _growth(prompts: Sequence[Row]) -> str:
    """What each part of the last pass is of the shortest prompt's, in the longest one."""
    first, last = prompts[0], prompts[-1]
    if first is last:
        return "One length is measured."
    # Of many keys the indexer's kernels select as well, and top-k has none of its own: the two count together.
    joint = [("indexer with top-k", ("indexer", "top-k")), *((part, (part,)) for part in PARTS[2:])]
    sums = [(name, *(sum(row["parts"][part] for part in own) for row in (first, last))) for name, own in joint]
    ratios = ", ".join(f"{name} {after / before:.2f}x" for name, before, after in sums if before)
    return f"From {first['tokens']} to {last['tokens']} tokens the last pass' parts grow: {ratios}."


def inserted(text: str, entry: Mapping[str, Any]) -> str:
    """The document's text with the entry's tables between the marks."""
    return between_marks(text, BEGIN, END, generated(entry))


def main(receipt: Path, document: Path, arch: str | None = None) -> None:
    entry = entry_of(receipt, "million", arch)
    document.write_text(inserted(document.read_text(encoding="utf-8"), entry), encoding="utf-8")
    if entry.get("bench"):
        million_plot.write_png(entry["bench"], document.parent / PICTURE)


if __name__ == "__main__":
    sys.exit(command("dsa_bench.e2e.million_document", __doc__, main, sys.argv[1:]))
