"""The table of accuracies in docs/change-the-indexer.md, written from the receipt's entry `accuracy`.

usage: python -m dsa_bench.e2e.accuracy_document RECEIPT DOCUMENT [ARCH]

ARCH need not be given where the receipt has the entry of one arch alone.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsa_bench.e2e.accuracy import Interval, Row
from dsa_bench.e2e.marked_document import between_marks, command, entry_of, measured, not_measured, table

BEGIN, END = "<!-- accuracy table -->", "<!-- end of accuracy table -->"
HEAD = ("model", "kernels", "loss", "loss less the references'", "error", "KL", "same first token", "error over peers'")


def generated(entry: Mapping[str, Any]) -> str:
    """What stands between the marks. entry: as of `measured`, or {"unverified": the reason} alone."""
    if why := not_measured(entry):
        return why
    rows, place = measured(entry)
    text = {row["model"]: f"{row['sequences']} sequences of {row['tokens'] // row['sequences']} tokens" for row in rows}
    sizes = "; ".join(f"{model}: {size}" for model, size in text.items())
    return "\n\n".join([f"{place} {sizes}.", table(HEAD, map(_cells, rows))])


def _cells(row: Row) -> list[str]:
    if "error" not in row:
        return [row["model"], row["kernels"], row["figure"], *[""] * (len(HEAD) - 3)]
    cells = [row["model"], row["kernels"], f"{row['loss']:.4f}", _interval(row["loss_difference"], "{:+.5f}")]
    cells += [_interval(row["error"], "{:.3%}"), _interval(row["divergence"], "{:.2e}"), f"{row['same_first']:.2%}"]
    return [*cells, _interval(row["over_peers"], "{:.3f}") if row["over_peers"] else ""]


def _interval(values: Interval, form: str) -> str:
    mean, low, high = (form.format(value) for value in values)
    return f"{mean} ({low} to {high})"


def inserted(text: str, entry: Mapping[str, Any]) -> str:
    """The document's text with the entry's table between the marks."""
    return between_marks(text, BEGIN, END, generated(entry))


def main(receipt: Path, document: Path, arch: str | None = None) -> None:
    entry = entry_of(receipt, "accuracy", arch)
    document.write_text(inserted(document.read_text(encoding="utf-8"), entry), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(command("dsa_bench.e2e.accuracy_document", __doc__, main, sys.argv[1:]))
