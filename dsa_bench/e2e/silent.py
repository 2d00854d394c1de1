"""A rank's part of a model without the other ranks: the same computation without communication.

Left out are transfers between ranks, the wait for them, and the addition of received values. The rank has the same rows
as among others, whole or a share of them, and computes the same. It substitutes its rows for other ranks' rows, and its
part for a sum. The results belong to no real model, but they are finite and as varied as a model's; experts are chosen
among all, and the rank computes those that it has.
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
    """One of several ranks, without the others."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def join_columns(self, x: torch.Tensor) -> torch.Tensor:
        return x


@contextlib.contextmanager
def without_collectives(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """Within the block passes of the model, the part of `ranks` (`split`), do not communicate. This affects the whole
    process: no other split model may run meanwhile."""
    silent = SilentRanks(ranks.rank, ranks.size, shares_rows=ranks.shares_rows)
    told = [(module, module.ranks) for module in model.modules() if hasattr(module, "ranks")]
    # Other ranks' tokens have no rows here: a rank with none of a pass's tokens would have only zeros.
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
    """Replaces `gather`: repeats each of the rank's two pieces over its half of the rows, so that a token gets the
    selection of a token at a similar position."""
    middle = rows.count // 2
    whole = tuple(x.new_empty(rows.count, *x.shape[1:]) for x in own)
    for x, y in zip(own, whole):
        for half, mine in zip((y[:middle], y[middle:]), rows.pieces(x)):
            for piece in half.split(len(mine)):
                piece.copy_(mine[: len(piece)])
    return whole
