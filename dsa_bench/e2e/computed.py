"""The time of all layers of a model on more GPUs than the machine has, computed from the time of one GPU's part without
collectives and from the communication of fewer GPUs."""

from collections.abc import Sequence

from dsa_bench.e2e.parallel import Row


def computed(silent: Row, measured: Sequence[Row]) -> float | None:
    """Return milliseconds of a pass through all published layers on N = silent["gpus"] GPUs. Return None if `measured`
    has no row of the same model and run with shard_ms.

    silent: a row of `parallel.part_rows`. Its shard_ms is the time of one of the N GPUs without collectives. measured:
    rows of `parallel.rank_rows`, in which ms - shard_ms is the communication. The row with the most GPUs, n, counts.

    The result is published layers * (shard_ms of `silent` + communication), both per layer. From n to N GPUs
    - a prompt's communication grows with the fraction of the rows that each GPU receives, from (n - 1) / n to
      (N - 1) / N;
    - a decoding step's communication has a fixed part, which is the communication of the step with the fewest
      sequences. The rest is the transfer of rows. It grows with the number of other GPUs, from n - 1 to N - 1, because
      each GPU receives the rows of every other GPU.

    More GPUs also wait longer for each other; this is not included. The time of embedding and head is divided among the
    layers. So if a row has fewer layers than the published model, embedding and head count several times.
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
    return max(row["ms"] - row["shard_ms"], 0.0) / row["layers"]
