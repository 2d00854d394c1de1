"""The parts of a checkpoint's tensors that a rank reads, and the parts of its model that they become."""

import re

from dsa_layers.engine.split import Cut
from dsa_layers.errors import CheckpointError
from dsa_layers.io.fused_experts import Index, split_experts
from dsa_layers.io.manifest import SCALE_SUFFIX
from dsa_layers.layers.linear import BLOCK
from dsa_layers.parallel.ranks import Ranks

_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


class RankParts:
    """Two functions for `load_weights`. Both number experts as the checkpoint does.

    cuts: of the model; experts: of all ranks
    """

    def __init__(self, cuts: dict[str, Cut], experts: int, ranks: Ranks) -> None:
        self._cuts, self._experts, self._rank = cuts, experts, ranks.rank
        each = experts // ranks.size
        self._own = range(ranks.rank * each, (ranks.rank + 1) * each)

    def of_model(self, name: str, shape: tuple[int, ...]) -> dict[str, Index]:
        """The parts of a tensor of the rank's model, whose experts are the rank's own."""
        parts = split_experts(name, shape, experts=len(self._own))
        return {_renumbered(part, self._own.start): index for part, index in parts.items()}

    def of_checkpoint(self, name: str, shape: tuple[int, ...]) -> dict[str, Index]:
        """The parts of a checkpoint's tensor that the rank reads, none of another rank's experts."""
        parts = split_experts(name, shape, experts=self._experts)
        parts = {part: index for part, index in parts.items() if self._is_read(part)}
        if parts != {name: ()}:  # all experts in one tensor, or another rank's expert
            return parts
        cut = self._cut(name, shape)
        return {name: () if cut is None else cut.part(self._rank)}

    def _is_read(self, name: str) -> bool:
        """False for the experts of other ranks. A number beyond all experts is read, and found to be unexpected."""
        match = _OF_EXPERT.fullmatch(name)
        return match is None or int(match[2]) in self._own or int(match[2]) >= self._experts

    def _cut(self, name: str, shape: tuple[int, ...]) -> Cut | None:
        """The cut of a tensor, or of the scales of an FP8 weight that the model has without scales."""
        cut = self._cuts.get(name)
        if cut is None:
            cut = self._cuts.get(name.removesuffix(SCALE_SUFFIX))
            return None if cut is None else Cut(cut.dim, shape, cut.size // BLOCK)
        if shape != cut.whole:
            raise CheckpointError(f"has shape {list(shape)}; expected {list(cut.whole)}")
        return cut


def _renumbered(name: str, first: int) -> str:
    match = _OF_EXPERT.fullmatch(name)
    return name if match is None else f"{match[1]}.{int(match[2]) + first}.{match[3]}"
