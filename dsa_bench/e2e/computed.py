"""The time of all layers of a model on more GPUs than there are, from measurements: one GPU's part without collectives,
and the collectives of fewer GPUs."""

from collections.abc import Sequence

from dsa_bench.e2e.parallel_rows import Row


def computed(silent: Row, measured: Sequence[Row]) -> float | None:
    """Milliseconds of a pass through all published layers on silent["gpus"] GPUs; None where no row of the same model
    and run was measured on several.

    layers_all * (silent ms / layers + said / layers): the first part of `silent`, one GPU of many; said from the rows
    of the most GPUs, which have what these say to each other: ms - silent ms, what a GPU takes longer than in silence.
    On N GPUs instead of n
    - a prompt says as much more as each GPU gets more of the rows: (N - 1) / N of them and not (n - 1) / n;
    - a decoding step says for as long as the step of the fewest sequences does, and what it says beyond that, which is
      for its rows, grows with the parts that each GPU gets: N - 1 and not n - 1.
    What more GPUs wait for each other is in none of it. Embedding and head count with the layers: of fewer layers than
    all they count too often.
    """
    same = [row for row in measured if row["model"] == silent["model"] and row["shard_ms"] is not None]
    rows = [row for row in same if row["run"] == silent["run"]]
    if not rows:
        return None
    row = max(rows, key=lambda row: row["gpus"])
    said, many, few = _said(row), silent["gpus"] - 1, row["gpus"] - 1
    if silent["run"].startswith("decode"):
        steps = [row for row in same if row["run"].startswith("decode") and row["gpus"] == few + 1]
        least = min(_said(min(steps, key=lambda row: row["tokens"])), said)
        said = least + (said - least) * many / few
    else:
        said *= many / silent["gpus"] / (few / row["gpus"])
    return silent["published_layers"] * (silent["shard_ms"] / silent["layers"] + said)


def _said(row: Row) -> float:
    """Milliseconds of a layer."""
    return max(row["ms"] - row["shard_ms"], 0.0) / row["layers"]
