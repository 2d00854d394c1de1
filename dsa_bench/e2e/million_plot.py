"""Rows of long prompts and of decoding behind them as a picture: how each part grows with the context."""

from collections.abc import Sequence
from pathlib import Path

from dsa_bench.e2e.million import Row
from dsa_bench.e2e.parts import PARTS


def write_png(rows: Sequence[Row], path: Path) -> None:
    """A column a model. Above, the last pass of each prompt by part, over its tokens; below, a decoding step by part,
    over the number of sequences."""
    try:
        import matplotlib
    except ImportError:
        raise RuntimeError("the picture needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(row["model"] for row in rows))
    size = (6 * len(models), 8)
    figure, axes = pyplot.subplots(2, len(models), figsize=size, layout="constrained", squeeze=False)
    for column, model in enumerate(models):
        prompts, steps = (
            [row for row in rows if row["model"] == model and (row["workspace"] is None) is step]
            for step in (False, True)
        )
        _bars(axes[0][column], prompts, [f"{row['tokens'] // 1024}K" for row in prompts])
        axes[0][column].set_title(f"{model}, one prompt: the last pass of 8192 tokens")
        axes[0][column].set_xlabel("tokens of the prompt")
        _bars(axes[1][column], steps, [str(row["tokens"]) for row in steps])
        axes[1][column].set_title(f"{model}, one decoding step")
        axes[1][column].set_xlabel("sequences")
        for axis in axes[:, column]:
            axis.set_ylabel("kernels' time, ms")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=f"C{i}") for i in range(len(PARTS))]
    figure.legend(handles, PARTS, fontsize=9, loc="outside lower center", ncols=len(PARTS))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _bars(axis, rows: Sequence[Row], names: Sequence[str]) -> None:
    bottoms = [0.0] * len(rows)
    for i, part in enumerate(PARTS):
        heights = [row["parts"][part] for row in rows]
        axis.bar(range(len(rows)), heights, 0.7, bottoms, color=f"C{i}")
        bottoms = [below + height for below, height in zip(bottoms, heights)]
    for place, (row, top) in enumerate(zip(rows, bottoms)):
        text = f"{row['ms'] / 1000:.2f} s in all" if row["workspace"] is not None else f"{row['ms']:.2f} ms"
        axis.text(place, top, text, fontsize=8, ha="center", va="bottom")
    axis.set_xticks(range(len(rows)), names)
    axis.margins(y=0.1)
