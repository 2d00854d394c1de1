"""Rows of models on several GPUs as a picture: efficiency and speed-up of every run."""

from collections.abc import Sequence
from pathlib import Path

from dsa_bench.e2e.parallel_rows import Row


def write_png(rows: Sequence[Row], path: Path) -> None:
    """One axis for a model on some number of GPUs, and two bars a run: the time of silent parts over that of parts that
    talk, and one GPU's time over that of all. What was computed once has neither and is left out."""
    try:
        import matplotlib
    except ImportError:
        raise RuntimeError("the picture needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    compared = [row for row in rows if row.get("efficiency") is not None]
    models = list(dict.fromkeys((row["model"], row["gpus"]) for row in compared))
    most = max(sum((row["model"], row["gpus"]) == model for row in compared) for model in models)
    figure, axes = pyplot.subplots(
        1, len(models), figsize=(6 * len(models), 1.5 + 0.45 * most), layout="constrained", squeeze=False
    )
    for axis, model in zip(axes[0], models):
        shown = [row for row in compared if (row["model"], row["gpus"]) == model]
        for place, row in enumerate(shown):
            for shift, name, color in ((-0.2, "efficiency", "C0"), (0.2, "speedup", "C1")):
                axis.barh(place + shift, row[name], 0.36, color=color)
                axis.text(row[name] + 0.02, place + shift, f"{row[name]:.2f}", fontsize=7, va="center")
        axis.set_yticks(range(len(shown)), [row["run"] for row in shown], fontsize=8)
        axis.invert_yaxis()
        axis.axvline(1.0, color="#444444", linewidth=1)
        axis.set_title(f"{model[0]}, {model[1]} GPUs")
        axis.margins(x=0.1)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in ("C0", "C1")]
    labels = ("efficiency: silent / talking", "speed-up: one GPU / all")
    figure.legend(handles, labels, fontsize=9, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
