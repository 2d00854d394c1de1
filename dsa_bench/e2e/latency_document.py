"""The table of docs/e2e.md that has a long prompt among sequences that decode, written from what
`python -m dsa_bench.e2e.latency` has printed.

usage: python -m dsa_bench.e2e.latency_document ROWS DOCUMENT COMMIT

ROWS is a file of these lines, COMMIT the one that they were measured on.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dsa_bench.e2e.latency import Row
from dsa_bench.e2e.marked_document import between_marks, measured, table, wrong_files
from dsa_layers import options

BEGIN, END = "<!-- latency table -->", "<!-- end of latency table -->"
PLACE = ("device", "date", "torch", "dsl")
SIZES = ("prompt", "sequences", "context")
HEAD = ("model", "chunk", "ms between tokens, median", "largest", "without the prompt, median", "largest")
HEAD += ("prompt's first token, s",)
FIGURES = ("ms", "ms_max", "alone_ms", "alone_ms_max")
NEEDED = ("model", "prefill_chunk", *FIGURES, "first_token_s", *PLACE, *SIZES)


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
    times = [f"{row[name]:.1f}" for name in FIGURES]
    return [row["model"], str(row["prefill_chunk"]), *times, f"{row['first_token_s']:.2f}"]


def main(rows: Path, document: Path, commit: str) -> None:
    measured_rows = _read(rows)
    text = document.read_text(encoding="utf-8")
    document.write_text(between_marks(text, BEGIN, END, generated(measured_rows, commit)), encoding="utf-8")


def _read(path: Path) -> list[Row]:
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line:
            continue
        where = f"rows: must be lines of JSON as latency prints them, got line {number} of {path}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if not isinstance(row, dict) or not row.keys() >= {*NEEDED}:
            raise ValueError(f"{where} without all of {', '.join(NEEDED)}")
        found.append(row)
    if not found:
        raise ValueError(f"rows: must be lines of JSON as latency prints them, got none in {path}")
    return found


def command(arguments: Sequence[str]) -> int:
    about = "The table of docs/e2e.md that has a long prompt among sequences that decode."
    parser = argparse.ArgumentParser(prog="python -m dsa_bench.e2e.latency_document", description=about)
    parser.add_argument("rows", type=options.path, metavar="ROWS", help="what latency has printed")
    parser.add_argument("document", type=options.path, metavar="DOCUMENT", help="with the marks; it is written anew")
    parser.add_argument("commit", type=options.some_text, metavar="COMMIT", help="that the rows were measured on")
    args = parser.parse_args(arguments)
    with wrong_files(parser):
        main(args.rows, args.document, args.commit)
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
