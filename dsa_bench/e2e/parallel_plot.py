"""Rows of models on several GPUs as a picture: efficiency and speed-up of every run."""

from collections.abc import Sequence
from pathlib import Path

from dsa_bench.e2e.parallel_rows import Row


def write_png(rows: Sequence[Row], path: Path) -> None:
    """A line of axes for a number of GPUs, an axis for each model, and two bars a run: the time of silent parts over
    that of parts that talk, and one GPU's time over that of all. What was computed once has neither and is left out."""
    try:
        import matplotlib
    except ImportError:
        raise RuntimeError("the picture needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    compared = [row for row in rows if row.get("efficiency") is not None]
    models = list(dict.fromkeys(row["model"] for row in compared))
    sizes = sorted({row["gpus"] for row in compared})
    shown = {(gpus, model): [] for gpus in sizes for model in models}
    for row in compared:
        shown[row["gpus"], row["model"]].append(row)
    most = max(map(len, shown.values()))
    size = (6 * len(models), 0.5 + (1 + 0.45 * most) * len(sizes))
    figure, axes = pyplot.subplots(len(sizes), len(models), figsize=size, layout="constrained", squeeze=False)
    for axis, ((gpus, model), of_model) in zip(axes.flat, shown.items()):
        for place, row in enumerate(of_model):
            for shift, name, color in ((-0.2, "efficiency", "C0"), (0.2, "speedup", "C1")):
                axis.barh(place + shift, row[name], 0.36, color=color)
                axis.text(row[name] + 0.02, place + shift, f"{row[name]:.2f}", fontsize=7, va="center")
        axis.set_yticks(range(len(of_model)), [row["run"] for row in of_model], fontsize=8)
        axis.invert_yaxis()
        axis.axvline(1.0, color="#444444", linewidth=1)
        axis.set_title(f"{model}, {gpus} GPUs")
        axis.margins(x=0.1)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in ("C0", "C1")]
    labels = ("efficiency: silent / talking", "speed-up: one GPU / all")
    figure.legend(handles, labels, fontsize=9, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
