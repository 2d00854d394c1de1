"""The tables of docs/indexer-training.md that say what training's ops cost, generated from the GPU receipt.

usage: python -m tests.generate
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dsa_bench.e2e.marked_document import measured, not_measured, table
from tests.gpu import receipt
from tests.gpu.receipt_rows import Row, main_entries

PATH = receipt.ROOT / "docs" / "indexer-training.md"
WARMUP = "indexer_warmup_attention"
ATTENTION = "sparse_mla_attention"
LOSS = "sparse_indexer_loss"
WARMUP_HEAD = ("target, heads of q k/v", "tokens", "forward, loss, gradients", "FA2 forward", "over FA2")
WARMUP_HEAD += ("backward of the loss", "of weights that differ", "FA2 backward", "memory beside the inputs")
ATTENTION_HEAD = ("backward pass", "ms", "rate", "the peer's ms", "over ours")
PASSES = ("forward", "backward", "deterministic backward")
LOSS_HEAD = ("shape", *(cell for name in PASSES for cell in (f"{name}, ms", "of attention's forward")))


def warmup(rows: Sequence[Row]) -> str:
    """A row for each model and number of tokens, with what there is of its passes; the target "sum" comes first."""
    models: dict[tuple[str, str], dict[str, dict[str, Row]]] = {}
    for row in rows:
        which, target, tokens, model = row["shape"].split(", ", 3)
        models.setdefault((target, model), {}).setdefault(tokens, {})[which] = row
    ordered = sorted(models.items(), key=lambda own: own[0][0] != "sum")
    return table(WARMUP_HEAD, (_warmup_cells(*kind, *run) for kind, runs in ordered for run in runs.items()))


def _warmup_cells(target: str, model: str, tokens: str, passes: Mapping[str, Row]) -> list[str]:
    sequences, length = map(int, tokens.split(" x "))
    ours = {which: _ms(row["ms"]) for which, row in passes.items()}
    fa2 = {which: _yardstick(row) for which, row in passes.items()}
    memory = re.search(r"([\d.]+) of the inputs' memory", passes["forward"]["figure"])
    cells = [f"{target}, {model}", f"{sequences * length // 1024}K", ours["forward"], _ms(fa2["forward"])]
    cells += [f"{passes['forward']['ms'] / fa2['forward']:.2f}"]
    cells += [ours.get("backward", ""), ours.get("weighted backward", "")]
    return [*cells, _ms(fa2["backward"]) if "backward" in fa2 else "", memory[1] if memory else ""]


def attention(rows: Sequence[Row]) -> str:
    """A row for each shape."""
    return table(
        ATTENTION_HEAD,
        (
            [row["shape"], _ms(row["ms"]), row["figure"]]
            + (["", ""] if row["ratio"] is None else [_ms(row["peer_ms"]), f"{row['ratio']:.2f}"])
            for row in rows
        ),
    )


def loss(rows: Sequence[Row]) -> str:
    """A row for each shape, with all passes."""
    shapes: dict[str, dict[str, Row]] = {}
    for row in rows:
        which, shape = row["shape"].split(", ", 1)
        shapes.setdefault(shape, {})[which] = row
    return table(LOSS_HEAD, ([shape, *_loss_cells(own)] for shape, own in shapes.items()))


def _loss_cells(passes: Mapping[str, Row]) -> list[str]:
    cells = []
    for which in PASSES:
        row = passes.get(which)
        cells += ["", ""] if row is None else [_ms(row["ms"]), f"{row['ms'] / _yardstick(row):.2f}"]
    return cells


def _yardstick(row: Row) -> float:
    """Milliseconds of the one that a row has."""
    (found,) = row["yardsticks"].values()
    return found["ms"]


def _ms(ms: float) -> str:
    return f"{ms:#.3g}".rstrip(".")


TABLES = {WARMUP: warmup, ATTENTION: attention, LOSS: loss}


def generated(name: str, entry: Mapping[str, Any]) -> str:
    """What stands between the marks of an entry's table."""
    if why := not_measured(entry):
        return why
    rows, place = measured(entry)
    return f"{place}\n\n{TABLES[name](rows)}"


def inserted(text: str) -> str:
    """The document's text with the tables of today's receipt."""
    entries = main_entries()
    for name in TABLES:
        begin, end = f"<!-- {name}: python -m tests.generate -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        entry = entries.get(name, {"unverified": "no entry"})
        text = f"{before}{begin}\n{generated(name, entry)}\n{end}{after}"
    return text
