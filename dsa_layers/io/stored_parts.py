"""Which parts of a checkpoint's tensors a rank has."""

import re

from dsa_layers.engine.cuts import Cut
from dsa_layers.errors import CheckpointError
from dsa_layers.families.fused_experts import Index, split_experts
from dsa_layers.families.manifest import SCALE_SUFFIX
from dsa_layers.layers.linear import BLOCK
from dsa_layers.parallel.ranks import Ranks

_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


class Stored(str):
    """A tensor's name, where the checkpoint's whole tensor is meant and not the model's part of it."""


def parts_of_rank(
    cuts: dict[str, Cut], experts: int, ranks: Ranks, name: str, shape: tuple[int, ...]
) -> dict[str, Index]:
    """What a tensor of the checkpoint has for this rank, and what one of its model is made of, as `load_weights` asks.
    cuts: of the model; experts: of all ranks, which go by their numbers in the checkpoint on both sides."""
    each = experts // ranks.size
    own = range(ranks.rank * each, (ranks.rank + 1) * each)
    if not isinstance(name, Stored):
        parts = split_experts(name, shape, experts=len(own))
        return {_renumbered(part, own.start): index for part, index in parts.items()}
    name = str(name)
    every = range(experts)  # a number beyond these is nobody's, and an unexpected tensor
    parts = split_experts(name, shape, experts=experts)
    parts = {part: index for part, index in parts.items() if (e := _expert(part)) in own or e not in every}
    if parts != {name: ()}:  # all experts in one tensor, or another rank's
        return parts
    cut = _cut_of(cuts, name, shape)
    return {name: () if cut is None else cut.part(ranks.rank)}


def _expert(name: str) -> int | None:
    """The number of the expert whose tensor it is."""
    match = _OF_EXPERT.fullmatch(name)
    return match and int(match[2])


def _renumbered(name: str, first: int) -> str:
    match = _OF_EXPERT.fullmatch(name)
    return name if match is None else f"{match[1]}.{int(match[2]) + first}.{match[3]}"


def _cut_of(cuts: dict[str, Cut], name: str, shape: tuple[int, ...]) -> Cut | None:
    """The cut of a tensor of this shape, or of the scales of one that the model has without."""
    cut = cuts.get(name)
    if cut is not None:
        if shape != cut.whole:
            raise CheckpointError(f"has shape {list(shape)}; the model expects {list(cut.whole)}")
        return cut
    cut = cuts.get(name.removesuffix(SCALE_SUFFIX))
    if cut is None:
        return None
    return Cut(cut.dim, shape, cut.size // BLOCK)
