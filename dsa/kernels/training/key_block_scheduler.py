"""The stream-K scheduler of the key gradient (indexer_key_grad_sm90.py). The gradient of a block of keys is a sum over
all queries that see these keys.

- A *span* is the q tiles (q_tiles.py) of one sequence in a launch. These q tiles are adjacent and have 128 queries
  each; the last one can have fewer.
- A *column block* is 64 of the span's flattened (query, head) pairs.
- A *key block* is `width` keys. The span's column blocks from `first_column_block` to the last one see the key block:
  each of them has a query that sees the key block's first key.
- The work is the list of all (key block, column block) pairs in which the column block sees the key block, ordered by
  span, then key block, then column block. Each CTA gets a range of the list. The ranges differ in length by at most one
  pair, whatever the lengths of the sequences are.
- A work tile is the part of a CTA's range that belongs to one key block. If several CTAs share a key block, each of
  them writes partial sums of it. A CTA writes at most two sets of partial sums, for the first and the last key block of
  its range.

The StreamKScheduler of dsa/kernels/mla is simpler: all queries have the same number of tiles, and it splits only the
queries after its full waves.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsa.cute.reductions import block_exclusive_scan
from dsa.cute.sm90 import WARP
from dsa.kernels.training.limits import Q_TILE
from dsa.kernels.training.q_tiles import COLUMN_BLOCK, SEQUENCE, QTile, load_q_tile


class Span(NamedTuple):
    """The q tiles of one sequence in a launch.

    first, end       the span has the q tiles `first` to `end` - 1
    q_tile           the span's first q tile
    columns          number of (query, head) pairs
    column_blocks    number of column blocks
    visible          number of keys that the span's last query sees; no query of the span sees more
    key_blocks       number of key blocks of these `visible` keys
    """

    first: Int32
    end: Int32
    q_tile: QTile
    columns: Int32
    column_blocks: Int32
    visible: Int32
    key_blocks: Int32


class SchedulerState(NamedTuple):
    """The next work tile of a CTA.

    first         index of the first q tile of the work tile's span
    key_block     key block of the work tile
    column_block  first column block of the work tile, or -1 for the first one that sees the key block
    left          number of (key block, column block) pairs left in the CTA's range, including this work tile's
    """

    first: Int32
    key_block: Int32
    column_block: Int32
    left: Int32

    @property
    def is_valid(self):
        return self.left > 0


class WorkTileInfo(NamedTuple):
    """The column blocks `column_block` to `end` - 1 of a span, with one of the span's key blocks."""

    span: Span
    key_block: Int32
    column_block: Int32
    end: Int32


class KeyBlockScheduler:
    """The scheduler described above. heads: number of index heads, a power of two up to 64. width: keys per key
    block."""

    def __init__(self, heads: int, width: int):
        self.heads, self.width = heads, width
        self.column_blocks_a_q_tile = Q_TILE * heads // COLUMN_BLOCK

    @cute.jit
    def first_column_block(self, q_tile: QTile, key):
        """Return the first column block that sees `key`, counted from the first column block of `q_tile`. The result is
        meaningless if no column block sees the key."""
        return cutlass.max(key - q_tile.seen + 1, 0) * q_tile.step * self.heads // COLUMN_BLOCK

    @cute.jit
    def load_span(self, q_tiles, first, lane) -> Span:
        """Load and return the span whose first q tile is `first`. The span has no columns if `first` is past the last q
        tile, or if q tile `first` is unused. Called by a whole warp."""
        count = q_tiles.shape[0]
        q_tile = load_q_tile(q_tiles, cutlass.min(first, count - 1))
        end, found = first, Int32(WARP)
        while found == WARP:
            own = end + lane
            same = Int32(0)
            if own < count:
                same = Int32(1) if q_tiles[own, SEQUENCE] == q_tile.sequence else Int32(0)
            # The span's q tiles are adjacent, so if `found` lanes have one, these are the lowest lanes.
            found = cute.arch.popc(cute.arch.vote_ballot_sync(same == 1))
            end += found
        last = load_q_tile(q_tiles, cutlass.max(end - 1, 0))
        columns = ((end - first - 1) * Q_TILE + last.rows) * self.heads
        visible = last.visible(last.rows - 1)
        if first >= count or last.rows <= 0:
            columns, visible = Int32(0), Int32(0)
        return Span(
            first,
            end,
            q_tile,
            columns,
            cute.ceil_div(columns, COLUMN_BLOCK),
            visible,
            cute.ceil_div(visible, self.width),
        )

    @cute.jit
    def cta_range(self, q_tiles, before, sums, found, cta, ctas, tid, threads: cutlass.Constexpr, warp, lane):
        """Compute the range of CTA `cta` in the list of pairs. Called by all threads of the CTA. -> (the index of the
        first q tile of the span in which the range begins; the number of the span's pairs before the range; the range's
        number of pairs).

        before  Int32 scratch in shared memory, one number per q tile
        sums    Int32 [32] scratch in shared memory, zeroed by the caller
        found   Int32 scratch in shared memory, at least [2]
        """
        count = q_tiles.shape[0]
        total = Int32(0)
        for first in cutlass.range(0, count, threads, unroll=1):
            own = Int32(0)
            index = first + tid
            if index < count:
                q_tile = load_q_tile(q_tiles, index)
                if q_tile.rows > 0:
                    key_blocks = cute.ceil_div(q_tile.visible(q_tile.rows - 1), self.width)
                    own = key_blocks * cute.ceil_div(q_tile.rows * self.heads, COLUMN_BLOCK)
                    if key_blocks > 0:
                        # The rows of a q tile differ by at most 127 visible keys, fewer than a key block. So all
                        # column blocks of the q tile see all key blocks except perhaps the last one.
                        own -= self.first_column_block(q_tile, (key_blocks - 1) * self.width)
            ahead, of_all = block_exclusive_scan(own, sums, lane, warp)
            if index < count:
                before[index] = total + ahead
            total += of_all
            cute.arch.sync_threads()
        begin = total // ctas * cta + cutlass.min(total % ctas, cta)
        length = total // ctas + (Int32(1) if cta < total % ctas else Int32(0))
        if tid == 0:
            found[0] = 0
            found[1] = 0
        cute.arch.sync_threads()
        for first in cutlass.range(0, count, threads, unroll=1):
            index = first + tid
            if index < count:
                following = total
                if index + 1 < count:
                    following = before[index + 1]
                if before[index] <= begin and begin < following:
                    found[0] = q_tiles[index, SEQUENCE]
        cute.arch.sync_threads()
        for first in cutlass.range(0, count, threads, unroll=1):
            index = first + tid
            if index < count:
                if q_tiles[index, SEQUENCE] == found[0]:
                    previous = Int32(-2)
                    if index > 0:
                        previous = q_tiles[index - 1, SEQUENCE]
                    if previous != found[0]:
                        found[1] = index
        cute.arch.sync_threads()
        return found[1], begin - before[found[1]], length

    @cute.jit
    def first(self, q_tiles, own, lane) -> SchedulerState:
        """Return the state before the first work tile. own: the result of `cta_range`. Called by a whole warp, like
        `work_tile`."""
        first, left, length = own
        span = self.load_span(q_tiles, first, lane)
        # All column blocks see the first `whole` key blocks, because the span's first query sees a part of each of
        # these key blocks.
        whole = span.key_blocks
        if span.q_tile.step > 0:
            whole = cutlass.min((cutlass.max(span.q_tile.seen, 0) + self.width - 1) // self.width, span.key_blocks)
        key_block = Int32(0)
        if span.column_blocks > 0:
            key_block = cutlass.min(left // span.column_blocks, whole)
            left -= key_block * span.column_blocks
        looking = Int32(1)
        while looking == 1:
            count = span.column_blocks - self.first_column_block(span.q_tile, key_block * self.width)
            looking = Int32(0)
            if left >= count and key_block + 1 < span.key_blocks:
                left -= count
                key_block += 1
                looking = Int32(1)
        column_block = self.first_column_block(span.q_tile, key_block * self.width) + left
        return SchedulerState(first, key_block, column_block, length)

    @cute.jit
    def work_tile(self, q_tiles, state: SchedulerState, lane) -> WorkTileInfo:
        """Return the work tile of a state: column blocks of the state's key block, from the state's column block on.
        They end at the span's last column block, or earlier if the CTA's range ends earlier."""
        span = self.load_span(q_tiles, state.first, lane)
        first_seen = self.first_column_block(span.q_tile, state.key_block * self.width)
        column_block = first_seen if state.column_block < 0 else state.column_block
        end = cutlass.min(span.column_blocks, column_block + state.left)
        end = column_block if state.key_block >= span.key_blocks else end
        return WorkTileInfo(span, state.key_block, column_block, end)

    @cute.jit
    def advance(self, q_tiles, state: SchedulerState, work_tile: WorkTileInfo) -> SchedulerState:
        span, left = work_tile.span, state.left - (work_tile.end - work_tile.column_block)
        first, key_block = span.first, work_tile.key_block + 1
        if key_block >= span.key_blocks:
            first, key_block = span.end, Int32(0)
        left = Int32(0) if first >= q_tiles.shape[0] else left
        return SchedulerState(first, key_block, Int32(-1), left)
