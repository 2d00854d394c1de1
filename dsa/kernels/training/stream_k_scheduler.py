"""The stream-K scheduler of the key gradient, where a CTA keeps the sums of some keys and the queries pass by.

A *span* is the q tiles of a launch that are of one sequence: neighbours, 128 queries each but for the last. Its flat
(query, head) columns make blocks of 64, numbered from its first one. A *key block*, `width` keys, is seen by the span's
column blocks from some number on to the last. All (key block, column block) pairs, key block after key block and span
after span, are a line, of which every CTA has an even range, whatever the lengths. A work tile is what a CTA's range
has of one key block's pairs. A key block whose pairs are divided gets partial sums: a CTA has two at most, of the key
block that its range begins within and of the one that it ends within.

The StreamKScheduler of dsa/kernels/mla divides queries that all count as equally many tiles, and only those behind its
full waves; here spans and key blocks have unequal numbers of pairs, and there are no full waves.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsa.cute.reductions import block_exclusive_scan
from dsa.cute.sm90 import WARP
from dsa.kernels.training.limits import Q_TILE
from dsa.kernels.training.q_tiles import COLUMN_BLOCK, SEQUENCE, load_q_tile


class Span(NamedTuple):
    """first, end: its q tiles; columns: all of them; column_blocks: of these; visible: keys that its last query sees;
    key_blocks: of these keys."""

    first: Int32
    end: Int32
    first_q: Int32
    first_k: Int32
    keys: Int32
    seen: Int32
    step: Int32
    columns: Int32
    column_blocks: Int32
    visible: Int32
    key_blocks: Int32


class CtaRange(NamedTuple):
    """What a CTA has of the line: the first q tile of the span that it begins in, where in the span's line it begins,
    and how many pairs it has."""

    first: Int32
    offset: Int32
    length: Int32


class SchedulerState(NamedTuple):
    """Where a CTA is: the first q tile of the span, the key block, the column block to go on with, -1 for the first
    that sees the key block, and how many pairs its range still has."""

    first: Int32
    key_block: Int32
    column_block: Int32
    left: Int32

    @property
    def is_valid(self):
        """Whether there is a work tile."""
        return self.left > 0


class WorkTileInfo(NamedTuple):
    """The column blocks from `column_block` on and below `end`, of a span's key block."""

    span: Span
    key_block: Int32
    column_block: Int32
    end: Int32


class StreamKScheduler:
    """Of index heads `heads`, a power of two up to 64, and key blocks of `width` keys."""

    def __init__(self, heads: int, width: int):
        self.heads, self.width = heads, width
        self.column_blocks_a_q_tile = Q_TILE * heads // COLUMN_BLOCK

    @cute.jit
    def first_column_block(self, seen, step, key):
        """The first column block of a span that sees `key`, if any does."""
        return cutlass.max(key - seen + 1, 0) * step * self.heads // COLUMN_BLOCK

    @cute.jit
    def load_span(self, q_tiles, first, lane) -> Span:
        """The span whose first q tile is number `first`. A warp's work."""
        count = q_tiles.shape[0]
        q_tile = load_q_tile(q_tiles, cutlass.min(first, count - 1))
        end, found = first, Int32(WARP)
        while found == WARP:
            own = end + lane
            same = Int32(0)
            if own < count:
                same = Int32(1) if q_tiles[own, SEQUENCE] == q_tile.sequence else Int32(0)
            # The lanes of this span come first.
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
            q_tile.first_q,
            q_tile.first_k,
            q_tile.keys,
            q_tile.seen,
            q_tile.step,
            columns,
            cute.ceil_div(columns, COLUMN_BLOCK),
            visible,
            cute.ceil_div(visible, self.width),
        )

    @cute.jit
    def cta_range(
        self, q_tiles, before, sums, found, cta, ctas, tid, threads: cutlass.Constexpr, warp, lane
    ) -> CtaRange:
        """The range of CTA number `cta`. All threads' work.

        before  Int32, one for each q tile, sums [32], zeros, found [3] of shared memory
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
                    column_blocks = cute.ceil_div(q_tile.rows * self.heads, COLUMN_BLOCK)
                    own = key_blocks * column_blocks
                    if key_blocks > 0:
                        # Of the key blocks that a q tile sees, its first rows may not see the last.
                        own -= self.first_column_block(q_tile.seen, q_tile.step, (key_blocks - 1) * self.width)
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
        return CtaRange(found[1], begin - before[found[1]], length)

    @cute.jit
    def first(self, q_tiles, own: CtaRange, lane) -> SchedulerState:
        """A warp's work, as `work_tile` is."""
        key_block, column_block = self.locate(self.load_span(q_tiles, own.first, lane), own.offset)
        return SchedulerState(own.first, key_block, column_block, own.length)

    @cute.jit
    def locate(self, span: Span, offset):
        """(key block, column block) of a place in a span's line."""
        # The key blocks that the span's first query sees count all column blocks.
        whole = span.key_blocks
        if span.step > 0:
            whole = cutlass.min((cutlass.max(span.seen, 0) + self.width - 1) // self.width, span.key_blocks)
        key_block, left = Int32(0), offset
        if span.column_blocks > 0:
            key_block = cutlass.min(offset // span.column_blocks, whole)
            left = offset - key_block * span.column_blocks
        looking = Int32(1)
        while looking == 1:
            length = span.column_blocks - self.first_column_block(span.seen, span.step, key_block * self.width)
            looking = Int32(0)
            if left >= length and key_block + 1 < span.key_blocks:
                left -= length
                key_block += 1
                looking = Int32(1)
        return key_block, self.first_column_block(span.seen, span.step, key_block * self.width) + left

    @cute.jit
    def work_tile(self, q_tiles, state: SchedulerState, lane) -> WorkTileInfo:
        """The column blocks of a key block up to the last, or as many as the CTA's range still has."""
        span = self.load_span(q_tiles, state.first, lane)
        first_seen = self.first_column_block(span.seen, span.step, state.key_block * self.width)
        column_block = first_seen if state.column_block < 0 else state.column_block
        end = cutlass.min(span.column_blocks, column_block + state.left)
        end = column_block if state.key_block >= span.key_blocks else end
        return WorkTileInfo(span, state.key_block, column_block, end)

    @cute.jit
    def advance(self, q_tiles, state: SchedulerState, work_tile: WorkTileInfo) -> SchedulerState:
        """The state behind a work tile."""
        span, left = work_tile.span, state.left - (work_tile.end - work_tile.column_block)
        first, key_block = span.first, work_tile.key_block + 1
        if key_block >= span.key_blocks:
            first, key_block = span.end, Int32(0)
        left = Int32(0) if first >= q_tiles.shape[0] else left
        return SchedulerState(first, key_block, Int32(-1), left)
