"""A rank's part of a model without the other ranks: the same work, and nothing is said.

What is left out is what goes between ranks, the wait for it, and the addition of what came. Rows lie on the rank as
they do among others, whole or a share of them, so it computes all that it computes there. What it would be told it
takes from what it has: rows of its own in the place of other ranks' rows, and of a sum its own part. So the numbers
are of no model, but they are finite, and as different from each other as a model's; experts are chosen among all, and
the rank has those of its number.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from dsa_layers.batch.rows import Rows
from dsa_layers.layers.embedding import Embedding
from dsa_layers.parallel.ranks import Ranks
from dsa_layers.parallel.rows import SharedRows


class SilentRanks(Ranks):
    """One of several ranks, with no others there."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def join_columns(self, x: torch.Tensor) -> torch.Tensor:
        return x


@contextlib.contextmanager
def without_collectives(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """Within the block passes of the model, which is the part of `ranks` (`split`), say nothing to others. Of the whole
    process: no other split model may run meanwhile."""
    silent = SilentRanks(ranks.rank, ranks.size, shares_rows=ranks.shares_rows)
    told = [(module, module.ranks) for module in model.modules() if hasattr(module, "ranks")]
    # Other ranks' tokens have no rows here: all rows would be zero of a rank that has none of a pass's tokens.
    embeddings = [module for module in model.modules() if isinstance(module, Embedding)]
    hooks = [module.register_forward_pre_hook(_own_tokens) for module in embeddings]
    said = {name: getattr(SharedRows, name) for name in ("gather", "begin_gather", "sum", "begin_sum")}
    SharedRows.gather, SharedRows.begin_gather = _own_rows_for_all, Rows.begin_gather
    SharedRows.sum, SharedRows.begin_sum = SharedRows.own, Rows.begin_sum
    try:
        for module, _ in told:
            module.ranks = silent
        yield
    finally:
        for name, function in said.items():
            setattr(SharedRows, name, function)
        for module, before in told:
            module.ranks = before
        for hook in hooks:
            hook.remove()


def _own_tokens(embedding: Embedding, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    (tokens,) = arguments
    return (tokens % embedding.count + embedding.first,)


def _own_rows_for_all(rows: SharedRows, *own: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """In the place of `gather`: each of the rank's two pieces again and again over its half of the rows. So what a
    token is said to select are keys of a token that is about as far from the beginning."""
    middle = rows.count // 2
    whole = tuple(x.new_empty(rows.count, *x.shape[1:]) for x in own)
    for x, y in zip(own, whole):
        for half, mine in zip((y[:middle], y[middle:]), rows.pieces(x)):
            for piece in half.split(len(mine)):
                piece.copy_(mine[: len(piece)])
    return whole
