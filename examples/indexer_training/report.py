"""Tables, curves and the model card of a run, from what it wrote.

usage: python examples/indexer_training/report.py OUT [DOCUMENT]

Renews OUT's table.md, losses.png and model/README.md, and the tables in DOCUMENT.
"""

import csv
import json
import sys
from pathlib import Path

BEGIN_MARK, END_MARK = "<!-- tables: examples/indexer_training/report.py -->", "<!-- end of tables -->"
_SMOOTHED = 0.02  # of a stage's steps

_LOSSES = {
    "dense, all keys": "after the dense stage, all keys",
    "dense, top-k": "the same weights, top-k by indexers that learnt nothing",
    "warmup, all keys": "after the warm-up, all keys (the backbone did not change)",
    "warmup, top-k": "after the warm-up, top-k",
    "sparse, all keys": "after the sparse stage, all keys",
    "sparse, top-k": "after the sparse stage, top-k",
    "sparse, top-k, FP8": "the shipped checkpoint: FP8 weights, activations and index keys, top-k",
}
_RECALLS = {
    "dense": "indexers with random weights, after the dense stage",
    "warmup": "indexers after the warm-up",
    "sparse": "indexers after the sparse stage",
}
_STAGES = {"dense": "dense", "warmup": "warm-up", "sparse": "sparse"}


def write(out: Path) -> str:
    """table.md, losses.png if there is matplotlib, and the checkpoint's README.md. Returns the tables."""
    metrics = json.loads((out / "model" / "metrics.json").read_text())
    with (out / "losses.csv").open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    text = tables(metrics, rows)
    (out / "table.md").write_text(text)
    (out / "model" / "README.md").write_text(card(metrics, text))
    try:
        import matplotlib
    except ImportError:
        print("no losses.png: matplotlib is not installed")
        return text
    matplotlib.use("Agg")
    _plot(rows, metrics["held_out"]["while_dense"], out / "losses.png")
    return text


def tables(metrics: dict, rows: list[dict[str, str]]) -> str:
    """Held-out losses, recall by layer, and what the stages took. rows: of losses.csv."""
    top_k, length = metrics["model"]["index_topk"], metrics["plan"]["length"]
    lines = [
        f"Held-out language loss, {metrics['held_out']['bytes']} bytes in sequences of {length}, top-k {top_k}:",
        "",
        "| | nats a byte |",
        "|---|---|",
    ]
    losses = metrics["held_out"]["loss"]
    lines += [f"| {_LOSSES[name]} | {loss:.4f} |" for name, loss in losses.items() if name in _LOSSES]
    layers = range(metrics["model"]["layers"])
    lines += [
        "",
        f"Share of the dense attention's mass, summed over heads, on the {top_k} selected keys, over tokens that see "
        "more:",
        "",
        "| | " + " | ".join(f"layer {i}" for i in layers) + " | mean |",
        "|---|" + "---|" * (len(layers) + 1),
    ]
    for stage, shares in metrics["recall"].items():
        lines += [_shares(_RECALLS[stage], shares["indexer"]), _shares("the best keys then (oracle)", shares["oracle"])]
    count = metrics.get("processes", 1)  # runs of earlier versions do not say
    machines = f"{'one' if count == 1 else f'{count} x'} {metrics['machine']}"
    lines += [_shares("random keys", shares["random"]), "", f"On {machines}:", ""]
    lines += ["| stage | steps | bytes | seconds | training loss at its end |", "|---|---|---|---|---|"]
    for name, stage in metrics["stages"].items():
        last = _smooth([float(row["language loss"]) for row in rows if row["stage"] == name])[-1]
        size, seconds = f"{stage['tokens'] / 1e6:.1f}M", f"{stage['seconds']:.0f}"
        lines += [f"| {_STAGES[name]} | {stage['steps']} | {size} | {seconds} | {last:.3f} |"]
    lines += [f"| all, with measuring | | | {metrics['seconds']:.0f} | |"]
    watched = metrics["held_out"]["while_dense"]
    step, lowest = min(watched, key=lambda point: point[1])
    lines += [
        "",
        f"Some of the held-out sequences while the dense stage ran: {lowest:.3f} at their lowest, after {step + 1} "
        f"steps, {watched[-1][1]:.3f} at its end.",
    ]
    return "\n".join(lines) + "\n"


def card(metrics: dict, text: str) -> str:
    """The model card around the tables."""
    data = metrics["data"]
    parameters = metrics["model"]["parameters"] / 1e6
    return f"""# A small model of Python source

DeepSeek-V3.2's architecture over bytes, {parameters:.1f}M parameters in the published FP8 format, trained from scratch
by `examples/train_indexer.py` of the `dsa` repository: dense, then its indexers alone, then sparse. It writes text that
looks like Python, partly the library's own, which it has seen many times; it is for demonstrations and tests.

- Context: {metrics["plan"]["length"]} bytes. A token is a byte; token 256 comes before a file and ends one.
- Data: {data["source"]}; {data["train_files"]} files, {data["train_bytes"] / 1e6:.1f} MB. Held out:
  {len(data["held_out_files"])} files, {data["held_out_bytes"] / 1e6:.2f} MB, named in `metrics.json`.
- Licence of the data, in `LICENSE.python.txt`:
  {data["licence"]}.
  `metrics.json` quotes the beginning of a held-out file under it; `held_out.txt`, which `dsa compare` reads, is
  another one, `{data["held_out_excerpt"]}`.

{text}"""


def fill(document: str, text: str) -> str:
    """`document` with the tables between its marks renewed."""
    before, _, rest = document.partition(BEGIN_MARK)
    _, _, after = rest.partition(END_MARK)
    return f"{before}{BEGIN_MARK}\n{text}{END_MARK}{after}"


def _shares(name: str, values: list[float]) -> str:
    return f"| {name} | " + " | ".join(f"{v:.3f}" for v in [*values, sum(values) / len(values)]) + " |"


def _plot(rows: list[dict[str, str]], held_out: list[tuple[int, float]], target: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    panels = (("language loss", "nats a byte"), ("indexer loss", "KL in nats a token, summed over layers"))
    for axis, (column, unit) in zip(axes, panels):
        begin = 0
        for i, (stage, label) in enumerate(_STAGES.items()):
            values = [float(row[column]) for row in rows if row["stage"] == stage]
            # The indexers have no loss in the dense stage, and the language model does not learn in the warm-up.
            if values and not (column == "indexer loss" and stage == "dense"):
                axis.plot(range(begin, begin + len(values)), _smooth(values), f"C{i}", label=label)
            begin += len(values)
        if column == "language loss" and held_out:
            axis.plot(*zip(*held_out), "k.", label="held out")
        axis.set(title=column, xlabel="step", ylabel=unit, yscale="log")
        axis.grid(alpha=0.3, which="both")
        if axis.lines:
            axis.legend()
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


def _smooth(values: list[float]) -> list[float]:
    """Each value averaged with those before it, over a small share of the stage."""
    width = max(1, int(len(values) * _SMOOTHED))
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [(sums[i + 1] - sums[max(0, i + 1 - width)]) / min(width, i + 1) for i in range(len(values))]


if __name__ == "__main__":
    written = write(Path(sys.argv[1]))
    for document in map(Path, sys.argv[2:]):
        document.write_text(fill(document.read_text(), written))
