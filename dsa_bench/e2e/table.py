"""Rows of whole passes as printed lines and as CSV."""

from collections.abc import Iterable
from pathlib import Path

from dsa_bench.e2e.command import Row
from dsa_bench.e2e.parts import PARTS
from dsa_bench.harness.table import write_lines


def head() -> str:
    parts = "".join(f"{part:>10}" for part in PARTS)
    return f"{'model':<9} {'run':<22}{'ms':>10}{'tokens/s':>11} | {parts} | the peers' time / ours"


def line(row: Row) -> str:
    parts = "".join(f"{row['parts'][part]:10.3f}" for part in PARTS)
    text = f"{row['model']:<9} {row['run']:<22}{row['ms']:10.3f}{row['tokens/s']:11.0f} | {parts} | "
    failed = "".join(f"; {name} {why}" for name, why in row["failed"].items())
    if row["peer_ms"] is None:
        return text + "no peer" + failed
    ratios = ", ".join(
        f"{part} {row['peer_parts'][part] / row['parts'][part]:.2f}"
        for part in PARTS
        if row["parts"][part] > 0 and part in ("indexer", "top-k", "attention")
    )
    return f"{text}{row['ratio']:.2f} ({ratios}; {', '.join(row['peers'])}){failed}"


def printed(rows: Iterable[Row]) -> list[Row]:
    print(head())
    found = []
    for row in rows:
        print(line(row), flush=True)
        found.append(row)
    return found


def write_csv(rows: list[Row], path: Path) -> None:
    """Write a line per run. Without peers, the peers' cells are empty."""
    ours, peers = ([f"{prefix}{part} ms" for part in PARTS] for prefix in ("", "peers' "))
    lines = [["model", "run", "tokens/s", "ms", *ours, "peers' ms", *peers]]
    for row in rows:
        theirs = row["peer_parts"] or dict.fromkeys(PARTS, "")
        times = [row["parts"][part] for part in PARTS], [theirs[part] for part in PARTS]
        peer_ms = "" if row["peer_ms"] is None else row["peer_ms"]
        lines.append([row["model"], row["run"], row["tokens/s"], row["ms"], *times[0], peer_ms, *times[1]])
    write_lines(lines, path)
