"""Pictures of whole passes: time by part, time by the length of the context, and several GPUs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsa_bench.e2e.command import Row
from dsa_bench.e2e.parts import PARTS
from dsa_bench.harness.plot import pyplot, save

LONGEST = 2.5  # bars of `write_passes` are cut at this multiple of the time of our kernels
COMPARED = {"efficiency": "efficiency: silent / talking", "speedup": "speed-up: one GPU / all"}


def write_passes(rows: Sequence[Row], path: Path) -> None:
    """Draw an axis per model. Each run has a bar of our kernels and, below, a bar of the peers' kernels. Bars are
    stacked by part and show the time divided by the time of our kernels."""
    by_model = _by(rows, "model")
    figure, axes = _axes(1, len(by_model), 8, 1.5 + 0.4 * max(map(len, by_model.values())))
    for axis, (model, shown) in zip(axes[0], by_model.items()):
        for place, row in enumerate(shown):
            whole = sum(row["parts"].values())
            longest = _stack(axis.barh, place - 0.2, widths(row["parts"], whole), 0.36)
            if row["peer_parts"]:
                longest = max(
                    longest, _stack(axis.barh, place + 0.2, widths(row["peer_parts"], whole), 0.36, alpha=0.5)
                )
            axis.text(
                longest + 0.02, place, f"{row['ms']:.4g} ms, {row['tokens/s']:.0f} tokens/s", fontsize=7, va="center"
            )
        _runs(axis, shown)
        axis.set_title(model)
        axis.margins(x=0.3)
        axis.set_xlabel(f"kernels' time / ours, cut at {LONGEST}; paler: with the peers' kernels")
    _save(figure, PARTS, path)


def write_parallel(rows: Sequence[Row], path: Path) -> None:
    """Draw a row of axes per number of GPUs, with an axis per model. An axis has two bars per run (COMPARED). Rows
    without a comparison are left out."""
    compared = [row for row in rows if row.get("efficiency") is not None]
    by_gpus, models = _by(compared, "gpus"), list(_by(compared, "model"))
    most = max(len(of_model) for of_gpus in by_gpus.values() for of_model in _by(of_gpus, "model").values())
    figure, axes = _axes(len(by_gpus), len(models), 6, 0.5 / len(by_gpus) + 1 + 0.45 * most)
    for line, gpus in zip(axes, sorted(by_gpus)):
        for axis, model in zip(line, models):
            shown = [row for row in by_gpus[gpus] if row["model"] == model]
            for place, row in enumerate(shown):
                for i, name in enumerate(COMPARED):
                    at = place - 0.2 + 0.4 * i
                    axis.barh(at, row[name], 0.36, color=f"C{i}")
                    axis.text(row[name] + 0.02, at, f"{row[name]:.2f}", fontsize=7, va="center")
            _runs(axis, shown)
            axis.axvline(1.0, color="#444444", linewidth=1)
            axis.set_title(f"{model}, {gpus} GPUs")
            axis.margins(x=0.1)
    _save(figure, COMPARED.values(), path)


def write_million(rows: Sequence[Row], path: Path) -> None:
    """Draw a column of axes per model. The upper axis has a bar for the last pass of each prompt, the lower axis a bar
    per decoding step. Bars are stacked by part."""
    by_model = _by(rows, "model")
    figure, axes = _axes(2, len(by_model), 6, 4)
    for column, (model, of_model) in enumerate(by_model.items()):
        above, below = axes[:, column]
        prompts, steps = ([row for row in of_model if (row["workspace"] is None) is step] for step in (False, True))
        _columns(above, prompts, [f"{row['tokens'] // 1024}K" for row in prompts])
        above.set_title(f"{model}, one prompt: the last pass of 8192 tokens")
        above.set_xlabel("tokens of the prompt")
        _columns(below, steps, [str(row["tokens"]) for row in steps])
        below.set_title(f"{model}, one decoding step")
        below.set_xlabel("sequences")
    _save(figure, PARTS, path)


def widths(parts: Mapping[str, float], whole: float) -> list[float]:
    """Return the parts' time / `whole`, cut where their sum reaches LONGEST.

    Without the cut, one very long part, such as the set-up of a first call, would make all other bars invisible.
    """
    found, left = [], LONGEST
    for part in PARTS:
        found.append(min(parts[part] / whole, left))
        left -= found[-1]
    return found


def _by(rows: Sequence[Row], name: str) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(row[name], []).append(row)
    return found


def _axes(lines: int, columns: int, width: float, height: float) -> Any:
    """Make a figure with lines x columns axes. width, height: inches of an axis."""
    return pyplot().subplots(
        lines, columns, figsize=(width * columns, height * lines), layout="constrained", squeeze=False
    )


def _runs(axis: Any, rows: Sequence[Row]) -> None:
    axis.set_yticks(range(len(rows)), [row["run"] for row in rows], fontsize=8)
    axis.invert_yaxis()


def _stack(bar: Callable[..., object], place: float, lengths: Sequence[float], size: float, alpha: float = 1) -> float:
    end = 0.0
    for i, length in enumerate(lengths):
        bar(place, length, size, end, color=f"C{i}", alpha=alpha)
        end += length
    return end


def _columns(axis: Any, rows: Sequence[Row], names: Sequence[str]) -> None:
    """Draw a bar per row, stacked by part. A prompt's bar shows its last pass, and the text above the bar is the time
    of all passes."""
    for place, row in enumerate(rows):
        top = _stack(axis.bar, place, [row["parts"][part] for part in PARTS], 0.7)
        axis.text(
            place,
            top,
            f"{row['ms'] / 1000:.2f} s in all" if row["workspace"] is not None else f"{row['ms']:.2f} ms",
            fontsize=8,
            ha="center",
            va="bottom",
        )
    axis.set_xticks(range(len(rows)), names)
    axis.margins(y=0.1)
    axis.set_ylabel("kernels' time, ms")


def _save(figure: Any, labels: Sequence[str], path: Path) -> None:
    figure.legend(
        [pyplot().Rectangle((0, 0), 1, 1, color=f"C{i}") for i in range(len(labels))],
        labels,
        fontsize=9,
        loc="outside lower center",
        ncols=len(labels),
    )
    save(figure, path)
