"""Tables, curves and the model card of a run, from what it wrote.

usage: python examples/indexer_training/report.py OUT [DOCUMENT]

Renews OUT's table.md, losses.png and model/README.md, and the tables in DOCUMENT.

To ship another run, copy OUT/model over dsa_layers/stdlib_model and OUT/losses.png over
docs/pictures/indexer-training.png. Then run this script with docs/how-to/train-an-indexer.md as DOCUMENT.
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
_TEXTS = {"library": "standard library", "packages": "packages"}
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
    _plot(rows, metrics, out / "losses.png")
    return text


def tables(metrics: dict, rows: list[dict[str, str]]) -> str:
    """Held-out losses, how often drafts are right, recall by layer, and what the stages took. rows: of losses.csv."""
    return "\n\n".join((_losses(metrics), _acceptance(metrics), _recalls(metrics), _stages(metrics, rows))) + "\n"


def _losses(metrics: dict) -> str:
    top_k, length = metrics["model"]["index_topk"], metrics["plan"]["length"]
    sizes, losses = metrics["held_out"]["bytes"], metrics["held_out"]["loss"]
    of = " and ".join(f"{size} bytes of the {_TEXTS[name]}" for name, size in sizes.items())
    lines = [
        f"Held-out language loss, {of}, in sequences of {length} tokens, top-k {top_k}:",
        "",
        "| nats a byte | " + " | ".join(_TEXTS[name] for name in losses) + " |",
        "|---|" + "---|" * len(losses),
    ]
    measured = losses["library"]
    for name, label in _LOSSES.items():
        if name in measured:
            lines.append(f"| {label} | " + " | ".join(f"{own[name]:.4f}" for own in losses.values()) + " |")
    return "\n".join(lines)


def _acceptance(metrics: dict) -> str:
    found = metrics["acceptance"]
    drafts = range(1, len(found["right"]) + 1)
    return "\n".join(
        [
            f"Drafts of the shipped checkpoint's multi-token-prediction layer behind {found['positions']} positions of "
            "held-out text, with the text as given:",
            "",
            "| | " + " | ".join(f"K = {k}" for k in drafts) + " |",
            "|---|" + "---|" * len(drafts),
            "| the K-th draft is the model's own greedy choice | "
            + " | ".join(f"{share:.1%}" for share in found["right"])
            + " |",
            "| of K drafts so many are taken, up to the first that is not | "
            + " | ".join(f"{count:.2f}" for count in found["taken"])
            + " |",
        ]
    )


def _recalls(metrics: dict) -> str:
    top_k, layers = metrics["model"]["index_topk"], range(metrics["model"]["layers"])
    lines = [
        f"Share of the dense attention's mass, summed over heads, on the {top_k} selected keys, over tokens that see "
        "more:",
        "",
        "| | " + " | ".join(f"layer {i}" for i in layers) + " | drafter | mean |",
        "|---|" + "---|" * (len(layers) + 2),
    ]
    for stage, shares in metrics["recall"].items():
        lines += [_shares(_RECALLS[stage], shares["indexer"]), _shares("the best keys then (oracle)", shares["oracle"])]
    return "\n".join([*lines, _shares("random keys", shares["random"])])


def _stages(metrics: dict, rows: list[dict[str, str]]) -> str:
    count, data = metrics["processes"], metrics["data"]
    machines = f"{'one' if count == 1 else f'{count} x'} {metrics['machine']}"
    lines = [
        f"On {machines}; losses are in nats a byte, at {data['bytes_a_token']:.2f} bytes a token:",
        "",
        "| stage | steps | text | seconds | training loss at its end | lowest held-out loss | at step |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, stage in metrics["stages"].items():
        own = [float(row["language loss"]) for row in rows if row["stage"] == name]
        last = f"{_smooth(own)[-1] / data['bytes_a_token']:.3f}" if own else ""
        size, seconds = f"{stage['tokens'] * data['bytes_a_token'] / 1e6:.1f} MB", f"{stage['seconds']:.0f}"
        lowest = min((loss for _, loss in metrics["held_out"]["while"][name]), default=None)
        found = "" if lowest is None else f"{lowest:.3f}"
        cells = (_STAGES[name], stage["steps"], size, seconds, last, found, stage.get("best_step", ""))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [f"| all, with measuring | | | {metrics['seconds']:.0f} | | | |", ""]
    trained = data["train_bytes"] + sum(package["bytes"] for package in data["packages"])
    lines += [
        f"The text has {trained / 1e6:.1f} MB. A stage gives on the weights of the step at which the held-out loss was "
        "lowest."
    ]
    return "\n".join(lines)


def card(metrics: dict, text: str) -> str:
    """The model card around the tables."""
    data = metrics["data"]
    parameters, vocabulary = metrics["model"]["parameters"] / 1e6, metrics["model"]["vocabulary"]
    trained = data["train_bytes"] + sum(package["bytes"] for package in data["packages"])
    context = metrics["plan"]["length"]
    packages = "\n".join(
        f"| {package['name']} | {package['version']} | {package['licence']} | {package['files']} | "
        f"{package['bytes'] / 1e6:.2f} |"
        for package in data["packages"]
        if package["files"]  # of some all are too much like what is held out
    )
    return f"""# A small model of Python source

DeepSeek-V3.2's architecture with a vocabulary of {vocabulary}, {parameters:.1f}M parameters in the published FP8
format, trained from scratch by `examples/train_indexer.py` of the `dsa` repository: dense, then its indexers alone,
then sparse, and with its multi-token-prediction layer, which drafts (`dsa generate --draft 1`). It writes text that
looks like Python, partly that which it has seen; it is for demonstrations and tests.

- Context: {context} tokens, about {context * data["bytes_a_token"]:.0f} bytes. Tokens 0 to 255 are bytes, token 256
  comes before a file and ends one, the others are frequent strings.
- The layer shares the model's embedding and head; copies of them, which published files have, are not in this one.
- Data: {trained / 1e6:.1f} MB of Python: {data["source"]}, {data["train_files"]} files, {data["train_bytes"] / 1e6:.1f}
  MB; and the packages below. Generated, vendored and test files are left out, and files that are nearly the same as
  others. Held out: {len(data["held_out_files"])} files of the library, {data["held_out_bytes"] / 1e6:.2f} MB, and every
  fiftieth of a package, all named in `metrics.json`.
- Licence of the library, in `LICENSE.python.txt`:
  {data["licence"]}.
  `metrics.json` quotes the beginning of a held-out file under it; `held_out.txt`, which `dsa compare` reads, is
  another one, `{data["held_out_excerpt"]}`. The packages' licences are in `LICENSE.packages.txt`.

| package | version | licence | files | MB |
|---|---|---|---|---|
{packages}

{text}"""


def fill(document: str, text: str) -> str:
    """`document` with the tables between its marks renewed."""
    before, _, rest = document.partition(BEGIN_MARK)
    _, _, after = rest.partition(END_MARK)
    return f"{before}{BEGIN_MARK}\n{text}{END_MARK}{after}"


def _shares(name: str, values: list[float]) -> str:
    return f"| {name} | " + " | ".join(f"{v:.3f}" for v in [*values, sum(values) / len(values)]) + " |"


def _plot(rows: list[dict[str, str]], metrics: dict, target: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4), layout="constrained")
    bytes_a_token = metrics["data"]["bytes_a_token"]
    panels = (
        ("language loss", "nats a byte", bytes_a_token),
        ("drafter's loss", "nats a byte, of the token after the next", bytes_a_token),
        ("indexer loss", "KL in nats a token, summed over layers", 1),
    )
    for axis, (column, unit, divisor) in zip(axes, panels):
        begin = 0
        for i, (stage, label) in enumerate(_STAGES.items()):
            values = [float(row[column]) / divisor for row in rows if row["stage"] == stage]
            # The indexers have no loss in the dense stage, and nothing else learns in the warm-up.
            if values and not (column == "indexer loss" and stage == "dense"):
                axis.plot(range(begin, begin + len(values)), _smooth(values), f"C{i}", label=label)
            if column == "language loss" and stage in metrics["held_out"]["while"]:
                points = [(begin + step, loss) for step, loss in metrics["held_out"]["while"][stage]]
                axis.plot(*zip(*points), "k.", label="held out" if stage == "dense" else None)
            begin += len(values)
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
    if len(sys.argv) < 2 or not (Path(sys.argv[1]) / "losses.csv").is_file():
        sys.exit("usage: python examples/indexer_training/report.py OUT [DOCUMENT], OUT as a training has written it")
    written = write(Path(sys.argv[1]))
    for document in map(Path, sys.argv[2:]):
        document.write_text(fill(document.read_text(), written))
