"""The dynamic persistent scheduler of dense attention over packed (varlen) sequences.

A work tile is a tile of query rows of one head, with all KV blocks that any of these rows sees. Work tiles
are numbered sequence by sequence and, in a sequence, by groups of heads. In a group, row tiles run from the
last rows, which see the most keys, to the first, and heads vary fastest.

A CTA that becomes free takes the next number from a tile counter in global memory. One warp per CTA fetches
numbers and publishes each WorkTileInfo to the other warps through a two-stage pipeline in shared memory.
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
    """What the other warps need to know of a work tile.

    blocks         KV blocks; 0 after the last work tile
    query          the first query row
    row_count      query rows from `query` to the end of the sequence
    head, kv_head  query head, and the KV head that it reads
    key            first key of the sequence
    key_count      keys of the sequence
    first          keys that the first query row sees; each further row sees one more, up to key_count
    value_rows     valid V rows from the start of the last block on; rows beyond them must be zero-filled
    """

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
        """Return the end marker, published after the last work tile."""
        return WorkTileInfo(*(Int32(0) for _ in WorkTileInfo._fields))


@dataclass(frozen=True)
class MhaScheduler:
    """Finds the work tiles of a CTA.

    cu_q, cu_k        [B + 1] int32
    tile_counter      [1] int32, 0 at launch
    heads             query heads
    group             query heads per group
    ratio             query heads per KV head
    causal            > 0: a row sees keys up to its position, with queries aligned to the end of the keys
    queries, kv_rows  total rows of Q and of K
    rows, keys        query rows of a work tile, keys of a block
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
        """Publish this CTA's work tiles, one after the other; called by a warp."""
        index, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        batch = self.cu_q.shape[0] - 1
        state, more = start(), Int32(1)
        sequence, before = Int32(0), Int32(0)
        while more > 0:
            # A CTA's work-tile numbers increase, so the search resumes at the last work tile's sequence.
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
        """Return work tile number `local` of a sequence."""
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
        # A work tile whose rows see no key still gets one block, which is fully masked.
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
    """Return (first row, number of rows) of a sequence.

    A sequence whose bounds decrease or exceed `rows` counts as empty, so that it never touches rows of other
    sequences.
    """
    first, end = bounds[sequence], bounds[sequence + 1]
    if first < 0 or end < first or end > rows:
        first, end = Int32(0), Int32(0)
    return first, end - first
