"""The time of all layers of a model on more GPUs than the machine has, computed from one GPU's part without collectives
and from the collectives of fewer GPUs."""

from collections.abc import Sequence

from dsa_bench.e2e.parallel import Row


def computed(silent: Row, measured: Sequence[Row]) -> float | None:
    """Return milliseconds of a pass through all published layers on silent["gpus"] GPUs, or None if the same model and
    run was not measured on several GPUs.

    The result is all layers * (silent ms + communication) per layer. The silent time is that of one of many GPUs. The
    communication is ms - silent ms of the measured row with the most GPUs. From n to N GPUs
    - a prompt's communication grows with the fraction of the rows that each GPU receives, from (n - 1) / n to
      (N - 1) / N;
    - a decoding step's communication has a fixed part, the communication of the fewest sequences. The remainder, which
      transfers rows, grows with the number of parts that each GPU receives, from n - 1 to N - 1.
    Additional waiting between more GPUs is not included. Embedding and head count as parts of the layers, so with fewer
    than all layers they count too often.
    """
    same = [row for row in measured if row["model"] == silent["model"] and row["shard_ms"] is not None]
    rows = [row for row in same if row["run"] == silent["run"]]
    if not rows:
        return None
    row = max(rows, key=lambda row: row["gpus"])
    communication, many, few = _communication(row), silent["gpus"] - 1, row["gpus"] - 1
    if silent["run"].startswith("decode"):
        steps = [row for row in same if row["run"].startswith("decode") and row["gpus"] == few + 1]
        fixed = min(_communication(min(steps, key=lambda row: row["tokens"])), communication)
        communication = fixed + (communication - fixed) * many / few
    else:
        communication *= many / silent["gpus"] / (few / row["gpus"])
    return silent["published_layers"] * (silent["shard_ms"] / silent["layers"] + communication)


def _communication(row: Row) -> float:
    """Milliseconds per layer."""
    return max(row["ms"] - row["shard_ms"], 0.0) / row["layers"]
