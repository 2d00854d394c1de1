"""Tiles of selected latents from an FP8 cache in shared memory, the bytes as they lie there, and the warp that loads.

A key comes whole, by one bulk copy. Where there is no key the warp writes zeros, whose scale is zero, too.

Layouts, d = 576: 512 e4m3 | 4 fp32 scales, of 128 each | 64 bf16, 656 bytes a key. d = 512: of a page P x (448 e4m3 |
64 bf16), then P x 8 bytes: 7 ue8m0 scales, of 64 each, which lie behind the tile's keys here, too. Keys are `pitch`
bytes apart, an odd multiple of 16 whose double is 8 banks and whose fourfold is 16: what is read together, channels of
two keys apart or of four, lies in different banks.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, Uint32, const_expr

from dsa.cute.gather import arrive_when_gathered_too, bulk_gather, gather_8, prefetch_to_l2
from dsa.cute.gathered_tiles import GatheredTiles, Selection
from dsa.cute.latent_tiles import FACTS, FIRST_TILE, LENGTH, PART, SEEN, TILE, TILES
from dsa.cute.ring import advance
from dsa.cute.shared_bytes import store_16

V32_BYTES, V4_BYTES, V4_ROW = 656, 584, 576


@dataclass(frozen=True)
class ByteRings:
    """Barriers, of each slot: full, empty; of the facts, as LatentRings has them. present [2, slots]: a bit for each
    key of the tile that is there."""

    full: cute.Pointer
    empty: cute.Pointer
    named: cute.Pointer
    facts_full: cute.Pointer
    facts_empty: cute.Pointer
    present: cute.Tensor
    facts: cute.Tensor


class ByteTiles(GatheredTiles):
    """Keys of `channels` numbers, 576 or 512, in a ring of `slots` tiles; queries of `rows` heads."""

    def __init__(self, channels: int, rows: int, slots: int):
        super().__init__(BFloat16, channels, slots, slots)
        self.rows, self.slots = rows, slots
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
            present: cute.struct.MemRange[Uint32, 2 * self.slots]
            facts: cute.struct.MemRange[Int32, 8 * FACTS]

        return RingStorage

    def rings(self, storage) -> ByteRings:
        return ByteRings(
            storage.full.data_ptr(),
            storage.empty.data_ptr(),
            storage.named.data_ptr(),
            storage.facts_full.data_ptr(),
            storage.facts_empty.data_ptr(),
            storage.present.get_tensor(cute.make_layout((2, self.slots))),
            storage.facts.get_tensor(cute.make_layout((8, FACTS))),
        )

    @cute.jit
    def init(self, rings: ByteRings):
        """Barriers; twelve warps read a slot, and facts. One thread's work."""
        for i in cutlass.range_constexpr(self.slots):
            cute.arch.mbarrier_init(rings.full + i, 1)
            cute.arch.mbarrier_init(rings.empty + i, 12)
        for i in cutlass.range_constexpr(FACTS):
            cute.arch.mbarrier_init(rings.named + i, 1)
            cute.arch.mbarrier_init(rings.facts_full + i, 1)
            cute.arch.mbarrier_init(rings.facts_empty + i, 12)

    @cute.jit
    def address_of(self, selection: Selection, page, offset):
        if const_expr(self.rope):
            return selection.cache[page, offset, None].iterator.toint()
        return selection.cache[page, 0, None].iterator.toint() + offset * V4_ROW

    @cute.jit
    def scales_of(self, selection: Selection, page, offset):
        """Where a key's scales begin, if they are not behind its numbers."""
        if const_expr(self.rope):
            return selection.cache.iterator.toint()
        start = selection.cache[page, 0, None].iterator.toint()
        return start + selection.cache.shape[1] * V4_ROW + offset * 8

    @cute.jit
    def request_row(self, q, query, first_row, warp, lane):
        """The next query's rows will be in the L2 cache when its turn comes."""
        for i in cutlass.range_constexpr(max(self.rows // 32, 1)):
            row = first_row + 32 * i + lane
            if 32 * i + lane < self.rows and row < q.shape[2]:
                prefetch_to_l2(Int64(q[query, 0, row, None].iterator.toint()), Int32(2 * self.channels))

    @cute.jit
    def load_piece(
        self,
        raw: Int32,
        rings: ByteRings,
        lists,
        counts,
        ends,
        query,
        first,
        tiles,
        part,
        address,
        present,
        warp,
        lane,
        state,
    ):
        """The tiles, to the slots at `raw`. The query's rows are not this warp's work."""
        slot, phase, _, _, at, facts_phase = state
        with cute.arch.elect_one():
            rings.facts[FIRST_TILE, at], rings.facts[TILES, at], rings.facts[PART, at] = first, tiles, part
            rings.facts[LENGTH, at], rings.facts[SEEN, at] = 0, 0
            cute.arch.mbarrier_arrive(rings.facts_full + at)
        at, facts_phase = advance(at, facts_phase, FACTS)
        low = self.index_of(lists, counts, ends, query, first, lane)
        high = self.index_of(lists, counts, ends, query, first, lane + 32)
        for tile in cutlass.range(first, first + tiles, unroll=1):
            low_address, low_scales, low_there = self.locate(lists, ends, tile, low)
            high_address, high_scales, high_there = self.locate(lists, ends, tile, high)
            # The next tile's indices are on their way while these keys are asked for.
            low = self.index_of(lists, counts, ends, query, tile + 1, lane)
            high = self.index_of(lists, counts, ends, query, tile + 1, lane + 32)
            low_bits = Uint32(cute.arch.vote_ballot_sync(low_there))
            high_bits = Uint32(cute.arch.vote_ballot_sync(high_there))
            target = raw + slot * self.slot_bytes
            cute.arch.mbarrier_wait(rings.empty + slot, phase ^ 1)
            if low_bits & high_bits != 0xFFFFFFFF:
                self.clear(target, low_bits, Int32(0), lane)
                self.clear(target, high_bits, Int32(32), lane)
                cute.arch.fence_proxy("async.shared", space="cta")
            if const_expr(not self.rope):
                gather_8(target + self.scales + lane * 8, low_scales, low_there)
                gather_8(target + self.scales + lane * 8 + 256, high_scales, high_there)
                arrive_when_gathered_too(rings.full + slot)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                rings.present[0, slot], rings.present[1, slot] = low_bits, high_bits
                keys = Int32(cute.arch.popc(low_bits)) + Int32(cute.arch.popc(high_bits))
                cute.arch.mbarrier_arrive_and_expect_tx(rings.full + slot, keys * self.row_bytes)
            cute.arch.sync_warp()
            if low_there:
                bulk_gather(target + lane * self.pitch, low_address, Int32(self.row_bytes), rings.full + slot)
            if high_there:
                place = target + (lane + 32) * self.pitch
                bulk_gather(place, high_address, Int32(self.row_bytes), rings.full + slot)
            slot, phase = advance(slot, phase, self.slots)
        return slot, phase, Int32(0), Int32(0), at, facts_phase

    @cute.jit
    def clear(self, target: Int32, bits: Uint32, first: Int32, lane):
        """Zeros where the keys from number `first` on, of which `bits` says which exist, are to be."""
        zeros = [Uint32(0)] * 4
        for key in cutlass.range(32, unroll=1):
            if (bits >> key) & 1 == 0:
                for i in cutlass.range_constexpr(2):
                    place = 16 * (lane + 32 * i)
                    if place < self.row_bytes:
                        store_16(target + (first + key) * self.pitch + place, zeros)
