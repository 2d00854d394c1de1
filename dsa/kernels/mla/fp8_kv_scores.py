"""The warpgroups that score keys of an FP8 cache, tiles in turns: S^T = K Q^T, softmax, P^T.

What e4m3 has is exact in f16, so a group of channels with one scale is a product of f16 of its own, which the scale
then multiplies in fp32. Of a key's bytes a lane reads 16 channels at once, and Q is in that order (byte_queries.py).
P has the power of two of its key's scales (scale_table.py).
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Uint32, const_expr
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.shared_memory import load_4, load_8, load_16, load_byte
from dsa.cute.sm90 import opaque
from dsa.kernels.mla.fp8_kv_queries import ByteQueries
from dsa.kernels.mla.fp8_kv_rows import four_halves, larger_bf16, store_half, store_split, ue8m0_scale
from dsa.kernels.mla.fp8_kv_scale_table import ROOM, TABLE_BYTES, ScaleTable
from dsa.kernels.mla.fp8_kv_tiles import ByteRings, ByteTiles
from dsa.kernels.mla.mla_attention import Piece, Results
from dsa.kernels.mla.mla_tiles import CHUNK, FIRST_TILE, LENGTH, PART, SEEN, SEQUENCE, TILE, TILES, VALUE
from dsa.kernels.mla.swap_ab_exchange import Exchange, Thread, turn
from dsa.kernels.mla.swap_ab_softmax import power_of_two, spread_key

K16 = 16
# Exponents of a key's largest scale that P can have: the sums of P without it stay in fp32's range.
LEAST_POWER, MOST_POWER = -64, 110


class ByteScores(ByteQueries):
    """Keys in `memory` and `rows` heads of a query, 16, 32 or 64."""

    def __init__(self, memory: ByteTiles, rows: int):
        super().__init__(memory, rows)
        self.together = 2 if memory.rope else 1  # blocks of a group
        self.table = ScaleTable(self.channels)

    def multiplications(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """With keys in bf16 and in f16."""
        k_major, registers = cute.nvgpu.OperandMajorMode.K, cute.nvgpu.warpgroup.OperandSource.RMEM
        return tuple(
            sm90.make_trivial_tiled_mma(
                dtype, dtype, k_major, k_major, Float32, (1, 1, 1), (TILE, self.rows), registers
            )
            for dtype in (BFloat16, Float16)
        )

    @cute.jit
    def run(self, results: Results, mmas, raw, rings: ByteRings, exchange: Exchange, rows, group, scale, thread):
        """All pieces of this CTA; rows: (its first, how many there are)."""
        mma, half_mma = mmas
        first_row, heads = rows
        thr, half_thr = mma.get_slice(thread.tid), half_mma.get_slice(thread.tid)
        fragments = (
            mma.make_fragment_B(thr.partition_B(exchange.queries)),
            half_mma.make_fragment_B(half_thr.partition_B(exchange.half_queries)),
            cute.make_rmem_tensor((*thr.partition_shape_A((TILE, CHUNK)), 2), BFloat16),
        )
        acc, sums = [cute.make_rmem_tensor(thr.partition_shape_C((TILE, self.rows)), Float32) for _ in range(2)]
        flat = cute.make_tensor(acc.iterator, cute.make_layout(self.rows // 2))
        ring, pieces, parts, sequence = Int32(0), Int32(0), Int32(0), Int32(0)
        while sequence >= 0:
            at, facts_phase = turn(pieces)
            cute.arch.mbarrier_wait(rings.named + at, facts_phase)
            sequence = rings.facts[SEQUENCE, at]
            cute.arch.mbarrier_wait(rings.facts_full + at, facts_phase)
            piece = Piece(sequence, *[rings.facts[i, at] for i in (FIRST_TILE, TILES, PART, LENGTH, SEEN)])
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(rings.facts_empty + at)
            if sequence >= 0:
                # All have multiplied with the queries before.
                self.meet_all()
                power = self.take_queries(raw, rings, exchange, ring, heads - first_row, thread)
                ring += self.memory.query_slots
                self.begin(exchange, thread)
                cute.arch.fence_proxy("async.shared", space="cta")
                self.meet_all()
                first = (parts ^ thread.side) & (self.scorers - 1)
                for tile in cutlass.range(first, piece.tiles, self.scorers, unroll=1):
                    slot, phase = self.memory.position(ring + tile)
                    cute.arch.mbarrier_wait(rings.full + slot, phase)
                    there = rings.present[thread.warp, slot]
                    keys = raw + slot * self.memory.slot_bytes
                    largest = self.multiply(acc, sums, mmas, fragments, keys, power, thread)
                    place, p_phase = turn(parts + tile)
                    cute.arch.mbarrier_wait(exchange.p_empty + place, p_phase ^ 1)
                    powers, exponents = self.share_scales(keys, exchange, place, largest, thread)
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(rings.empty + slot)
                    self.softmax(flat, exchange, there, powers, exponents, None, scale, place, p_phase, thread)
                ring, parts = ring + piece.tiles, parts + piece.tiles
                self.finish(results, exchange, piece, rows, group, parts, pieces, None, thread)
                pieces += 1

    @cute.jit
    def multiply(self, acc, sums, mmas, fragments, keys, power, thread: Thread):
        """acc = K Q^T of the tile whose bytes are at `keys`: the block of bf16 first, then each group of bytes with a
        scale of its own. -> of a lane's two keys the largest magnitude of its bf16 numbers, as bits of two bf16."""
        mma, half_mma = mmas
        queries, half_queries, operands = fragments
        pitch, lane = self.memory.pitch, opaque(thread.lane)
        first = keys + (thread.warp * 16 + spread_key(lane >> 2)) * pitch
        halves = cute.recast_tensor(operands, Float16)
        words = cute.make_tensor(
            cute.recast_ptr(operands.iterator, dtype=Uint32), cute.make_layout((2, 2, CHUNK // K16, 2))
        )
        scales = []
        if const_expr(self.memory.rope):
            for r in cutlass.range_constexpr(2):
                scales.append([word.bitcast(Float32) * power for word in load_16(first + 8 * r * pitch + VALUE)])
        blocks = [self.byte_blocks, *range(self.byte_blocks)]
        largest = [Uint32(0), Uint32(0)]
        # A key's next block is on its way while the other key's is turned.
        read = [self.read_block(first, r, blocks[0], lane) for r in range(2)]
        for n, b in enumerate(blocks):
            if const_expr(n >= 2):
                cute.nvgpu.warpgroup.wait_group(1)
            for r in cutlass.range_constexpr(2):
                if const_expr(n > 0):
                    for s, word in enumerate(read[r]):
                        words[r, 0, s, n % 2], words[r, 1, s, n % 2] = four_halves(word)
                else:
                    for i, word in enumerate(read[r]):
                        words[r, i % 2, i // 2, n % 2] = word
                        if const_expr(not self.memory.rope):
                            largest[r] = larger_bf16(largest[r], word)
                if const_expr(n + 1 < len(blocks)):
                    read[r] = self.read_block(first, r, blocks[n + 1], lane)
            if const_expr(n > 1 and b % self.together == 0):
                cute.nvgpu.warpgroup.wait_group(0)
                self.add_group(acc, sums, keys, scales, power, b // self.together - 1, thread.warp, lane)
            cute.nvgpu.warpgroup.fence()
            for s in cutlass.range_constexpr(CHUNK // K16):
                place = b * (CHUNK // K16) + s
                if const_expr(n == 0):
                    mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, s > 0)
                    cute.gemm(mma, acc, operands[None, None, s, 0], queries[None, None, place, 0], acc)
                else:
                    half_mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, b % self.together + s > 0)
                    cute.gemm(half_mma, sums, halves[None, None, s, n % 2], half_queries[None, None, place, 0], sums)
            cute.nvgpu.warpgroup.commit_group()
        cute.nvgpu.warpgroup.wait_group(0)
        self.add_group(acc, sums, keys, scales, power, self.byte_blocks // self.together - 1, thread.warp, lane)
        return largest

    @cute.jit
    def add_group(self, acc, sums, keys, scales, power, group: cutlass.Constexpr, warp, lane):
        """acc += sums of a group times the keys' scales."""
        for r in cutlass.range_constexpr(2):
            scale = Float32(1.0)
            if const_expr(self.memory.rope):
                scale = scales[r][group]
            else:
                place = keys + self.memory.scales + (warp * 16 + 8 * r + spread_key(lane >> 2)) * 8 + group
                scale = (load_byte(place) << 23).bitcast(Float32) * power
            for i in cutlass.range_constexpr(self.own):
                at = i // 2 * 4 + 2 * r + i % 2
                acc[at] = cute.math.fma(sums[at], scale, acc[at])

    def read_block(self, first, r: int, block: int, lane) -> list:
        """What a lane has of a block of one of its two keys, as words: of bytes 16 channels, of bf16 twice 8."""
        row = first + 8 * r * self.memory.pitch + (lane & 3) * 16
        if block < self.byte_blocks:
            return [*load_16(row + CHUNK * block)]
        start = row + self.memory.row_bytes - 2 * CHUNK
        return [*load_16(start), *load_16(start + 64)]

    @cute.jit
    def share_scales(self, keys, exchange: Exchange, place, largest, thread: Thread):
        """The scales of the tile whose bytes are at `keys`, for V, to P's slot `place`. -> exponents of a lane's two
        keys; and as numbers, NaN if a scale is."""
        lane, table = opaque(thread.lane), exchange.tables + place * TABLE_BYTES
        t, powers, exponents = lane & 3, [], []
        for r in cutlass.range_constexpr(2):
            key = thread.warp * 16 + 8 * r + spread_key(lane >> 2)
            if const_expr(self.memory.rope):
                own = load_4(keys + key * self.memory.pitch + VALUE + 4 * t)
                most = Int32(own & 0x7FFFFFFF)
            else:
                low, high = load_8(keys + self.memory.scales + key * 8)
                own, second = (low >> Uint32(8 * t)) & 255, (high >> Uint32(8 * t)) & 255
                # Numbers of bf16 may be as large as e4m3's with a scale 2^9 below them.
                rope = (Int32(cutlass.max(largest[r] & 0x7FFF, (largest[r] >> 16) & 0x7FFF)) >> 7) - 9
                most = cutlass.max(Int32(own), rope)
                if t < 3:
                    most = cutlass.max(most, Int32(second))
            for log in cutlass.range_constexpr(2):
                most = cutlass.max(most, cute.arch.shuffle_sync_bfly(most, offset=1 << log))
            if const_expr(self.memory.rope):
                most = most >> 23
            power = cutlass.max(cutlass.min(most - 127, MOST_POWER), LEAST_POWER)
            exponent = Float32(power)
            if most == 255:
                exponent = Float32(float("nan"))
            factor = power_of_two(ROOM - power)
            if const_expr(self.memory.rope):
                store_split(self.table.place(table, t, key), own.bitcast(Float32) * factor)
            else:
                store_half(self.table.place(table, t, key), ue8m0_scale(own) * factor, False)
                scale = ue8m0_scale(second)
                if t == 3:
                    scale = Float32(1.0)
                store_half(self.table.place(table, t + 4, key), scale * factor, t == 3)
            powers.append(power)
            exponents.append(exponent)
        return powers, exponents
