"""The table of docs/e2e.md that has a long prompt among sequences that decode, written from what
`python -m dsa_bench.e2e.latency` has printed.

usage: python -m dsa_bench.e2e.latency_document ROWS DOCUMENT COMMIT

ROWS is a file of these lines, COMMIT the one that they were measured on.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dsa_bench.e2e.latency import Row
from dsa_bench.e2e.marked_document import between_marks, measured, table

BEGIN, END = "<!-- latency table -->", "<!-- end of latency table -->"
PLACE = ("device", "date", "torch", "dsl")
SIZES = ("prompt", "sequences", "context")
HEAD = ("model", "chunk", "ms between tokens, median", "largest", "without the prompt, median", "largest")
HEAD += ("prompt's first token, s",)


def generated(rows: Sequence[Row], commit: str) -> str:
    """What stands between the marks. ValueError for rows of several places or sizes."""
    for name in (*PLACE, *SIZES):
        if len(found := {row[name] for row in rows}) > 1:
            raise ValueError(f"rows: must have the same {name}, got {', '.join(sorted(map(str, found)))}")
    rows, place = measured({"bench": rows, "commit": commit} | {name: row[name] for row in rows for name in PLACE})
    first = rows[0]
    sizes = f"{first['sequences']} sequences of {first['context']} tokens, a prompt of {first['prompt']}."
    return f"{place} {sizes}\n\n{table(HEAD, map(_cells, rows))}"


def _cells(row: Row) -> list[str]:
    times = [f"{row[name]:.1f}" for name in ("ms", "ms_max", "alone_ms", "alone_ms_max")]
    return [row["model"], str(row["prefill_chunk"]), *times, f"{row['first_token_s']:.2f}"]


def main(rows: Path, document: Path, commit: str) -> None:
    measured_rows = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines() if line]
    text = document.read_text(encoding="utf-8")
    document.write_text(between_marks(text, BEGIN, END, generated(measured_rows, commit)), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
