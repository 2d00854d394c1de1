"""The dynamic persistent scheduler of dense attention over sequences that lie one after another.

A work tile is some query rows of a head, with the blocks of keys that one of them sees. Work tiles are numbered:
sequence after sequence, group of heads after group, from the last rows, which see the most keys, to the first, and a
group's heads innermost. CTAs draw numbers from a tile counter in global memory as they become free. One warp of a CTA
draws, and passes what the others need to know in a pipeline of two stages in shared memory.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsa.cute.pipeline import start
from dsa.cute.reductions import warp_inclusive_scan
from dsa.cute.sm90 import WARP
from dsa.cute.tile_counter import draw
from dsa.cute.work_tile import WorkTilePipeline


class WorkTileInfo(NamedTuple):
    """blocks: of keys, none behind the last work tile; query: its first; row_count: rows from there to the sequence's
    end; head, kv_head: its own, and that of its keys; key, key_count: the sequence's first key, and how many there are;
    first: how many keys the work tile's first row sees (further rows one more each, up to all); value_rows: how many
    rows of the last block of values are the sequence's."""

    blocks: Int32
    query: Int32
    row_count: Int32
    head: Int32
    kv_head: Int32
    key: Int32
    key_count: Int32
    first: Int32
    value_rows: Int32

    @staticmethod
    def last() -> "WorkTileInfo":
        """What comes behind the last work tile."""
        return WorkTileInfo(*(Int32(0) for _ in WorkTileInfo._fields))


@dataclass(frozen=True)
class MhaScheduler:
    """
    cu_q, cu_k    [B + 1] int32
    tile_counter  [1] int32, 0 at first
    heads, group, ratio, causal: query heads, those of a group, those of a KV head, and whether rows see only the keys
    up to their own place, counted from the end
    queries, kv_rows: how many rows there are of queries and of keys
    rows, keys    of a work tile, and of a block
    """

    cu_q: cute.Tensor
    cu_k: cute.Tensor
    tile_counter: cute.Tensor
    heads: Int32
    group: Int32
    ratio: Int32
    causal: Int32
    queries: Int32
    kv_rows: Int32
    rows: cutlass.Constexpr[int]
    keys: cutlass.Constexpr[int]

    @cute.jit
    def run(self, work_tiles: WorkTilePipeline, lane):
        """Pass on what is to be known of this CTA's work tiles, one after the other. A warp's work."""
        index, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        batch = self.cu_q.shape[0] - 1
        state, more = start(), Int32(1)
        sequence, before = Int32(0), Int32(0)
        while more > 0:
            # A CTA's numbers ascend: the sequence is not before that of the last work tile.
            passed = Int32(WARP)
            while passed == WARP:
                other = sequence + lane
                own = Int32(0)
                if other < batch:
                    _, own = span(self.cu_q, other, self.queries)
                    own = (own + self.rows - 1) // self.rows * self.heads
                end = before + warp_inclusive_scan(own, lane)
                passed = cute.arch.popc(cute.arch.vote_ballot_sync(other < batch and end <= index))
                if passed > 0:
                    before = cute.arch.shuffle_sync(end, passed - 1)
                sequence += passed
            work_tile = WorkTileInfo.last()
            if sequence < batch:
                work_tile = self.work_tile(sequence, index - before)
            else:
                more = Int32(0)
            state = work_tiles.publish(state, work_tile)
            index = ctas + draw(self.tile_counter, lane)

    @cute.jit
    def work_tile(self, sequence, local) -> WorkTileInfo:
        """Work tile number `local` of a sequence."""
        query, queries = span(self.cu_q, sequence, self.queries)
        key, keys = span(self.cu_k, sequence, self.kv_rows)
        tiles = (queries + self.rows - 1) // self.rows
        first_head = local // (tiles * self.group) * self.group
        local -= first_head * tiles
        together = cutlass.min(self.group, self.heads - first_head)
        row = (tiles - 1 - local // together) * self.rows
        head = first_head + local % together
        count = queries - row
        first, seen = keys, keys
        if self.causal > 0:
            first = row + keys - queries + 1
            seen = cutlass.min(keys, first + cutlass.min(count, self.rows) - 1)
        # Where no row sees a key there is a block all the same, of which all is masked.
        blocks = cutlass.max((seen + self.keys - 1) // self.keys, 1)
        value_rows = keys - (blocks - 1) * self.keys
        if seen <= 0:
            value_rows = Int32(0)
        return WorkTileInfo(
            blocks=blocks,
            query=query + row,
            row_count=count,
            head=head,
            kv_head=head // self.ratio,
            key=key,
            key_count=keys,
            first=first,
            value_rows=value_rows,
        )


@cute.jit
def span(bounds: cute.Tensor, sequence, rows: Int32):
    """(the first row, how many) of a sequence; none, if its bounds are not inside the rows that there are, or decrease:
    it then takes none of another sequence's."""
    first, end = bounds[sequence], bounds[sequence + 1]
    if first < 0 or end < first or end > rows:
        first, end = Int32(0), Int32(0)
    return first, end - first
