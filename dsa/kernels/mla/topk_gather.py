"""Tiles of selected latents in shared memory: which of them a CTA works on, and the warpgroup that gathers them.

A query's tiles are its first list of keys, 64 by 64, then its second list. A CTA has whole queries in turns, and an
even share of the tiles of those that are too few for another turn.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from dsa.cute.copies import arrive_when_gathered, gather_16, prefetch_to_l2
from dsa.cute.pipeline import advance
from dsa.kernels.mla.mla_tiles import (
    CHUNK,
    FACTS,
    FIRST_TILE,
    LENGTH,
    PART,
    ROPE_AFTER,
    SEEN,
    TILE,
    TILES,
    UNIT_CHUNKS,
    UNIT_ORDER,
    VALUE,
    LatentMemory,
    LatentRings,
)

WARPGROUP = 128
WARP_KEYS = TILE // 4  # that a warp gathers of a tile


@dataclass(frozen=True)
class Selection:
    """A list of keys for each query. indices [T, K], negative or beyond the cache: no key; counts [T / group] how many
    of them count, if has_counts > 0; cache [pages, P, d], of page_size P keys a page."""

    cache: cute.Tensor
    indices: cute.Tensor
    counts: cute.Tensor
    has_counts: Int32
    page_size: cute.FastDivmodDivisorV2

    @cute.jit
    def count(self, query: Int32, group: cute.FastDivmodDivisorV2):
        """How many of the query's indices count."""
        count = self.indices.shape[1]
        if self.has_counts > 0:
            sequence, _ = divmod(query, group)
            count = cutlass.max(cutlass.min(self.counts[sequence], count), 0)
        return count


@dataclass(frozen=True)
class Share:
    """What CTA number `part` of `parts` does: the queries part, part + parts and so on, `rounds` of them. Of the
    queries behind these rounds, if there are any, the first `cut` CTAs have an even share of all tiles each, counted as
    if every query had `tiles`; `cut` is no more than there are.

    So a query may be cut: of its pieces in a share, which are two at most, the one with the query's first tile has the
    partial result 2 * part + 1, the other 2 * part.
    """

    part: Int32
    parts: Int32
    rounds: Int32
    queries: Int32
    tiles: Int32
    cut: Int32

    @cute.jit
    def bounds(self, part: Int32):
        """The first of its tiles among those of the queries behind the rounds."""
        return cutlass.min(part, self.cut) * ((self.queries - self.rounds * self.parts) * self.tiles) // self.cut

    @cute.jit
    def owner(self, tile: Int32):
        """The part that has this tile of them."""
        return ((tile + 1) * self.cut - 1) // ((self.queries - self.rounds * self.parts) * self.tiles)


@dataclass(frozen=True)
class TileMemory:
    """The slots of the rings."""

    units: cute.Tensor
    ropes: cute.Tensor


class GatheredTiles(LatentMemory):
    """Keys of `channels` numbers, 576 or 512, as they are attended to. 16 bytes a lane, 8 lanes a key."""

    def __init__(self, dtype: type[cutlass.Numeric], channels: int, units: int, ropes: int):
        super().__init__(dtype, units, ropes)
        self.channels, self.rope = channels, channels > VALUE

    @cute.jit
    def init_gathered(self, rings: LatentRings, readers: cutlass.Constexpr = 12):
        """A chunk is there when all lanes have it; so is a rope part, and each warp has said which keys there are."""
        self.init(rings, WARPGROUP, WARPGROUP + 4 if self.rope else 4, readers)

    @cute.jit
    def load(self, q, memory: TileMemory, rings: LatentRings, lists, group, share: Share, first_row, warp, lane):
        """The loading warpgroup: all pieces of this CTA, and the end. lists: one Selection or two."""
        state = (Int32(0), Int32(0), Int32(0), Int32(0), Int32(0), Int32(0))
        first_cut = share.rounds * share.parts
        query, turn, tile, left = share.part, Int32(0), Int32(0), Int32(0)
        if first_cut < share.queries:
            tile = share.bounds(share.part)
            left = share.bounds(share.part + 1) - tile
        more = (share.rounds > 0 and query < share.queries) or left > 0
        while more:
            if turn == share.rounds:
                query, tile = first_cut + tile // share.tiles, tile % share.tiles
            if warp == 0:
                self.name(rings, query, state[4], state[5])
            counts = [selection.count(query, group) for selection in lists]
            ends = [(count + TILE - 1) // TILE for count in counts]
            all_tiles = ends[0] if const_expr(len(lists) == 1) else ends[0] + ends[1]
            # A query without keys has a tile of none: so every piece that is a whole query has one.
            all_tiles = cutlass.max(all_tiles, 1)
            first, end, part, following = Int32(0), all_tiles, Int32(-1), query + share.parts
            if turn >= share.rounds:
                taken = cutlass.min(share.tiles - tile, left)
                first, end = cutlass.min(tile, all_tiles), cutlass.min(tile + taken, all_tiles)
                if taken < share.tiles:
                    part = 2 * share.part
                    if tile == 0:
                        part += 1
                left -= taken
                tile, following = Int32(0), query + 1
            turn += 1
            more = left > 0
            if turn < share.rounds:
                more = following < share.queries
            if more and following < share.queries:
                self.request_row(q, following, first_row, warp, lane)
            state = self.load_piece(
                q, memory, rings, lists, counts, ends, query, first, end - first, part, first_row, warp, lane, state
            )
            query = following
        if warp == 0:
            self.name(rings, Int32(-1), state[4], state[5])
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(rings.facts_full + state[4])

    @cute.jit
    def request_row(self, q, query, first_row, warp, lane):
        """The next query's rows will be in the L2 cache when its turn comes."""
        address, present = self.locate_row(q, query, first_row, warp, lane)
        if lane < WARP_KEYS and present:
            prefetch_to_l2(address, Int32(2 * self.channels))

    @cute.jit
    def locate_row(self, q, query, first_row, warp, lane):
        """(address, whether there is such a row) of row lane % 16 of those that this warp gathers of a query."""
        row = first_row + warp * WARP_KEYS + lane % WARP_KEYS
        return q[query, 0, cutlass.min(row, q.shape[2] - 1), None].iterator.toint(), row < q.shape[2]

    @cute.jit
    def index_of(self, lists, counts, ends, query, tile, key):
        """The index of a tile's key; -1: there is none."""
        place = tile * TILE + key
        index = Int32(-1)
        if place < counts[0]:
            index = lists[0].indices[query, place]
        if const_expr(len(lists) == 2):
            if tile >= ends[0]:
                index = Int32(-1)
                if place - ends[0] * TILE < counts[1]:
                    index = lists[1].indices[query, place - ends[0] * TILE]
        return index

    @cute.jit
    def locate(self, lists, ends, tile, index):
        """(address, its scales' address, whether it is there) of a tile's key of this index."""
        address, scales, present = self.find(lists[0], index)
        if const_expr(len(lists) == 2):
            if tile >= ends[0]:
                address, scales, present = self.find(lists[1], index)
        return address, scales, present

    @cute.jit
    def find(self, selection: Selection, index):
        page, offset = divmod(cutlass.max(index, 0), selection.page_size)
        present = index >= 0 and page < selection.cache.shape[0]
        address = Int64(selection.cache.iterator.toint())
        scales = address
        if present:
            address = Int64(self.address_of(selection, page, offset))
            scales = Int64(self.scales_of(selection, page, offset))
        return address, scales, present

    @cute.jit
    def address_of(self, selection: Selection, page, offset):
        """Where a key begins."""
        return selection.cache[page, offset, None].iterator.toint()

    @cute.jit
    def scales_of(self, selection: Selection, page, offset):
        """Where its scales begin, if it has any."""
        return selection.cache.iterator.toint()

    @cute.jit
    def spread(self, address: Int64, bits: Uint32, lane):
        """From an address of each key, those of 8 lanes a key, 16 bytes apart: (addresses, which keys exist), four."""
        sources, keep = [], []
        low, high = Int32(address & 0xFFFFFFFF), Int32(address >> 32)
        for i in cutlass.range_constexpr(WARP_KEYS // 4):
            key = 4 * i + lane // 8
            own_low, own_high = cute.arch.shuffle_sync(low, key), cute.arch.shuffle_sync(high, key)
            sources.append((Int64(own_high) << 32) + Int64(Uint32(own_low)) + lane % 8 * 16)
            keep.append((bits >> key) & 1 != 0)
        return sources, keep

    @cute.jit
    def load_piece(
        self,
        q,
        memory: TileMemory,
        rings: LatentRings,
        lists,
        counts,
        ends,
        query,
        first,
        tiles,
        part,
        first_row,
        warp,
        lane,
        state,
    ):
        """The query's rows from first_row on, and then the tiles."""
        unit, unit_phase, rope, rope_phase, at, facts_phase = state
        if warp == 0:
            with cute.arch.elect_one():
                rings.facts[FIRST_TILE, at], rings.facts[TILES, at], rings.facts[PART, at] = first, tiles, part
                rings.facts[LENGTH, at], rings.facts[SEEN, at] = 0, 0
                cute.arch.mbarrier_arrive(rings.facts_full + at)
        at, facts_phase = advance(at, facts_phase, FACTS)
        own = warp * WARP_KEYS + lane % WARP_KEYS
        index = self.index_of(lists, counts, ends, query, first, own)
        address, present = self.locate_row(q, query, first_row, warp, lane)
        for tile in cutlass.range(first - 1, first + tiles, unroll=1):
            if tile >= first:
                address, _, present = self.locate(lists, ends, tile, index)
                # The next tile's indices are on their way while these keys are asked for.
                index = self.index_of(lists, counts, ends, query, tile + 1, own)
            bits = Uint32(cute.arch.vote_ballot_sync(present)) & 0xFFFF
            sources, keep = self.spread(address, bits, lane)
            for n, number in enumerate(UNIT_ORDER):
                cute.arch.mbarrier_wait(rings.unit_empty + unit, unit_phase ^ 1)
                for c in cutlass.range_constexpr(UNIT_CHUNKS):
                    self.gather(
                        memory.units, unit * UNIT_CHUNKS + c, sources, keep, number * UNIT_CHUNKS + c, warp, lane
                    )
                    arrive_when_gathered(rings.unit_full + (unit * UNIT_CHUNKS + c))
                unit, unit_phase = advance(unit, unit_phase, self.units)
                if const_expr(n == ROPE_AFTER - 1):
                    cute.arch.mbarrier_wait(rings.rope_empty + rope, rope_phase ^ 1)
                    if const_expr(self.rope):
                        self.gather(memory.ropes, rope, sources, keep, VALUE // CHUNK, warp, lane)
                        arrive_when_gathered(rings.rope_full + rope)
                    with cute.arch.elect_one():
                        rings.present[warp, rope] = bits
                        cute.arch.mbarrier_arrive(rings.rope_full + rope)
                    rope, rope_phase = advance(rope, rope_phase, self.ropes)
        return unit, unit_phase, rope, rope_phase, at, facts_phase

    @cute.jit
    def gather(self, slots, place, sources, keep, chunk: cutlass.Constexpr, warp, lane):
        """A chunk of 64 channels of this warp's keys, to chunk number `place` of a ring."""
        start = Int32(slots.iterator.toint()) + 2 * CHUNK * (place * TILE + warp * WARP_KEYS + lane // 8)
        for i in cutlass.range_constexpr(WARP_KEYS // 4):
            row = 4 * (i % 2) + lane // 8  # of 8
            gather_16(start + 2 * (4 * i * CHUNK + (lane % 8 ^ row) * 8), sources[i] + 2 * CHUNK * chunk, keep[i])
