"""Which parameters of a model several ranks share, and along which dimension: as `SHARES` says of its layers.

A parameter is cut into as many equal parts as there are ranks, and rank r has the r-th. After a layer that is cut by
rows, one that is cut by columns gives a summand of the whole result. Layers that each rank has whole are not cut.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from dsa_layers.engine.shares import shares_of
from dsa_layers.layers.linear import BLOCK

ROWS, COLUMNS = 0, 1
SCALES = "_scale_inv"


@dataclass(frozen=True)
class Cut:
    """A parameter of which each rank has `size` numbers of the dimension `dim`. whole: its shape on one rank."""

    dim: int
    whole: tuple[int, ...]
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a rank's part."""
        return (*self.whole[: self.dim], self.size, *self.whole[self.dim + 1 :])

    def part(self, rank: int) -> tuple[slice, ...]:
        """Where the part of a rank lies in the whole."""
        own = slice(rank * self.size, (rank + 1) * self.size)
        return (*(slice(0, n) for n in self.whole[: self.dim]), own)


class DoesNotDivide(ValueError):
    """So many ranks cannot have equal parts of the model. Names their number, and what they cannot share."""


def cuts_of(model: nn.Module, ranks: int, *, blocks: bool) -> dict[str, Cut]:
    """{parameter's name: its cut} of a whole model. blocks: projections are stored in FP8, whose blocks of 128 x 128
    share a scale and are not cut. Raises DoesNotDivide for a model that does not come apart evenly, including parts of
    layers that a rank has whole."""
    if ranks == 1:
        return {}
    _check_counts(model, ranks)
    cuts: dict[str, Cut] = {}
    whole_layers = tuple(f"{name}." for name, _, shares in shares_of(model, ranks) if shares.whole)
    for name, parameter, dim, in_blocks in _shared(model, ranks):
        whole, kind = tuple(parameter.shape), "rows" if dim == ROWS else "columns"
        if not name.endswith(SCALES):  # what is said of a weight holds for these
            if whole[dim] % ranks:
                raise _does_not_divide(ranks, f"{whole[dim]} {kind}", name)
            if blocks and in_blocks and whole[dim] // ranks % BLOCK:
                raise _does_not_divide(ranks, f"{-(-whole[dim] // BLOCK)} blocks of {BLOCK} {kind}", name)
        if not name.startswith(whole_layers):
            cuts[name] = Cut(dim, whole, whole[dim] // ranks)
    return cuts


def _check_counts(model: nn.Module, ranks: int) -> None:
    for name, module, shares in shares_of(model, ranks):
        for attribute, what in shares.counts.items():
            count = getattr(module, attribute)
            if count % ranks:
                raise _does_not_divide(ranks, f"{count} {what}", name)


def _does_not_divide(ranks: int, what: str, name: str) -> DoesNotDivide:
    return DoesNotDivide(f"gpus: {ranks} do not evenly share the {what} of {name}")


def _shared(model: nn.Module, ranks: int) -> Iterator[tuple[str, torch.Tensor, int, bool]]:
    """(name, parameter, dim, whether FP8 checkpoints store it in blocks) of all that is shared."""
    for prefix, module, shares in shares_of(model, ranks):
        for places, dim in ((shares.rows, ROWS), (shares.columns, COLUMNS)):
            for name, parameter in module.named_parameters():
                if any(not place or name == place or name.startswith(f"{place}.") for place in places):
                    in_blocks = shares.blocks and parameter.dim() == 2
                    yield f"{prefix}.{name}".lstrip("."), parameter, dim, in_blocks
