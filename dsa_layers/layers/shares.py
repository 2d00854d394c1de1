"""What several processes that compute one model have parts of."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Shares:
    """How a layer is split. Each process has an equal part, that of its number.

    rows, columns  parameters by name, or all those below a submodule's name, "" being the layer itself: cut along
                   dimension 0 or 1. Every process has all others whole
    counts         attributes that count what is cut, and what that is: {"n_heads": "attention heads"}
    blocks         whether FP8 checkpoints store the matrices in blocks of 128 x 128, which are not cut
    A layer with an attribute `first` gets in it the number of the first of its part.
    """

    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    counts: Mapping[str, str] = field(default_factory=dict)
    blocks: bool = True
