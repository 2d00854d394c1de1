"""A rank's part of a model without the other ranks: the same computation without communication.

The rank leaves out transfers between ranks, the wait for transfers, and the addition of received values. It has the
same number of rows as with other ranks, and runs the same kernels on them. It uses its own rows in place of other
ranks' rows, and its own part in place of a sum. The results belong to no real model, but they are finite and as varied
as a model's. The router chooses among all experts, and the rank computes those that it has.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dsa_bench.e2e.replacing import replaced
from dsa_layers.batch.placement import Placement
from dsa_layers.engine.split import SplitEmbedding
from dsa_layers.parallel.placement import Sharded
from dsa_layers.parallel.ranks import Ranks


class SilentRanks(Ranks):
    """One of several ranks, which does not communicate."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def join_columns(self, x: torch.Tensor) -> torch.Tensor:
        return x


@contextlib.contextmanager
def without_collectives(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """Within the block, passes of the model do not communicate. The model is this rank's part, which `split` made for
    `ranks`.

    The replacements affect the whole process, so no other split model may run within the block.
    """
    silent = SilentRanks(ranks.rank, ranks.size)
    changes: list[tuple[object, str, Any]] = [
        (Sharded, "all_gather", _repeat_rows),
        (Sharded, "start_all_gather", Placement.start_all_gather),
        (Sharded, "reduce", Sharded.local),
        (Sharded, "start_reduce", Placement.start_reduce),
    ]
    changes += [(module, "ranks", silent) for module in model.modules() if hasattr(module, "ranks")]
    # A rank's embedding has no rows for the token ids of other ranks, and a pass with only ids of other ranks would
    # compute zeros. So the hook maps every id to one of this rank.
    with replaced(changes), contextlib.ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, SplitEmbedding):
                hooks.callback(module.register_forward_pre_hook(_tokens_of_this_rank).remove)
        yield


def _tokens_of_this_rank(embedding: SplitEmbedding, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    count = len(embedding.weight)
    return (arguments[0] % count + embedding.ranks.rank * count,)


def _repeat_rows(rows: Sharded, *local: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Replace `Sharded.all_gather`: repeat each of the rank's two pieces over the half of the rows that contains it, so
    that a token gets the selection of a token at a similar position."""
    middle, lengths = rows.count // 2, [piece.stop - piece.start for piece in rows.pieces[rows._ranks.rank]]
    whole = tuple(x.new_empty(rows.count, *x.shape[1:]) for x in local)
    for x, y in zip(local, whole):
        for half, mine in zip((y[:middle], y[middle:]), x.split(lengths)):
            for piece in half.split(len(mine)):
                piece.copy_(mine[: len(piece)])
    return whole
