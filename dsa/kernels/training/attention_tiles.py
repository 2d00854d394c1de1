"""Tiles of dense attention over sequences that lie one after another: who computes which, and what is known of each."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from dsa.cute.pipeline import advance
from dsa.cute.reductions import warp_scan
from dsa.cute.shared_memory import store_16

# What is known of a tile: its blocks of keys, of which there are none behind the last tile; its first row and how many
# rows there are from it to the sequence's end; its head and that of its keys; the sequence's first key and how many
# there are; how many keys the tile's first row sees (further rows one more each, up to all); and how many rows of the
# last block of values are the sequence's.
BLOCKS, QUERY, ROW_COUNT, HEAD, KV_HEAD, KEY, KEY_COUNT, FIRST, VALUE_ROWS = range(9)
FIELDS = 9
FACTS = 2  # tiles of which that is known at a time


@dataclass(frozen=True)
class Schedule:
    """The tiles of all sequences and heads, by number: sequence after sequence, group of heads after group, from the
    last rows, which see the most keys, to the first, and a group's heads innermost.

    cu_q, cu_k  [B + 1] int32; counter: [1] int32, 0 at first, by which CTAs take their next tile
    heads, group, ratio, causal: query heads, those of a group, those of a KV head, and whether rows see only the keys
    up to their own place, counted from the end
    """

    cu_q: cute.Tensor
    cu_k: cute.Tensor
    counter: cute.Tensor
    heads: Int32
    group: Int32
    ratio: Int32
    causal: Int32
    rows: cutlass.Constexpr[int]
    keys: cutlass.Constexpr[int]

    @cute.jit
    def run(self, facts: cute.Tensor, full: cute.Pointer, empty: cute.Pointer, lane):
        """Publish the facts of this CTA's tiles, one after the other. A warp's work."""
        index, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        batch = self.cu_q.shape[0] - 1
        at, phase, more = Int32(0), Int32(0), Int32(1)
        sequence, before = Int32(0), Int32(0)
        while more > 0:
            # A CTA's numbers ascend: the sequence is not before that of the last tile.
            passed = Int32(32)
            while passed == 32:
                other = sequence + lane
                own = Int32(0)
                if other < batch:
                    own = cutlass.max(self.cu_q[other + 1] - self.cu_q[other], 0)
                    own = (own + self.rows - 1) // self.rows * self.heads
                end = before + warp_scan(own, lane)
                passed = cute.arch.popc(cute.arch.vote_ballot_sync(other < batch and end <= index))
                if passed > 0:
                    before = cute.arch.shuffle_sync(end, passed - 1)
                sequence += passed
            cute.arch.mbarrier_wait(empty + at, phase ^ 1)
            if sequence < batch:
                self.describe(facts, at, sequence, index - before, lane)
            else:
                more = Int32(0)
                if lane == 0:
                    facts[BLOCKS, at] = 0
            if lane == 0:
                cute.arch.mbarrier_arrive(full + at)
            at, phase = advance(at, phase, FACTS)
            if lane == 0:
                index = ctas + cute.arch.atomic_add(self.counter.iterator, Int32(1))
            index = cute.arch.shuffle_sync(index, 0)

    @cute.jit
    def describe(self, facts: cute.Tensor, at, sequence, local, lane):
        """Of tile number `local` of a sequence."""
        query, key = self.cu_q[sequence], self.cu_k[sequence]
        queries = self.cu_q[sequence + 1] - query
        keys = cutlass.max(self.cu_k[sequence + 1] - key, 0)
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
        # Where no row sees a key there is a block all the same, of which all is hidden.
        blocks = cutlass.max((seen + self.keys - 1) // self.keys, 1)
        value_rows = keys - (blocks - 1) * self.keys
        if seen <= 0:
            value_rows = Int32(0)
        if lane == 0:
            facts[BLOCKS, at], facts[QUERY, at], facts[ROW_COUNT, at] = blocks, query + row, count
            facts[HEAD, at], facts[KV_HEAD, at] = head, head // self.ratio
            facts[KEY, at], facts[KEY_COUNT, at], facts[FIRST, at] = key, keys, first
            facts[VALUE_ROWS, at] = value_rows


@cute.jit
def clear_values(values: cute.Tensor, stage, first, rows: cutlass.Constexpr[int], dim: cutlass.Constexpr[int], lane):
    """Zeros over the rows from `first` on of a stage of values [rows, dim, stage], which lie in blocks of 64 columns, a
    row's 128 bytes of a block after another's. A warp's work."""
    zero = Uint32(0)
    start = Int32(values.iterator.toint()) + stage * (rows * dim * 2)
    for block in cutlass.range_constexpr(dim // 64):
        for place in cutlass.range(first * 8 + lane, rows * 8, 32, unroll=1):
            store_16(start + block * (rows * 128) + place * 16, [zero, zero, zero, zero])
