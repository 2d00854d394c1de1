"""The warpgroups that score keys of an FP8 cache, tiles in turns: S^T = K Q^T, softmax, P^T.

What e4m3 has is exact in f16, so a group of channels with one scale is a product of f16 of its own, which the scale
then multiplies in fp32. Of a key's bytes a lane reads 16 channels at once, and Q is in that order (byte_queries.py).

P is relative to a maximum that may lag behind the true one by a factor of 2^LAG: a barrier asks all lanes whether it
does by more; only then is the maximum of the columns, which lie in all warps, found. P has the power of two of its
key's scales (byte_exchange.ScaleTable), and so has the maximum. Of two warpgroups that score, one looks at the maxima
after the other, in the order of the tiles, and both have sums of their own.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Uint32, const_expr
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.byte_exchange import ROOM, TABLE_BYTES, Exchange, ScaleTable, Thread, turn
from dsa.cute.byte_queries import ByteQueries, power_of_two
from dsa.cute.byte_tiles import ByteRings, ByteTiles
from dsa.cute.fp8_rows import four_halves, larger_bf16, store_half, store_split, ue8m0_scale
from dsa.cute.group_vote import any_of_group
from dsa.cute.latent_attention import LAG, LN2, NOTHING, WARPGROUP, Piece, Results
from dsa.cute.latent_tiles import CHUNK, FIRST_TILE, LENGTH, PART, SEEN, SEQUENCE, TILE, TILES, VALUE
from dsa.cute.matrix_store import pack, store_matrices
from dsa.cute.register_pressure import computed_here
from dsa.cute.shared_bytes import load_4, load_8, load_16, load_byte

K16 = 16
# Barriers of a warpgroup, and of its votes; behind byte_queries.BARRIER.
BARRIER, VOTE_BARRIER = 2, 4
# P is at most 2^(LAG + RAISED), which f16 has, so that what is 2^-31 of the largest is more than 0.
RAISED = 7.0
# Exponents of a key's largest scale that P can have: the sums of P without it stay in fp32's range.
LEAST_POWER, MOST_POWER = -64, 110


@cute.jit
def own_key(row):
    """Which key of eight is row `row` of the products: neighbours four apart, so that they lie in different banks."""
    return (row >> 1) + ((row & 1) << 2)


class ByteScores:
    """Keys in `memory` and `rows` heads of a query, 16, 32 or 64."""

    def __init__(self, memory: ByteTiles, rows: int):
        self.memory, self.rows, self.channels = memory, rows, memory.channels
        self.slots, self.scorers = memory.slots, memory.scorers
        # Blocks of 64 channels of a key that are bytes; one more is bf16, and of 512 channels part of the value.
        self.byte_blocks = self.channels // CHUNK - 1
        self.together = 2 if memory.rope else 1  # blocks of a group
        self.own = rows // 4  # columns of a lane
        self.table, self.queries = ScaleTable(self.channels), ByteQueries(memory, rows)

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
        zeros = cute.make_rmem_tensor((4,), Float32)
        zeros.fill(0.0)
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
                self.queries.meet()
                power = self.queries.take(raw, rings, exchange, ring, heads - first_row, thread)
                ring += self.memory.query_slots
                if thread.side == 0 and thread.tid < self.rows:
                    exchange.tops[thread.tid] = Float32(NOTHING)
                for i in cutlass.range_constexpr(self.own // 4):
                    cute.autovec_copy(zeros, exchange.totals[None, self.number(thread), i])
                cute.arch.fence_proxy("async.shared", space="cta")
                self.queries.meet()
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
                    self.softmax(flat, exchange, there, powers, exponents, scale, place, p_phase, thread)
                ring, parts = ring + piece.tiles, parts + piece.tiles
                self.finish(results, exchange, piece, rows, group, parts, pieces, thread)
                pieces += 1

    def number(self, thread: Thread):
        """Of the thread, among those that score."""
        return thread.side * WARPGROUP + thread.tid

    def meet(self, thread: Thread):
        cute.arch.barrier(barrier_id=BARRIER + thread.side, number_of_threads=WARPGROUP)

    @cute.jit
    def multiply(self, acc, sums, mmas, fragments, keys, power, thread: Thread):
        """acc = K Q^T of the tile whose bytes are at `keys`: the block of bf16 first, then each group of bytes with a
        scale of its own. -> of a lane's two keys the largest magnitude of its bf16 numbers, as bits of two bf16."""
        mma, half_mma = mmas
        queries, half_queries, operands = fragments
        pitch, lane = self.memory.pitch, computed_here(thread.lane)
        first = keys + (thread.warp * 16 + own_key(lane >> 2)) * pitch
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
                place = keys + self.memory.scales + (warp * 16 + 8 * r + own_key(lane >> 2)) * 8 + group
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
        lane, table = computed_here(thread.lane), exchange.tables + place * TABLE_BYTES
        t, powers, exponents = lane & 3, [], []
        for r in cutlass.range_constexpr(2):
            key = thread.warp * 16 + 8 * r + own_key(lane >> 2)
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

    @cute.jit
    def softmax(self, flat, exchange: Exchange, there, powers, exponents, scale, slot, phase, thread: Thread):
        """P^T of a tile's scores to shared memory, and what O^T must be multiplied by before.

        there: a bit for each of the warp's keys; (slot, phase): of P; powers, exponents: see share_scales
        """
        lane, number = computed_here(thread.lane), computed_here(self.number(thread))
        tops = cute.make_tensor(
            exchange.tops.iterator + (lane & 3) * 2, cute.make_layout((2, self.rows // 8), stride=(1, 8))
        )
        pair = cute.make_rmem_tensor((2,), Float32)
        # In place: in powers of two, with the key's own.
        for r in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(self.own):
                at = i // 2 * 4 + 2 * r + i % 2
                flat[at] = cute.math.fma(flat[at], scale, exponents[r])
        if there != 0xFFFF:
            for r in cutlass.range_constexpr(2):
                if (there >> Uint32(8 * r + own_key(lane >> 2))) & 1 == 0:
                    for i in cutlass.range_constexpr(self.own):
                        flat[i // 2 * 4 + 2 * r + i % 2] = -Float32(float("inf"))
        if const_expr(self.scorers > 1):
            # The first has the first turn.
            cute.arch.mbarrier_wait(exchange.turns + slot, phase ^ 1 ^ thread.side)
            self.scale_totals(exchange, slot ^ 1, thread)
        most = -Float32(float("inf"))
        for n in cutlass.range_constexpr(self.rows // 8):
            cute.autovec_copy(tops[None, n], pair)
            for i in cutlass.range_constexpr(2):
                most = cute.arch.fmax(most, cute.arch.fmax(flat[4 * n + i], flat[4 * n + 2 + i]) - pair[i])
        rises = any_of_group(most > LAG + RAISED, VOTE_BARRIER + thread.side, WARPGROUP)
        if rises:
            self.raise_tops(flat, exchange, slot, thread)
        if thread.warp == 0:
            with cute.arch.elect_one():
                exchange.changed[slot] = Int32(1) if rises else Int32(0)
        if rises:
            self.meet(thread)
            self.scale_totals(exchange, slot, thread)
        own_tops = tops
        if const_expr(self.scorers > 1):
            own_tops = cute.make_rmem_tensor((2, self.rows // 8), Float32)
            for n in cutlass.range_constexpr(self.rows // 8):
                cute.autovec_copy(tops[None, n], own_tops[None, n])
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(exchange.turns + (slot ^ 1))
        start = Int32(exchange.p.iterator.toint()) + slot * (2 * TILE * self.rows)
        # Lane 8 i + r gives the address of row r of matrix i: two of keys, then two of heads.
        key = thread.warp * 16 + (lane & 8) + own_key(lane & 7)
        total = cute.make_rmem_tensor((4,), Float32)
        without = [power_of_two(-power) for power in powers]
        for j in cutlass.range_constexpr(self.rows // 16):
            weights = []
            cute.autovec_copy(exchange.totals[None, number, j], total)
            for i in cutlass.range_constexpr(8):
                if const_expr(i % 4 == 0):
                    cute.autovec_copy(own_tops[None, 2 * j + i // 4], pair)
                weight = cute.math.exp2(flat[8 * j + i] - pair[i % 2], fastmath=True)
                at = i // 4 * 2 + i % 2
                total[at] = cute.math.fma(weight, without[i // 2 % 2], total[at])
                weights.append(weight)
            cute.autovec_copy(total, exchange.totals[None, number, j])
            words = [pack(weights[2 * i], weights[2 * i + 1], Float16) for i in range(4)]
            offset = key * (2 * self.rows) + (2 * j + (lane >> 4)) * 16
            store_matrices(start + (offset ^ ((offset >> 3) & (2 * self.rows - 16))), words)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(exchange.p_full + slot)

    @cute.jit
    def scale_totals(self, exchange: Exchange, slot, thread: Thread):
        """The thread's sums as the tile of P's slot changed the tops, if it did."""
        lane, number = computed_here(thread.lane), computed_here(self.number(thread))
        if exchange.changed[slot] != 0:
            total = cute.make_rmem_tensor((4,), Float32)
            for j in cutlass.range_constexpr(self.own // 4):
                cute.autovec_copy(exchange.totals[None, number, j], total)
                for i in cutlass.range_constexpr(4):
                    total[i] *= exchange.factors[16 * j + i // 2 * 8 + (lane & 3) * 2 + i % 2, slot]
                cute.autovec_copy(total, exchange.totals[None, number, j])

    @cute.jit
    def raise_tops(self, flat, exchange: Exchange, slot, thread: Thread):
        """The true maxima of the columns where they exceed the tops by too much, and the factors that follow."""
        lane, tid, warp = computed_here(thread.lane), computed_here(thread.tid), thread.side * 4 + thread.warp
        for c in cutlass.range_constexpr(self.own):
            value = cute.arch.fmax(flat[c // 2 * 4 + c % 2], flat[c // 2 * 4 + 2 + c % 2])
            for log in cutlass.range_constexpr(2, 5):
                value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=1 << log))
            if lane >> 2 == 0:
                exchange.columns[c // 2 * 8 + (lane & 3) * 2 + c % 2, warp] = value
        self.meet(thread)
        if tid < self.rows:
            highest = exchange.columns[tid, thread.side * 4]
            for w in cutlass.range_constexpr(1, 4):
                highest = cute.arch.fmax(highest, exchange.columns[tid, thread.side * 4 + w])
            highest -= RAISED
            factor, top = Float32(1.0), exchange.tops[tid]
            if highest > top + LAG:
                factor = cute.math.exp2(top - highest, fastmath=True)
                exchange.tops[tid] = highest
            exchange.factors[tid, slot] = factor

    @cute.jit
    def finish(self, results: Results, exchange: Exchange, piece: Piece, rows, group, parts, pieces, thread: Thread):
        """LSE of the piece's rows, and what O^T is to be multiplied by; parts: tiles that have been scored."""
        first_row, heads = rows
        lane, tid, number = computed_here(thread.lane), computed_here(thread.tid), self.number(thread)
        if const_expr(self.scorers > 1):
            self.queries.meet()
            if (parts & 1) == thread.side:
                # The last tile was the other's.
                self.scale_totals(exchange, thread.side ^ 1, thread)
        for c in cutlass.range_constexpr(self.own):
            amount = exchange.totals[c % 4, number, c // 4]
            for log in cutlass.range_constexpr(2, 5):
                amount += cute.arch.shuffle_sync_bfly(amount, offset=1 << log)
            if lane >> 2 == 0:
                exchange.columns[c // 2 * 8 + (lane & 3) * 2 + c % 2, thread.side * 4 + thread.warp] = amount
        self.queries.meet()
        if thread.side == 0:
            cute.arch.mbarrier_wait(exchange.end_empty, ~pieces & 1)
            if tid < self.rows:
                # The warps of the piece's first tile first: the sum shall not depend on what was before the piece.
                turned = 4 * (parts - piece.tiles & self.scorers - 1)
                amount = exchange.columns[tid, turned]
                for w in cutlass.range_constexpr(1, 4 * self.scorers):
                    amount += exchange.columns[tid, w ^ turned]
                inverse, result = Float32(0.0), Float32(float("inf"))
                if piece.part >= 0:
                    result = -Float32(float("inf"))
                if amount != 0.0:
                    whole, top = amount, exchange.tops[tid]
                    if piece.part < 0:
                        whole += cute.math.exp2(results.sink[tid] - top)
                    inverse = 2.0**-ROOM / whole
                    result = (top + cute.math.log2(amount)) * LN2
                exchange.inverses[tid] = inverse
                row = first_row + tid
                if row < heads:
                    if piece.part >= 0:
                        results.lse_parts[piece.part, 0, row] = result
                    else:
                        sequence, query = divmod(piece.sequence, group)
                        results.lse[sequence, row, query] = result
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(exchange.end_full)
