"""What several processes that compute one model have parts of."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

# Heads that the kernels of attention over selected keys take as one tile: fewer cost about as much as these, since each
# query gathers its keys for all of them.
TILE_OF_HEADS = 64


@dataclass(frozen=True)
class Shares:
    """How a layer is split. Each process has an equal part, that of its number.

    rows, columns  parameters by name, or all those below a submodule's name, "" being the layer itself: cut along
                   dimension 0 or 1. Every process has all others whole
    counts         attributes that count what is cut, and what that is: {"n_heads": "attention heads"}
    blocks         whether FP8 checkpoints store the matrices in blocks of 128 x 128, which are not cut
    tokens         whether long passes split the tokens in the place of the layer (`splits_tokens`)
    heads          the one of the counting attributes that counts attention heads, of a layer in whose place long passes
                   split the tokens if it has few
    A layer with an attribute `first` gets in it the number of the first of its part.
    """

    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    counts: Mapping[str, str] = field(default_factory=dict)
    blocks: bool = True
    tokens: bool = False
    heads: str | None = None


def splits_tokens(layer: nn.Module, processes: int) -> bool:
    """Whether so many processes have a whole layer each, and where passes are long compute it for their own tokens:
    shared experts, and attention if a process's share of the heads would fill no tile. Then nothing of the layer is
    cut, and each has its part beside the whole (`OwnPart`)."""
    if processes == 1:
        return False
    heads = layer.shares.heads
    return layer.shares.tokens or (heads is not None and fill_no_tile(getattr(layer, heads) // processes))


def fill_no_tile(heads: int) -> bool:
    """Whether a process's heads are so few that the kernels' time is that of more."""
    return heads < TILE_OF_HEADS
