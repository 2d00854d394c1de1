"""Select the rows of the receipt's benchmarks that tables and pictures show, and name their shapes and peers."""

from collections.abc import Callable, Sequence
from typing import Any

from dsa_bench.e2e.stacks import LONG_STACKS, STACKS
from dsa_layers.models.family import published_config
from tests.gpu import receipt

Row = dict[str, Any]
# {entry: {model: (configuration file, fields)}}, for entries whose rows do not contain the number of layers
OF_STACKS = {"e2e": STACKS, "million": LONG_STACKS}


def main_entries() -> dict[str, dict[str, Any]]:
    """Return {name: entry} of the arch with the most verified entries."""
    data = receipt.judged()
    verified = {arch: [name for name in data[arch] if not data[arch][name]["unverified"]] for arch in sorted(data)}
    return data[max(verified, key=lambda arch: len(verified[arch]))]


def _is_ours_alone(words: str) -> Callable[[Row], bool]:
    """Return a test of a row: whether row["shape"], its label, contains these words and the peer's name does not."""
    return lambda row: words in row["shape"] and words not in row["peer"]


def _waits_for_host(row: Row) -> bool:
    """Whether the pass leaves the GPU idle for more than a quarter of the time, with our kernels or with the peers'."""
    if not row.get("peer_parts"):
        return False
    filled = sum(row["parts"].values()) / row["ms"], sum(row["peer_parts"].values()) / row["peer_ms"]
    return min(filled) < 0.75


# Rows whose ratio does not compare GPU times of the same work: our kernel is deterministic and the peer's is not; our
# kernel has fp16 accumulators and the peer's fp32; the row is for a plan, which serves many calls; the pass waits for
# the host.
OTHER_KINDS: tuple[Callable[[Row], bool], ...] = (
    _is_ours_alone("deterministic"),
    _is_ours_alone("float16 accumulators"),
    lambda row: row["shape"].startswith("the plan"),
    _waits_for_host,
)


def beside_peers(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.get("ratio") is not None]


def compared(rows: Sequence[Row]) -> list[Row]:
    """Return the rows whose ratio compares our GPU time with a peer's for the same work."""
    return [row for row in beside_peers(rows) if not any(is_one(row) for is_one in OTHER_KINDS)]


def names_of(rows: Sequence[Row], other: str = "peer") -> str:
    """Return the names in a column, "peer" or "baseline", joined by "; ", because a name can contain commas."""
    return "; ".join(sorted({row[other] for row in rows if row.get(other)}))


def shape_of(name: str, row: Row) -> str:
    """Return the shape of a row. The number of layers follows if these are only some of the model's layers."""
    if name in OF_STACKS:
        file, fields = OF_STACKS[name][row["model"]]
        layers, published = fields["num_hidden_layers"], published_config(file)["num_hidden_layers"]
    else:
        layers, published = row.get("layers"), row.get("published_layers")
    return row["shape"] if layers == published or not published else f"{row['shape']}; {layers} of {published} layers"
