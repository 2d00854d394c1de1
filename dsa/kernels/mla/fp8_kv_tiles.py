"""Tiles of selected latents from an FP8 cache in shared memory, the bytes as they lie there, and the warps that load.

A key comes whole, by one bulk copy, which costs the warp that asks for it 30 clocks: four warps have 16 keys of a tile
each. Where there is no key the warp writes zeros, whose scale is zero, too.

Layouts, d = 576: 512 e4m3 | 4 fp32 scales, of 128 each | 64 bf16, 656 bytes a key. d = 512: of a page P x (448 e4m3 |
64 bf16), then P x 8 bytes: 7 ue8m0 scales, of 64 each, which lie behind the tile's keys here, too. Keys are `pitch`
bytes apart, an odd multiple of 16 whose double is 8 banks and whose fourfold is 16: what is read together, channels of
two keys apart or of four, lies in different banks.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, Uint32, const_expr

from dsa.cute.copies import arrive_when_gathered_too, bulk_gather, gather_8, prefetch_to_l2
from dsa.cute.pipeline import advance
from dsa.cute.shared_memory import store_16
from dsa.kernels.mla.mla_tiles import FACTS, FIRST_TILE, LENGTH, PART, SEEN, TILE, TILES
from dsa.kernels.mla.topk_gather import WARP_KEYS, GatheredTiles, Selection

V32_BYTES, V4_BYTES, V4_ROW = 656, 584, 576


@dataclass(frozen=True)
class ByteRings:
    """Barriers, of each slot: full, empty; of the facts, as LatentRings has them. present [4, slots]: 16 bits for as
    many keys of the tile: which are there."""

    full: cute.Pointer
    empty: cute.Pointer
    named: cute.Pointer
    facts_full: cute.Pointer
    facts_empty: cute.Pointer
    present: cute.Tensor
    facts: cute.Tensor


class ByteTiles(GatheredTiles):
    """Keys of `channels` numbers, 576 or 512, in a ring of `slots` tiles; queries of `rows` heads; `scorers` warpgroups
    take the tiles in turns, and two all of them."""

    def __init__(self, channels: int, rows: int, slots: int, scorers: int):
        super().__init__(BFloat16, channels, slots, slots)
        self.rows, self.slots, self.scorers = rows, slots, scorers
        # A query's rows come before its keys, by the same slots.
        self.query_rows = min(rows, TILE // 2)  # of a slot
        self.query_slots = rows // self.query_rows
        self.row_bytes, self.pitch = (V32_BYTES, V32_BYTES) if self.rope else (V4_ROW, V4_ROW + 16)
        # Behind the keys of a slot.
        self.scales = TILE * self.pitch
        self.slot_bytes = self.scales + (0 if self.rope else TILE * 8)

    def storage(self) -> type:
        @cute.struct
        class RingStorage:
            full: cute.struct.MemRange[Int64, self.slots]
            empty: cute.struct.MemRange[Int64, self.slots]
            named: cute.struct.MemRange[Int64, FACTS]
            facts_full: cute.struct.MemRange[Int64, FACTS]
            facts_empty: cute.struct.MemRange[Int64, FACTS]
            present: cute.struct.MemRange[Uint32, 4 * self.slots]
            facts: cute.struct.MemRange[Int32, 8 * FACTS]

        return RingStorage

    def rings(self, storage) -> ByteRings:
        return ByteRings(
            storage.full.data_ptr(),
            storage.empty.data_ptr(),
            storage.named.data_ptr(),
            storage.facts_full.data_ptr(),
            storage.facts_empty.data_ptr(),
            storage.present.get_tensor(cute.make_layout((4, self.slots))),
            storage.facts.get_tensor(cute.make_layout((8, FACTS))),
        )

    @cute.jit
    def init(self, rings: ByteRings):
        """Barriers; four warps fill a slot, twelve read it. One thread's work."""
        for i in cutlass.range_constexpr(self.slots):
            cute.arch.mbarrier_init(rings.full + i, 4)
            cute.arch.mbarrier_init(rings.empty + i, 12)
        for i in cutlass.range_constexpr(FACTS):
            cute.arch.mbarrier_init(rings.named + i, 1)
            cute.arch.mbarrier_init(rings.facts_full + i, 1)
            cute.arch.mbarrier_init(rings.facts_empty + i, 4 * self.scorers + 8)

    @cute.jit
    def position(self, count: Int32):
        """(slot, phase) of the ring of tiles after so many."""
        return count % self.slots, count // self.slots & 1

    @cute.jit
    def address_of(self, selection: Selection, page, offset):
        if const_expr(self.rope):
            return selection.cache[page, offset, None].iterator.toint()
        return selection.cache[page, 0, None].iterator.toint() + Int64(offset) * V4_ROW

    @cute.jit
    def scales_of(self, selection: Selection, page, offset):
        """Where a key's scales begin, if they are not behind its numbers."""
        if const_expr(self.rope):
            return selection.cache.iterator.toint()
        start = selection.cache[page, 0, None].iterator.toint()
        return start + Int64(selection.cache.shape[1]) * V4_ROW + Int64(offset) * 8

    @cute.jit
    def request_row(self, q, query, first_row, warp, lane):
        """The next query's rows will be in the L2 cache when its turn comes."""
        own = warp * WARP_KEYS + lane
        if lane < WARP_KEYS and own < self.rows and first_row + own < q.shape[2]:
            prefetch_to_l2(Int64(q[query, 0, first_row + own, None].iterator.toint()), Int32(2 * self.channels))

    @cute.jit
    def load_piece(
        self,
        q,
        raw: Int32,
        rings: ByteRings,
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
        """The query's rows and then the tiles, to the slots at `raw`. Rows that are none are left out."""
        slot, phase, _, _, at, facts_phase = state
        if warp == 0:
            with cute.arch.elect_one():
                rings.facts[FIRST_TILE, at], rings.facts[TILES, at], rings.facts[PART, at] = first, tiles, part
                rings.facts[LENGTH, at], rings.facts[SEEN, at] = 0, 0
                cute.arch.mbarrier_arrive(rings.facts_full + at)
        at, facts_phase = advance(at, facts_phase, FACTS)
        own = warp * WARP_KEYS + lane % WARP_KEYS
        index = self.index_of(lists, counts, ends, query, first, own)
        for i in cutlass.range_constexpr(self.query_slots):
            target = raw + slot * self.slot_bytes
            cute.arch.mbarrier_wait(rings.empty + slot, phase ^ 1)
            self.request_rows(q, query, first_row + i * self.query_rows, target, rings.full + slot, warp, lane)
            slot, phase = advance(slot, phase, self.slots)
        for tile in cutlass.range(first, first + tiles, unroll=1):
            source, scales, there = self.locate(lists, ends, tile, index)
            # The next tile's indices are on their way while these keys are asked for.
            index = self.index_of(lists, counts, ends, query, tile + 1, own)
            bits = Uint32(cute.arch.vote_ballot_sync(there)) & 0xFFFF
            target = raw + slot * self.slot_bytes
            cute.arch.mbarrier_wait(rings.empty + slot, phase ^ 1)
            if bits != 0xFFFF:
                self.clear(target + warp * WARP_KEYS * self.pitch, bits, lane)
            if const_expr(not self.rope):
                if lane < WARP_KEYS:
                    gather_8(target + self.scales + own * 8, scales, there)
                arrive_when_gathered_too(rings.full + slot)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                rings.present[warp, slot] = bits
                keys = Int32(cute.arch.popc(bits))
                cute.arch.mbarrier_arrive_and_expect_tx(rings.full + slot, keys * self.row_bytes)
            cute.arch.sync_warp()
            if there and lane < WARP_KEYS:
                bulk_gather(target + own * self.pitch, source, Int32(self.row_bytes), rings.full + slot)
            slot, phase = advance(slot, phase, self.slots)
        return slot, phase, Int32(0), Int32(0), at, facts_phase

    @cute.jit
    def request_rows(self, q, query, first_row, target: Int32, full: cute.Pointer, warp, lane):
        """The slot's rows of a query, from first_row on."""
        each = self.query_rows // 4
        row = warp * each + lane
        there = lane < each and first_row + row < q.shape[2]
        rows = Int32(cute.arch.popc(cute.arch.vote_ballot_sync(there)))
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, rows * (2 * self.channels))
        cute.arch.sync_warp()
        if there:
            source = Int64(q[query, 0, first_row + row, None].iterator.toint())
            bulk_gather(target + row * (2 * self.channels), source, Int32(2 * self.channels), full)

    @cute.jit
    def clear(self, target: Int32, bits: Uint32, lane):
        """Zeros where the warp's keys, of which `bits` says which exist, are to be."""
        zeros = [Uint32(0)] * 4
        for key in cutlass.range(WARP_KEYS, unroll=1):
            if (bits >> key) & 1 == 0:
                for i in cutlass.range_constexpr(2):
                    place = 16 * (lane + 32 * i)
                    if place < self.row_bytes:
                        store_16(target + key * self.pitch + place, zeros)
        # Bulk copies may write to the same place later.
        cute.arch.fence_proxy("async.shared", space="cta")
