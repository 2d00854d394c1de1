"""Which of the receipt's rows tables and pictures show, and what they say of these."""

from collections.abc import Callable, Sequence
from typing import Any

from dsa_bench.e2e.stacks import LONG_STACKS, STACKS
from dsa_layers.families.published import published_config
from tests.gpu import receipt

Row = dict[str, Any]
# Of whole passes whose rows do not say themselves how many layers they have.
OF_STACKS = {"e2e": STACKS, "million": LONG_STACKS}


def main_entries() -> dict[str, dict[str, Any]]:
    """Those of the arch on which most is measured."""
    data = receipt.judged()
    verified = {arch: [name for name in data[arch] if not data[arch][name]["unverified"]] for arch in sorted(data)}
    return data[max(verified, key=lambda arch: len(verified[arch]))]


def _is_ours_alone(words: str) -> Callable[[Row], bool]:
    """Whether it says this of our call and not of the peer's: what they do is not the same."""
    return lambda row: words in row["shape"] and words not in row["peer"]


def _waits_for_host(row: Row) -> bool:
    """Whether a pass leaves the GPU idle for more than a quarter of its time, with our kernels or the peers'."""
    if not row.get("peer_parts"):
        return False
    filled = sum(row["parts"].values()) / row["ms"], sum(row["peer_parts"].values()) / row["peer_ms"]
    return min(filled) < 0.75


# Rows that do not compare like with like: a deterministic kernel with one that is not, fp16 accumulators with fp32, a
# plan that is made once for many calls, a pass that the host holds up.
OTHER_KINDS: tuple[Callable[[Row], bool], ...] = (
    _is_ours_alone("deterministic"),
    _is_ours_alone("float16 accumulators"),
    lambda row: row["shape"].startswith("the plan"),
    _waits_for_host,
)


def beside_peers(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.get("ratio") is not None]


def compared(rows: Sequence[Row]) -> list[Row]:
    """The rows with the time of a peer that does the same, where the GPU is what is timed."""
    return [row for row in beside_peers(rows) if not any(is_one(row) for is_one in OTHER_KINDS)]


def names_of(rows: Sequence[Row], other: str = "peer") -> str:
    """Of the others that are the fastest in some of these rows. A name may have commas."""
    return "; ".join(sorted({row[other] for row in rows if row.get(other)}))


def shape_of(name: str, row: Row) -> str:
    """The shape of an entry's row; of a pass of some of a model's layers also how many these are."""
    if name in OF_STACKS:
        file, fields = OF_STACKS[name][row["model"]]
        layers, published = fields["num_hidden_layers"], published_config(file)["num_hidden_layers"]
    else:
        layers, published = row.get("layers"), row.get("published_layers")
    return row["shape"] if layers == published or not published else f"{row['shape']}; {layers} of {published} layers"
