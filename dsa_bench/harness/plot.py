"""Draw rows of a benchmark: per shape, the milliseconds of our op and of the peers, baselines and yardsticks."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from dsa_bench.harness import table


def pyplot() -> ModuleType:
    """Import matplotlib.pyplot with the backend for files. Raises RuntimeError if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise RuntimeError("a picture needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=150)
    pyplot().close(figure)


def write_png(name: str, rows: list[dict[str, Any]], path: Path) -> None:
    names = ["dsa", *(name for name in table.everyone(rows) if any(table.of(r, name) for r in rows))]
    figure, axes = pyplot().subplots(figsize=(9, 1.2 + 0.5 * len(rows)), layout="constrained")
    height = 0.8 / len(names)
    for i, who in enumerate(names):
        times = [r["ms"] if who == "dsa" else table.of(r, who).get("ms", 0) for r in rows]
        heights = [row + height * (i - (len(names) - 1) / 2) for row in range(len(rows))]
        bars = axes.barh(heights, times, height, label=who)
        if who == "dsa":
            axes.bar_label(bars, [r["figure"] for r in rows], padding=3, fontsize=7)
    axes.set_yticks(range(len(rows)), [r["shape"] for r in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.25)
    axes.set_xlabel("milliseconds, shorter is faster")
    axes.set_title(name)
    axes.legend()
    save(figure, path)
