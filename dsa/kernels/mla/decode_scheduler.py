"""Which work tiles a part of the GPU has in dense MLA decoding: from the plan that mla_plan_sm90.py makes, or by splits
of fixed lengths in batch-invariant decoding.

A part is as many CTAs as there are tiles of rows. It has a range of sequences, of which the first and the last may be
split between parts.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from dsa.kernels.mla.limits import FIXED_SPLIT_TILES, MAX_FIXED_SPLITS, TILE_N

TO_THE_END = 2**30  # the END_TILE of a part whose last sequence is not split there
MAX_TILES = 2**31 // TILE_N


class PlanColumn(IntEnum):
    """A plan is int32 [parts, 8]. Row i is part i, but for SPLIT_SEQUENCE: the i-th sequence that is split, or -1.
    Two numbers are 0."""

    FIRST_SEQUENCE = 0
    FIRST_TILE = 1
    LAST_SEQUENCE = 2
    END_TILE = 3
    FIRST_SPLIT = 4  # splits of the first sequence before this part
    SPLIT_SEQUENCE = 5


class DecodeState(NamedTuple):
    """The sequence that comes next, the tile and the split of it that are next, the part's last sequence and the tile
    where it ends there."""

    sequence: Int32
    tile: Int32
    split: Int32
    last: Int32
    end_tile: Int32

    @property
    def is_valid(self) -> Boolean:
        return self.sequence <= self.last


@dataclass(frozen=True)
class DecodeScheduler:
    """lengths [B], plan [parts, 8] and num_splits [B + 1], as the kernels have them

    capacity      keys that the block table has room for
    fixed_splits  0: the plan says which work tiles there are. Else: part i has split i % fixed_splits of sequence
                  i // fixed_splits, whose number of splits depends on its length alone
    """

    lengths: cute.Tensor
    plan: cute.Tensor
    num_splits: cute.Tensor
    capacity: Int32
    fixed_splits: Int32

    @cute.jit
    def first(self, part) -> DecodeState:
        sequence, tile, split, last, end_tile = Int32(0), Int32(0), Int32(0), Int32(-1), Int32(TO_THE_END)
        if self.fixed_splits > 0:
            sequence, split = part // self.fixed_splits, part % self.fixed_splits
            last = sequence
        else:
            sequence, tile = self.plan[part, PlanColumn.FIRST_SEQUENCE], self.plan[part, PlanColumn.FIRST_TILE]
            split = self.plan[part, PlanColumn.FIRST_SPLIT]
            last, end_tile = self.plan[part, PlanColumn.LAST_SEQUENCE], self.plan[part, PlanColumn.END_TILE]
            # A plan of another batch, or no plan at all, must not lead outside the tensors.
            sequence, split = cutlass.max(sequence, 0), cutlass.max(split, 0)
            tile = cutlass.min(cutlass.max(tile, 0), MAX_TILES)
        return DecodeState(sequence, tile, split, cutlass.min(last, self.lengths.shape[0] - 1), end_tile)

    @cute.jit
    def guess(self, state: DecodeState):
        """Where the next work tile probably begins; known before the sequence's length."""
        return state.tile + state.split * FIXED_SPLIT_TILES if self.fixed_splits > 0 else state.tile

    @cute.jit
    def work_tile(self, state: DecodeState, tiles, part, partials):
        """(first tile, the one behind the last, split_idx, whether there is none) of the next work tile; tiles: of the
        sequence; partials: how many partial results there is room for."""
        first, end, split_idx, empty = Int32(0), tiles, Int32(-1), False
        if self.fixed_splits > 0:
            each = cutlass.max(FIXED_SPLIT_TILES, (tiles + MAX_FIXED_SPLITS - 1) // MAX_FIXED_SPLITS)
            first, end = state.split * each, cutlass.min((state.split + 1) * each, tiles)
            if tiles > each:
                split_idx = part
            empty = state.split > 0 and first >= tiles
        else:
            first = cutlass.min(state.tile, tiles)
            if state.sequence == state.last:
                end = cutlass.max(cutlass.min(state.end_tile, tiles), first)
            if state.tile > 0 or (state.sequence == state.last and state.end_tile < TO_THE_END):
                split = self.num_splits[state.sequence] + state.split
                split_idx = cutlass.max(cutlass.min(split, partials - 1), 0)
        return first, end, split_idx, empty

    def advance(self, state: DecodeState) -> DecodeState:
        return DecodeState(state.sequence + 1, Int32(0), Int32(0), state.last, state.end_tile)
