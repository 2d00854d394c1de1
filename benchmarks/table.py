"""Benchmark rows: how one is made and how a table of them is shown."""

import csv
from pathlib import Path
from typing import Any


def row(shape: str, times: dict[str, float], figure: str) -> dict[str, Any]:
    """The row of a run whose own time stands under "dsa" and whose peers' times stand under their names."""
    peers = {name: ms for name, ms in times.items() if name != "dsa"}
    best = min(peers, key=peers.get) if peers else None
    return {
        "shape": shape,
        "ms": round(times["dsa"], 5),
        "figure": figure,
        "peer": best,
        "peer_ms": round(peers[best], 5) if best else None,
        "ratio": round(peers[best] / times["dsa"], 3) if best else None,
    }


def print_table(name: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{name}")
    for r in rows:
        peer = f"{r['peer']} {r['peer_ms']:.4f} ms, ratio {r['ratio']:.2f}" if r["peer"] else "no peer"
        print(f"  {r['shape']:<44} {r['ms']:9.4f} ms  {r['figure']:<34} {peer}")


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
