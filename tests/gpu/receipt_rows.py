"""Which of the receipt's rows tables and pictures show, and what they say of these."""

from collections.abc import Sequence
from typing import Any

from dsa_bench.e2e.document import waits_for_host
from dsa_bench.e2e.stacks import LONG_STACKS, STACKS
from dsa_layers.families.published import published_config
from tests.gpu import receipt

Row = dict[str, Any]
# Of whole passes whose rows do not say themselves how many layers they have.
OF_STACKS = {"e2e": STACKS, "million": LONG_STACKS}


def main_entries() -> dict[str, dict[str, Any]]:
    """Those of the arch on which most is measured."""
    data = receipt.load()
    verified = {arch: [name for name in data[arch] if not data[arch][name]["unverified"]] for arch in sorted(data)}
    return data[max(verified, key=lambda arch: len(verified[arch]))]


def compared(rows: Sequence[Row]) -> list[Row]:
    """The rows with the time of a peer that does the same, where the GPU is what is timed."""
    timed = [row for row in rows if row.get("ratio") is not None]
    return [row for row in timed if not beside_another_kind(row) and not waits_for_host(row)]


def beside_another_kind(row: Row) -> bool:
    """A deterministic variant of ours beside a peer that has none: what they do is not the same."""
    return row.get("ratio") is not None and "deterministic" in row["shape"] and "deterministic" not in row["peer"]


def other_kinds(rows: Sequence[Row]) -> str:
    """The speed-ups that are not among the `compared`, to stand behind their range."""
    kinds = {
        "deterministic beside one that is not": beside_another_kind,
        "where a pass waits for the host": waits_for_host,
    }
    found = {what: [f"{row['ratio']:.2f}" for row in rows if of_kind(row)] for what, of_kind in kinds.items()}
    return "".join(f"; {what}: {', '.join(ratios)}" for what, ratios in found.items() if ratios)


def shape_of(name: str, row: Row) -> str:
    """The shape of an entry's row; of a pass of some of a model's layers also how many these are."""
    if name in OF_STACKS:
        file, fields = OF_STACKS[name][row["model"]]
        layers, published = fields["num_hidden_layers"], published_config(file)["num_hidden_layers"]
    else:
        layers, published = row.get("layers"), row.get("published_layers")
    return row["shape"] if layers == published or not published else f"{row['shape']}; {layers} of {published} layers"
