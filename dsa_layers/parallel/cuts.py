"""Which parameters of a model several ranks share, and along what: what its layers say of themselves (`Shares`).

    layer               rows (dim 0)                     columns (dim 1)
    DSAAttention        q_b_proj, kv_b_proj              o_proj
    CompressedAttention wq_b, attn_sink, wo_a (groups)   wo_b
    SwiGLU              gate_proj, up_proj               down_proj
    Experts             all of it (experts)
    Embedding, the head all of it (vocabulary)

A rank has the part of its number, of as many equal ones as there are ranks, so that the products of row-wise and then
column-wise parts are summands of what one rank computes. Of layers in whose place long passes split the tokens
(`splits_tokens`), shared experts among them, nothing is cut: each rank has its part beside the whole (`OwnPart`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from dsa_layers.layers.linear import BLOCK
from dsa_layers.layers.shares import Shares, splits_tokens

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
    share a scale and are not cut. Raises DoesNotDivide for a model that does not come apart evenly, parts of which a
    rank has beside the whole included."""
    if ranks == 1:
        return {}
    _check_counts(model, ranks)
    cuts: dict[str, Cut] = {}
    whole_layers = tuple(f"{name}." for name, layer, _ in shares_of(model) if splits_tokens(layer, ranks))
    for name, parameter, dim, in_blocks in _shared(model):
        whole, kind = tuple(parameter.shape), "rows" if dim == ROWS else "columns"
        if not name.endswith(SCALES):  # what is said of a weight holds for these
            if whole[dim] % ranks:
                raise _does_not_divide(ranks, f"{whole[dim]} {kind}", name)
            if blocks and in_blocks and whole[dim] // ranks % BLOCK:
                raise _does_not_divide(ranks, f"{-(-whole[dim] // BLOCK)} blocks of {BLOCK} {kind}", name)
        if not name.startswith(whole_layers):
            cuts[name] = Cut(dim, whole, whole[dim] // ranks)
    return cuts


def shares_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, Shares]]:
    """(name, module, its shares) of all that are split."""
    for name, module in model.named_modules():
        shares = getattr(module, "shares", None)
        if shares is not None:
            yield name, module, shares


def _check_counts(model: nn.Module, ranks: int) -> None:
    for name, module, shares in shares_of(model):
        for attribute, what in shares.counts.items():
            count = getattr(module, attribute)
            if count % ranks:
                raise _does_not_divide(ranks, f"{count} {what}", name)


def _does_not_divide(ranks: int, what: str, name: str) -> DoesNotDivide:
    return DoesNotDivide(f"gpus: {ranks} do not evenly share the {what} of {name}")


def _shared(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, int, bool]]:
    """(name, parameter, dim, whether FP8 checkpoints store it in blocks) of all that is shared."""
    for prefix, module, shares in shares_of(model):
        for places, dim in ((shares.rows, ROWS), (shares.columns, COLUMNS)):
            for name, parameter in module.named_parameters():
                if any(not place or name == place or name.startswith(f"{place}.") for place in places):
                    in_blocks = shares.blocks and parameter.dim() == 2
                    yield f"{prefix}.{name}".lstrip("."), parameter, dim, in_blocks
