"""Rows of a stack as a picture: where the time goes, ours above the peers'."""

from pathlib import Path

from dsa_bench.e2e.parts import PARTS
from dsa_bench.e2e.report import Row

LONGEST = 2.5  # bars are cut there


def write_png(rows: list[Row], path: Path) -> None:
    """One axis a model. Bars are of the kernels' time in units of ours, stacked by part; the peers' below ours."""
    try:
        import matplotlib
    except ImportError:
        raise RuntimeError("the picture needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(row["model"] for row in rows))
    most = max(sum(row["model"] == model for row in rows) for model in models)
    figure, axes = pyplot.subplots(
        1, len(models), figsize=(8 * len(models), 1.5 + 0.4 * most), layout="constrained", squeeze=False
    )
    for axis, model in zip(axes[0], models):
        shown = [row for row in rows if row["model"] == model]
        for place, row in enumerate(shown):
            whole = sum(row["parts"].values())
            _bar(axis, place - 0.2, row["parts"], whole, 1.0)
            if row["peer_parts"]:
                _bar(axis, place + 0.2, row["peer_parts"], whole, 0.5)
            longest = max(sum(widths(parts, whole)) for parts in (row["parts"], row["peer_parts"] or row["parts"]))
            axis.text(
                longest + 0.02, place, f"{row['ms']:.4g} ms, {row['tokens/s']:.0f} tokens/s", fontsize=7, va="center"
            )
        axis.set_yticks(range(len(shown)), [row["run"] for row in shown], fontsize=8)
        axis.invert_yaxis()
        axis.set_title(model)
        axis.margins(x=0.3)
        axis.set_xlabel(f"kernels' time / ours, cut at {LONGEST}; paler: with the peers' kernels")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=f"C{i}") for i in range(len(PARTS))]
    figure.legend(handles, PARTS, fontsize=9, loc="outside lower center", ncols=len(PARTS))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _bar(axis, place: float, parts: dict[str, float], whole: float, alpha: float) -> None:
    left = 0.0
    for i, width in enumerate(widths(parts, whole)):
        axis.barh(place, width, 0.36, left, color=f"C{i}", alpha=alpha)
        left += width


def widths(parts: dict[str, float], whole: float) -> list[float]:
    """Of each of PARTS in units of `whole`, until they reach LONGEST together: a part that is out of all proportion, as
    one with what a first call prepares, must not make the other bars too short to be seen."""
    found, left = [], LONGEST
    for part in PARTS:
        found.append(min(parts[part] / whole, left))
        left -= found[-1]
    return found
