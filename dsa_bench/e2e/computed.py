"""What all layers of a model take on more GPUs than there are, from what was measured: one GPU's part of it in silence,
and what fewer GPUs say to each other."""

from collections.abc import Sequence

from dsa_bench.e2e.parallel_rows import Row

LEAST_GPUS = 3  # of two each hears one other, which says nothing of how the time grows with their number


def computed(silent: Row, measured: Sequence[Row]) -> float | None:
    """Milliseconds of a pass through all published layers on silent["gpus"] GPUs; None where no row of the same model
    and run was measured on three GPUs or more.

    layers_all * (silent ms / layers + grows * (ms - silent ms) / layers): the first part of `silent`, one GPU of many;
    the second of the row with the most GPUs, which has what was said between these: what a GPU takes longer than in
    silence. grows: N GPUs say as much more as each of them gets more. Of a prompt that is (N - 1) / N of all rows; of a
    decoding step, in which each gets the parts of all others, N - 1 of them. So embedding and head count with the
    layers: of fewer layers than all they count too often.
    """
    same = [row for row in measured if (row["model"], row["run"]) == (silent["model"], silent["run"])]
    same = [row for row in same if row["gpus"] >= LEAST_GPUS and row["shard_ms"] is not None]
    if not same:
        return None
    row = max(same, key=lambda row: row["gpus"])
    said = max(row["ms"] - row["shard_ms"], 0.0) / row["layers"]
    many, few = (_received(silent["run"], gpus) for gpus in (silent["gpus"], row["gpus"]))
    return silent["published_layers"] * (silent["shard_ms"] / silent["layers"] + said * many / few)


def _received(run: str, gpus: int) -> float:
    return gpus - 1 if run.startswith("decode") else (gpus - 1) / gpus
