"""The work-tile scheduler of dense MLA decoding.

Work tiles come from the plan of mla_plan_sm90.py, or, in batch-invariant decoding, from splits of fixed
lengths.

A part is a unit of work for one CTA per row tile. It covers a range of sequences. Its first and last sequence
may be split between parts.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from dsa.kernels.mla.limits import FIXED_SPLIT_TILES, MAX_FIXED_SPLITS, TILE_N

TO_THE_END = 2**30  # END_TILE of a part that runs to the end of its last sequence
MAX_TILES = 2**31 // TILE_N


class PlanColumn(IntEnum):
    """Columns of a plan, int32 [parts, 8]. The last two columns are 0.

    Row i describes part i, except for SPLIT_SEQUENCE: the i-th split sequence, or -1.
    """

    FIRST_SEQUENCE = 0
    FIRST_TILE = 1
    LAST_SEQUENCE = 2
    END_TILE = 3
    FIRST_SPLIT = 4  # index of this part's split of the first sequence
    SPLIT_SEQUENCE = 5


class DecodeState(NamedTuple):
    """Position in a part.

    sequence  next sequence
    tile      its next tile
    split     index of its next split
    last      last sequence of the part
    end_tile  tile where the part ends in its last sequence
    """

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
    """Finds the work tiles of a part.

    lengths       [B]
    plan          [parts, 8]
    num_splits    [B + 1]
    capacity      keys that a row of the block table has room for
    fixed_splits  0: work tiles come from the plan. Otherwise part i is split i % fixed_splits of sequence i
                  // fixed_splits, and the number of splits of a sequence depends only on its length
    """

    lengths: cute.Tensor
    plan: cute.Tensor
    num_splits: cute.Tensor
    capacity: Int32
    fixed_splits: Int32

    @cute.jit
    def first(self, part) -> DecodeState:
        """Return the state before the part's first work tile."""
        sequence, tile, split, last, end_tile = Int32(0), Int32(0), Int32(0), Int32(-1), Int32(TO_THE_END)
        if self.fixed_splits > 0:
            sequence, split = part // self.fixed_splits, part % self.fixed_splits
            last = sequence
        else:
            sequence, tile = self.plan[part, PlanColumn.FIRST_SEQUENCE], self.plan[part, PlanColumn.FIRST_TILE]
            split = self.plan[part, PlanColumn.FIRST_SPLIT]
            last, end_tile = self.plan[part, PlanColumn.LAST_SEQUENCE], self.plan[part, PlanColumn.END_TILE]
            # A plan of another batch, or garbage, must not cause accesses outside the tensors.
            sequence, split = cutlass.max(sequence, 0), cutlass.max(split, 0)
            tile = cutlass.min(cutlass.max(tile, 0), MAX_TILES)
        return DecodeState(sequence, tile, split, cutlass.min(last, self.lengths.shape[0] - 1), end_tile)

    @cute.jit
    def guess(self, state: DecodeState):
        """Return the tile where the next work tile probably begins. It is known before the sequence's length."""
        return state.tile + state.split * FIXED_SPLIT_TILES if self.fixed_splits > 0 else state.tile

    @cute.jit
    def work_tile(self, state: DecodeState, tiles, part, partials):
        """Return (first tile, end tile, split_idx, whether there is no work tile) of the next work tile.

        tiles     tiles of the sequence
        part      index of the part
        partials  capacity of the partial results
        """
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
