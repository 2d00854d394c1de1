"""Print rows of a benchmark as a table, and write them as CSV."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KINDS = {"peers": "", "baselines": "plain: ", "yardsticks": "for scale: "}


def print_table(name: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{name}")
    for r in rows:
        print(f"  {r['shape']:<48} {r['ms']:9.4f} ms  {r['figure']:<34} {' | '.join(_others(r))}")


def _others(row: dict[str, Any]) -> Iterator[str]:
    for kind, label in KINDS.items():
        if row[kind]:
            yield label + "; ".join(f"{name} {_figures(p)}" for name, p in row[kind].items())
        elif kind == "peers":
            yield "no peer"
    for name, why in row["failed"].items():
        yield f"{name} {why}"


def _figures(other: dict[str, float]) -> str:
    rate = f" {other['tflops']:.0f} TFLOP/s," if "tflops" in other else ""
    return f"{other['ms']:.4f} ms,{rate} ratio {other['ratio']:.2f}"


def everyone(rows: list[dict[str, Any]]) -> list[str]:
    kinds = [list(row[kind]) for kind in KINDS for row in rows]
    return list(dict.fromkeys(name for names in [*kinds, *(row["failed"] for row in rows)] for name in names))


def of(row: dict[str, Any], name: str) -> dict[str, float]:
    """Return the figures of a peer, baseline or yardstick, or {} if it was not timed."""
    return next((row[kind][name] for kind in KINDS if name in row[kind]), {})


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    """Write a line per shape. Each peer, baseline and yardstick has two columns, ms and ratio.

    If a row lacks one of these names, the name's cells are empty. If a name failed, its first cell has the reason.
    """
    names = everyone(rows)
    lines = [["shape", "ms", "figure", *(column for name in names for column in (f"{name} ms", f"{name} ratio"))]]
    for r in rows:
        cells = [(of(r, name).get("ms", r["failed"].get(name, "")), of(r, name).get("ratio", "")) for name in names]
        lines.append([r["shape"], r["ms"], r["figure"], *(cell for pair in cells for cell in pair)])
    write_lines(lines, path)


def write_lines(lines: list[list[Any]], path: Path) -> None:
    with path.open("w", newline="") as handle:
        csv.writer(handle).writerows(lines)
