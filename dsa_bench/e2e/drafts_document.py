"""The tables of docs/drafter.md, written from the receipt's entry `drafts`.

usage: python -m dsa_bench.e2e.drafts_document RECEIPT DOCUMENT [ARCH]

ARCH need not be given where the receipt has the entry of one arch alone.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsa_bench.e2e.draft_gain import missed
from dsa_bench.e2e.drafts import Row
from dsa_bench.e2e.marked_document import between_marks, command, entry_of, list_of, measured, not_measured, table

BEGIN, END = "<!-- draft tables -->", "<!-- end of draft tables -->"
HEAD = ("sequences", "drafts", "plain, ms", "verifying, ms", "drafter, ms", "experts with tokens", "bytes of verifying")
HEAD += ("its time over that", "of copy, plain", "of copy, verifying", "tokens/s", "gain")


def generated(entry: Mapping[str, Any]) -> str:
    """What stands between the marks. entry: as of `measured`, or {"unverified": the reason} alone."""
    if why := not_measured(entry):
        return why
    rows, place = measured(entry)
    sections = [f"{place} A copy reads and writes {rows[0]['copy'] / 1e9:.0f} GB/s."]
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        sections += [f"### {model}, {own[0]['layers']} layers, computed", table(HEAD, map(_cells, own)), *_missed(own)]
    return "\n\n".join(sections)


def _cells(row: Row) -> list[str]:
    plain, verify = row["plain"], row["verify"]
    cells = [str(row["sequences"]), str(row["drafts"]), f"{plain['ms']:.2f}", f"{verify['ms']:.2f}"]
    cells += [f"{row['draft_ms']:.2f}", f"{plain['touched']:.0f}, then {verify['touched']:.0f}"]
    cells += [f"{verify['bytes'] / plain['bytes']:.2f}x", f"{row['over_bytes']:.2f}"]
    cells += [f"{share:.0%}" for share in row["of_copy"]]
    return [*cells, f"{row['tokens/s']:.0f}", f"{row['gain']:.2f}"]


def _missed(rows: Sequence[Row]) -> list[str]:
    """A line for each figure that does not reach its bar."""
    words = {
        "gain": "is to gain {:g} and gains {:.3f}",
        "over_bytes": "is to take {:g} of its bytes' time, takes {:.3f}",
    }
    return list_of(
        [f"{row['run']}: {words[name].format(bar, row[name])}." for row in rows for name, bar in missed(row).items()]
    )


def inserted(text: str, entry: Mapping[str, Any]) -> str:
    """The document's text with the entry's tables between the marks."""
    return between_marks(text, BEGIN, END, generated(entry))


def main(receipt: Path, document: Path, arch: str | None = None) -> None:
    entry = entry_of(receipt, "drafts", arch)
    document.write_text(inserted(document.read_text(encoding="utf-8"), entry), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(command("dsa_bench.e2e.drafts_document", __doc__, main, sys.argv[1:]))
