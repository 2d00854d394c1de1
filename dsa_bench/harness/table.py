"""Rows of a benchmark as a printed table and as CSV."""

import csv
from pathlib import Path
from typing import Any


def print_table(name: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{name}")
    for r in rows:
        peers = "; ".join(f"{peer} {_figures(p)}" for peer, p in r["peers"].items())
        print(f"  {r['shape']:<48} {r['ms']:9.4f} ms  {r['figure']:<34} {peers or 'no peer'}")


def _figures(peer: dict[str, float]) -> str:
    rate = f" {peer['tflops']:.0f} TFLOP/s," if "tflops" in peer else ""
    return f"{peer['ms']:.4f} ms,{rate} ratio {peer['ratio']:.2f}"


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    """One line a shape; two columns for each peer."""
    names = list(dict.fromkeys(peer for r in rows for peer in r["peers"]))
    with path.open("w", newline="") as handle:
        writer = csv.writer(handle)
        columns = [column for peer in names for column in (f"{peer} ms", f"{peer} ratio")]
        writer.writerow(["shape", "ms", "figure", *columns])
        for r in rows:
            peers = [r["peers"].get(peer, {}) for peer in names]
            cells = [p.get(key, "") for p in peers for key in ("ms", "ratio")]
            writer.writerow([r["shape"], r["ms"], r["figure"], *cells])
