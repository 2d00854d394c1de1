"""Tiles of selected latents from an FP8 cache: the warpgroup that gathers bytes and turns them into bf16.

Each warp has its 16 keys of a tile to itself. It asks for bytes by cp.async, into memory of its own that has room for a
tile; what it turns into bf16 and stores as wgmma reads it makes room for the same part of the next tile, so that every
load has the time of a tile. 16 bytes of a key a lane; product with the scale in fp32, rounded once.

Layouts, d = 576: 512 e4m3 | 4 fp32 scales, of 128 each | 64 bf16, 656 bytes a key. d = 512: of a page P x (448 e4m3 |
64 bf16), then P x 8 bytes: 7 ue8m0 scales, of 64 each. Memory of a warp: 128 bytes a key for each unit and for the
bf16, and twice 16 a key for scales.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr

from dsa.cute.fp8_rows import dequantize_16, ue8m0_scale
from dsa.cute.gather import arrive_when_gathered_too, gather_8, gather_16
from dsa.cute.gathered_tiles import WARP_KEYS, GatheredTiles, Selection, TileMemory
from dsa.cute.latent_tiles import (
    CHUNK,
    FACTS,
    FIRST_TILE,
    LENGTH,
    PART,
    ROPE_AFTER,
    SEEN,
    TILE,
    TILES,
    UNIT,
    UNIT_CHUNKS,
    UNIT_ORDER,
    VALUE,
    LatentRings,
)
from dsa.cute.register_pressure import computed_here
from dsa.cute.ring import advance
from dsa.cute.shared_bytes import load_16, load_byte, load_float, store_16

PART_BYTES = WARP_KEYS * UNIT
SCALE_BYTES = WARP_KEYS * 16
ROPE_PART, SCALES = 4, 5  # parts of a warp's memory, after those of the units
RAW_BYTES = 4 * (5 * PART_BYTES + 2 * SCALE_BYTES)
V32_BYTES, V4_BYTES, V4_ROW, V4_NOPE = 656, 584, 576, 448


class QuantizedTiles(GatheredTiles):
    """Keys of `channels` numbers, 576 or 512: see above for what follows from it."""

    raw_bytes = RAW_BYTES
    # A fence behind the stores would wait for all loads under way.
    readers_fence = True

    def __init__(self, channels: int, units: int, ropes: int):
        super().__init__(BFloat16, channels, units, ropes)
        # What is loaded and turned together.
        self.steps: list[int] = list(UNIT_ORDER)
        if self.rope:
            self.steps.insert(ROPE_AFTER, ROPE_PART)

    @cute.jit
    def init_gathered(self, rings: LatentRings):
        """Each warp says that its keys are there."""
        self.init(rings, 4, 4)

    @cute.jit
    def address_of(self, selection: Selection, page, offset):
        """Where a key's bytes begin."""
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
    def load_piece(
        self,
        memory: TileMemory,
        rings: LatentRings,
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
        unit, unit_phase, rope, rope_phase, at, facts_phase = state
        raw = Int32(memory.raw.toint()) + warp * (5 * PART_BYTES + 2 * SCALE_BYTES)
        if warp == 0:
            with cute.arch.elect_one():
                rings.facts[FIRST_TILE, at], rings.facts[TILES, at], rings.facts[PART, at] = first, tiles, part
                rings.facts[LENGTH, at], rings.facts[SEEN, at] = 0, 0
                cute.arch.mbarrier_arrive(rings.facts_full + at)
        at, facts_phase = advance(at, facts_phase, FACTS)

        # The first tile's bytes are on their way while the query's rows are asked for.
        index = self.index_of(lists, counts, ends, query, first, warp, lane)
        source, scales, exists = self.locate(lists, ends, first, index)
        index = self.index_of(lists, counts, ends, query, first + 1, warp, lane)
        bits = Uint32(cute.arch.vote_ballot_sync(exists)) & 0xFFFF
        if tiles > 0:
            self.request_scales(raw, source, scales, bits, Int32(0), lane)
            for step in self.steps:
                self.request(raw, source, bits, step, lane)
        unit, unit_phase, rope, rope_phase = self.load_queries(
            memory, rings, address, present, unit, unit_phase, rope, rope_phase, warp, lane
        )
        for tile in cutlass.range(first, first + tiles, unroll=1):
            lane = computed_here(lane)
            parity = (tile - first) & 1
            source, scales, exists = self.locate(lists, ends, tile + 1, index)
            index = self.index_of(lists, counts, ends, query, tile + 2, warp, lane)
            next_bits = Uint32(cute.arch.vote_ballot_sync(exists)) & 0xFFFF
            if tile + 1 < first + tiles:
                self.request_scales(raw, source, scales, next_bits, parity ^ 1, lane)
            for step in self.steps:
                # Of the groups of loads, as many as there are steps have been asked for since this step's.
                cute.arch.cp_async_wait_group(len(self.steps) - 1)
                cute.arch.sync_warp()
                if const_expr(step == ROPE_PART):
                    cute.arch.mbarrier_wait(rings.rope_empty + rope, rope_phase ^ 1)
                    self.copy_rope(memory.ropes, rope, raw, warp, lane)
                else:
                    cute.arch.mbarrier_wait(rings.unit_empty + unit, unit_phase ^ 1)
                    self.turn(memory.units, unit, raw, step, parity, warp, lane)
                cute.arch.sync_warp()
                if tile + 1 < first + tiles:
                    self.request(raw, source, next_bits, step, lane)
                else:
                    cute.arch.cp_async_commit_group()
                if const_expr(step == ROPE_PART):
                    rope, rope_phase = self.say_present(rings, rope, rope_phase, bits, warp)
                else:
                    with cute.arch.elect_one():
                        for c in cutlass.range_constexpr(UNIT_CHUNKS):
                            cute.arch.mbarrier_arrive(rings.unit_full + (unit * UNIT_CHUNKS + c))
                    unit, unit_phase = advance(unit, unit_phase, self.units)
                    if const_expr(not self.rope and step == UNIT_ORDER[ROPE_AFTER - 1]):
                        cute.arch.mbarrier_wait(rings.rope_empty + rope, rope_phase ^ 1)
                        rope, rope_phase = self.say_present(rings, rope, rope_phase, bits, warp)
            bits = next_bits
        return unit, unit_phase, rope, rope_phase, at, facts_phase

    @cute.jit
    def say_present(self, rings: LatentRings, rope, phase, bits, warp):
        with cute.arch.elect_one():
            rings.present[warp, rope] = bits
            cute.arch.mbarrier_arrive(rings.rope_full + rope)
        return advance(rope, phase, self.ropes)

    @cute.jit
    def load_queries(self, memory: TileMemory, rings, address, present, unit, unit_phase, rope, rope_phase, warp, lane):
        """The rows at `address`, which are bf16, to the rings."""
        bits = Uint32(cute.arch.vote_ballot_sync(present)) & 0xFFFF
        for n, number in enumerate(UNIT_ORDER):
            cute.arch.mbarrier_wait(rings.unit_empty + unit, unit_phase ^ 1)
            for c in cutlass.range_constexpr(UNIT_CHUNKS):
                sources, keep = self.spread(address, bits, lane)
                place = unit * UNIT_CHUNKS + c
                self.gather(memory.units, place, sources, keep, number * UNIT_CHUNKS + c, warp, lane)
                arrive_when_gathered_too(rings.unit_full + place)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                for c in cutlass.range_constexpr(UNIT_CHUNKS):
                    cute.arch.mbarrier_arrive(rings.unit_full + (unit * UNIT_CHUNKS + c))
            unit, unit_phase = advance(unit, unit_phase, self.units)
            if const_expr(n == ROPE_AFTER - 1):
                cute.arch.mbarrier_wait(rings.rope_empty + rope, rope_phase ^ 1)
                if const_expr(self.rope):
                    sources, keep = self.spread(address, bits, lane)
                    self.gather(memory.ropes, rope, sources, keep, VALUE // CHUNK, warp, lane)
                    arrive_when_gathered_too(rings.rope_full + rope)
                    cute.arch.sync_warp()
                rope, rope_phase = self.say_present(rings, rope, rope_phase, bits, warp)
        return unit, unit_phase, rope, rope_phase

    @cute.jit
    def request(self, raw: Int32, source: Int64, bits: Uint32, step: cutlass.Constexpr, lane):
        """Ask for the bytes of a step of this warp's keys: a group of loads. Of a key's 8 vectors, those of odd keys
        are turned by 4, so that two keys' halves lie in different banks."""
        sources, keep = self.spread(source, bits, lane)
        target = raw + step * PART_BYTES
        for i in cutlass.range_constexpr(WARP_KEYS // 4):
            key = 4 * i + lane // 8
            place = target + (key * UNIT + (lane % 8 ^ (key % 2 * 4)) * 16)
            if const_expr(step == ROPE_PART):
                gather_16(target + (key * UNIT + lane % 8 * 16), sources[i] + (VALUE + 16), keep[i])
            elif const_expr(self.rope or step < 3):
                gather_16(place, sources[i] + step * UNIT, keep[i])
            else:
                if lane % 8 < 4:
                    gather_16(place, sources[i] + step * UNIT, keep[i])
                gather_16(raw + (ROPE_PART * PART_BYTES + key * UNIT + lane % 8 * 16), sources[i] + V4_NOPE, keep[i])
        cute.arch.cp_async_commit_group()

    @cute.jit
    def request_scales(self, raw: Int32, source: Int64, scales: Int64, bits: Uint32, parity, lane):
        """With the next group of loads."""
        if lane < WARP_KEYS:
            target = raw + (SCALES * PART_BYTES + parity * SCALE_BYTES + lane * 16)
            exists = (bits >> lane) & 1 != 0
            if const_expr(self.rope):
                gather_16(target, source + VALUE, exists)
            else:
                gather_8(target, scales, exists)

    @cute.jit
    def turn(self, units, place, raw: Int32, number: cutlass.Constexpr, parity, warp, lane):
        """A unit's bytes to bf16, to slot `place` of the ring. A lane has 16 channels of a key, four lanes a chunk of
        64; then come an odd key, the other chunk, and the next two keys: neither loads nor stores meet in a bank."""
        chunk, odd = lane // 8 % 2, lane // 4 % 2
        start = Int32(units.iterator.toint()) + 2 * TILE * CHUNK * (place * UNIT_CHUNKS + chunk)
        start += 2 * CHUNK * WARP_KEYS * warp
        # All loads before the first store, behind which they would have to wait.
        words, scales = [], []
        for i in cutlass.range_constexpr(WARP_KEYS // 4):
            key = 4 * i + lane // 16 * 2 + odd
            words.append(load_16(raw + (number * PART_BYTES + key * UNIT) + ((chunk * 4 + lane % 4) ^ (odd * 4)) * 16))
            scales.append(self.scale(raw, key, number, chunk, parity))
        for i in cutlass.range_constexpr(WARP_KEYS // 4):
            key = 4 * i + lane // 16 * 2 + odd
            out = cute.make_rmem_tensor((8,), Uint32)
            dequantize_16(words[i], scales[i], out)
            if const_expr(not self.rope and number == 3):
                if chunk == 1:
                    for half in cutlass.range_constexpr(2):
                        plain = raw + (ROPE_PART * PART_BYTES + key * UNIT + lane % 4 * 32 + half * 16)
                        for j, word in enumerate(load_16(plain)):
                            out[4 * half + j] = word
            for half in cutlass.range_constexpr(2):
                swizzled = (lane % 4 * 2 + half) ^ (key % 8)
                store_16(start + 2 * (key * CHUNK + swizzled * 8), [out[4 * half + j] for j in range(4)])

    @cute.jit
    def scale(self, raw: Int32, key, number: cutlass.Constexpr, chunk, parity) -> Float32:
        place = raw + (SCALES * PART_BYTES + parity * SCALE_BYTES + key * 16)
        if const_expr(self.rope):
            return load_float(place + 4 * number)
        return ue8m0_scale(load_byte(place + 2 * number + chunk))

    @cute.jit
    def copy_rope(self, ropes, place, raw: Int32, warp, lane):
        start = Int32(ropes.iterator.toint()) + 2 * CHUNK * (place * TILE + warp * WARP_KEYS)
        for i in cutlass.range_constexpr(WARP_KEYS // 4):
            key = 4 * i + lane // 8
            words = load_16(raw + (ROPE_PART * PART_BYTES + key * UNIT + lane % 8 * 16))
            store_16(start + 2 * (key * CHUNK + (lane % 8 ^ key % 8) * 8), words)
