"""The score warpgroups for an FP8 cache, with swap A/B: S^T = K Q^T, softmax, P^T.

There are one or two score warpgroups; two take the tiles in turns. e4m3 values are exact in f16. So each group of a
key's e4m3 channels that share a scale gives a separate f16 product with Q, and the scale multiplies this product in
fp32. A key's last 64 channels give a bf16 product. A lane reads 16 consecutive e4m3 channels of a key at once. P of a
key is multiplied by 2^e, where e is the exponent of the key's largest scale, and V is divided by 2^e (ScaleTable in
swap_ab_exchange.py).

The score warpgroups copy Q from the key stages, where it arrives, to the memory of Q. The part of Q that multiplies the
keys' e4m3 channels is stored as f16, after a division by a power of two that makes the largest magnitude about 2^14.
The order of the 64 channels of a chunk in the four wgmma steps of 16 channels is free, as long as keys and Q agree: Q
is stored in the order in which a lane reads a key's channels.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Uint32, const_expr

from dsa.cute.pipeline import state_at, state_at_of_two
from dsa.cute.shared_memory import load_4, load_8, load_16, load_byte, store_matrices
from dsa.cute.sm90 import opaque
from dsa.kernels.mla.fp8_kv_convert import (
    four_halves,
    larger_bf16,
    store_half,
    store_split,
    times_to_f16,
    ue8m0_scale,
)
from dsa.kernels.mla.fp8_kv_gather import Fp8TopkGather
from dsa.kernels.mla.limits import HEAD_DIM_V, TILE_N
from dsa.kernels.mla.mla_roles import Coord, MlaShared, Results, RoleRegisters, Thread
from dsa.kernels.mla.mla_tiles import K16, K_CHUNK, tiled_mma
from dsa.kernels.mla.swap_ab_attention import SwapAbAttention, power_of_two, spread_key
from dsa.kernels.mla.swap_ab_exchange import F16_ROOM, SCALE_TABLE_BYTES, ScaleTable, SwapAbExchange

# Bounds of e. P of a key is multiplied by 2^e. row_max includes this factor, because scores are in log2 and e is added
# to them. row_sum does not include it, and is in the range of fp32 because of these bounds.
LEAST_POWER, MOST_POWER = -64, 110
AHEAD = 1  # a warp loads this many chunks of Q ahead of the chunk that it stores; the compiler keeps this order


class ScoreOperands(NamedTuple):
    """Tiled MMAs, operands and accumulators of the scores.

    mmas    tiled MMAs for keys in bf16 and in f16
    q       Q in shared memory as wgmma operand, viewed as bf16 and as f16
    k_rmem  two buffers in registers, each for a lane's part of a 64-channel chunk of keys
    acc     accumulator of S^T: the bf16 product, plus each group's product times the scale of the group
    sums    accumulator of one group of channels that share a scale
    """

    mmas: tuple[cute.TiledMma, cute.TiledMma]
    q: tuple[cute.Tensor, cute.Tensor]
    k_rmem: cute.Tensor
    acc: cute.Tensor
    sums: cute.Tensor


class Fp8KvScores(SwapAbAttention):
    """The score warpgroups for keys in the stages `kv`, and for `head_tile` heads of a query, 16, 32 or 64."""

    def __init__(self, kv: Fp8TopkGather, head_tile: int, registers: RoleRegisters):
        super().__init__(kv, None, head_tile, kv.score_warpgroups, registers)
        self.head_dim, self.q_stages = kv.head_dim, kv.q_stages
        # Number of 64-channel chunks of a key that are e4m3. The last chunk is bf16. In keys of 512 channels the bf16
        # chunk is part of the value.
        self.fp8_chunks = self.head_dim // K_CHUNK - 1
        # How `load_q` divides Q among warps. A stage of Q has `octets` octets of heads. In a warpgroup, `sharers` warps
        # copy the same octet. A warp's chunks are `stride` apart, and a warp has at most `turns` chunks.
        self.octets = min(head_tile // 8, 4)
        self.sharers = 4 // self.octets
        self.stride = kv.score_warpgroups * self.sharers
        self.turns = -(-(self.fp8_chunks + 1) // self.stride)
        self.group_chunks = 2 if kv.has_rope else 1  # chunks per group with one scale
        self.table = ScaleTable(self.head_dim)

    def score_mmas(self) -> list[cute.TiledMma]:
        return [tiled_mma(dtype, "K K", (TILE_N, self.head_tile), a_in_registers=True) for dtype in (BFloat16, Float16)]

    @cute.jit
    def score(self, q, results: Results, shared: MlaShared, mmas, group, scale, coord: Coord):
        side = Int32(0) if const_expr(self.score_warpgroups == 1) else coord.warp // 4
        coord, mmas = coord._replace(thread=Thread(side, coord.warp % 4, coord.lane)), mmas[0]
        thrs = [mma.get_slice(coord.thread.tid) for mma in mmas]
        rq = [
            mma.make_fragment_B(thr.partition_B(x))
            for mma, thr, x in zip(mmas, thrs, (shared.exchange.q, shared.exchange.q_f16))
        ]
        k_rmem = cute.make_rmem_tensor((*thrs[0].partition_shape_A((TILE_N, K_CHUNK)), 2), BFloat16)
        shape = thrs[0].partition_shape_C((TILE_N, self.head_tile))
        acc, sums = [cute.make_rmem_tensor(shape, Float32) for _ in range(2)]
        self.score_mainloop(results, ScoreOperands(mmas, rq, k_rmem, acc, sums), shared, group, scale, coord)

    @cute.jit
    def score_tile(
        self,
        operands: ScoreOperands,
        shared: MlaShared,
        q_power,
        ring,
        tile_count,
        tile,
        max_logits,
        scale,
        thread: Thread,
    ):
        pipeline, exchange, state = shared.pipeline, shared.exchange, state_at(ring + tile, self.kv.stages)
        pipeline.kv.consumer_wait(state)
        valid_mask = pipeline.valid_mask[thread.warp, state.stage]
        keys = shared.kv + state.stage * self.kv.stage_bytes
        largest = self.multiply(operands, keys, q_power, thread)
        p_state = state_at_of_two(tile_count + tile)
        exchange.p_pipeline.producer_wait(p_state)
        powers, exponents = self.share_scales(keys, exchange, p_state.stage, largest, thread)
        cute.arch.sync_warp()
        pipeline.kv.consumer_release(state)
        self.softmax(operands.acc, exchange, valid_mask, powers, exponents, max_logits, scale, p_state, thread)

    @cute.jit
    def load_q(self, operands: ScoreOperands, shared: MlaShared, ring, coord: Coord) -> Float32:
        """Copy a work tile's Q from the ring of keys to the memory of Q, with zeros after the last head. Q begins at
        stage number `ring` of the ring.

        Each chunk is stored in the order in which lanes read the keys' channels. The chunks that multiply e4m3 channels
        are divided by a power of two and converted to f16. Their largest magnitude is then about 2^14. Return that
        power of two.

        A warp copies eight heads at a time, with four lanes per head. Word i of all lanes is an 8 x 8 matrix for
        stmatrix. The score warpgroups, and the warps of a warpgroup that have the same heads, take chunks in turns.
        """
        pipeline, exchange, thread = shared.pipeline, shared.exchange, coord.thread
        rows, lane = coord.heads - coord.first_head, opaque(thread.lane)
        chunk = thread.side * self.sharers + thread.warp // self.octets
        first = thread.warp % self.octets * 8  # the warp's first head in each stage of Q
        own, sources = first + (lane >> 2), []
        by_word = [Uint32(0)] * 4  # four running maxima, for a shorter dependency chain
        for i in cutlass.range_constexpr(self.kv.q_stages):
            state = state_at(ring + i, self.kv.stages)
            pipeline.kv.consumer_wait(state)
            sources.append(shared.kv + state.stage * self.kv.stage_bytes + own * self.kv.q_pitch)
            if 32 * i + own < rows:
                for n in cutlass.range_constexpr(self.turns):
                    if n * self.stride + chunk < self.fp8_chunks:
                        words = self.read_q(sources[i], n * self.stride + chunk, lane)
                        for k in cutlass.range_constexpr(8):
                            by_word[k % 4] = larger_bf16(by_word[k % 4], words[k])
        largest = larger_bf16(larger_bf16(by_word[0], by_word[1]), larger_bf16(by_word[2], by_word[3]))
        for log in cutlass.range_constexpr(5):
            largest = larger_bf16(largest, cute.arch.shuffle_sync_bfly(largest, offset=1 << log))
        if thread.lane == 0:
            exchange.q_largest[thread.side * 4 + thread.warp] = largest
        self.sync_score()
        for w in cutlass.range_constexpr(4 * self.kv.score_warpgroups):
            largest = larger_bf16(largest, exchange.q_largest[w])
        exponent = Int32(cutlass.max(largest & 0x7FFF, (largest >> 16) & 0x7FFF)) >> 7
        exponent = cutlass.max(cutlass.min(exponent - 127 - 14, 100), -100)
        power, inverse = power_of_two(exponent), power_of_two(-exponent)
        # For stmatrix, lane 8 i + r addresses row r of matrix i. This row is 16-byte vector i of a chunk of the warp's
        # r-th head. `place ^ 64` below is the address of vector i + 4.
        row = lane & 7
        target = Int32(exchange.q.iterator.toint()) + 2 * K_CHUNK * (first + row) + 16 * ((lane >> 3) ^ row)
        parts = [(i, n) for i in range(self.kv.q_stages) for n in range(self.turns)]
        read = [self.read_q(sources[i], n * self.stride + chunk, lane) for i, n in parts[:AHEAD]]
        for k, (i, n) in enumerate(parts):
            words, of_chunk = read[k], n * self.stride + chunk
            if const_expr(k + AHEAD < len(parts)):
                ahead = parts[k + AHEAD]
                read.append(self.read_q(sources[ahead[0]], ahead[1] * self.stride + chunk, lane))
            if of_chunk <= self.fp8_chunks:
                numbers = []
                for word in words:
                    number = word
                    if of_chunk < self.fp8_chunks:
                        number = times_to_f16(word, inverse, inverse)
                    if 32 * i + own >= rows:
                        number = Uint32(0)
                    numbers.append(number)
                place = target + 2 * K_CHUNK * (self.head_tile * of_chunk + 32 * i)
                store_matrices(place, numbers[:4])
                store_matrices(place ^ 64, numbers[4:])
        self.sync_score()
        for i in cutlass.range_constexpr(self.kv.q_stages):
            state = state_at(ring + i, self.kv.stages)
            if thread.side == 0:
                pipeline.kv.consumer_release(state)
        return power

    @cute.jit
    def read_q(self, source, chunk, lane):
        """Return a lane's 8 words of a chunk of a head's Q.

        A head has four lanes. The v-th words of these lanes form 16-byte vector v of the head's row in the wgmma
        operand. With t = lane % 4, a lane's words are channels 16 t to 16 t + 15 of a chunk. In the bf16 chunk they are
        channels 8 t to 8 t + 7 of each half. For a chunk past the last one the words are garbage.
        """
        of_bf16 = chunk == self.fp8_chunks
        start = source + 2 * K_CHUNK * chunk + (lane & 3) * (Int32(16) if of_bf16 else Int32(32))
        return [*load_16(start), *load_16(start + (Int32(64) if of_bf16 else Int32(16)))]

    @cute.jit
    def multiply(self, operands: ScoreOperands, keys, power, thread: Thread):
        """Compute acc = K Q^T of the tile whose bytes are at address `keys`.

        The bf16 chunk comes first, then the groups of e4m3 channels that share a scale. power: the power of two by
        which Q was divided.

        Return one word for each of the lane's two keys. With d = 512 it has two bf16: the largest magnitudes that the
        lane has read in even and in odd channels of the key's bf16 chunk. With d = 576 it is 0.
        """
        (bf16, f16), (q, q_f16), k_rmem, acc, sums = operands
        pitch, lane = self.kv.pitch, opaque(thread.lane)
        first = keys + (thread.warp * 16 + spread_key(lane >> 2)) * pitch
        halves = cute.recast_tensor(k_rmem, Float16)
        words = cute.make_tensor(
            cute.recast_ptr(k_rmem.iterator, dtype=Uint32), cute.make_layout((2, 2, K_CHUNK // K16, 2))
        )
        scales = []
        if const_expr(self.kv.has_rope):
            for r in cutlass.range_constexpr(2):
                scales.append([word.bitcast(Float32) * power for word in load_16(first + 8 * r * pitch + HEAD_DIM_V)])
        chunks = [self.fp8_chunks, *range(self.fp8_chunks)]
        largest = [Uint32(0), Uint32(0)]
        # A lane has two keys. It loads one key's next chunk while it converts the other key's chunk.
        read = [self.read_chunk(first, r, chunks[0], lane) for r in range(2)]
        for n, b in enumerate(chunks):
            if const_expr(n >= 2):
                cute.nvgpu.warpgroup.wait_group(1)
            for r in cutlass.range_constexpr(2):
                if const_expr(n > 0):
                    for s, word in enumerate(read[r]):
                        words[r, 0, s, n % 2], words[r, 1, s, n % 2] = four_halves(word)
                else:
                    for i, word in enumerate(read[r]):
                        words[r, i % 2, i // 2, n % 2] = word
                        if const_expr(not self.kv.has_rope):
                            largest[r] = larger_bf16(largest[r], word)
                if const_expr(n + 1 < len(chunks)):
                    read[r] = self.read_chunk(first, r, chunks[n + 1], lane)
            if const_expr(n > 1 and b % self.group_chunks == 0):
                cute.nvgpu.warpgroup.wait_group(0)
                self.add_group(acc, sums, keys, scales, power, b // self.group_chunks - 1, thread.warp, lane)
            cute.nvgpu.warpgroup.fence()
            for s in cutlass.range_constexpr(K_CHUNK // K16):
                place = b * (K_CHUNK // K16) + s
                if const_expr(n == 0):
                    bf16.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, s > 0)
                    cute.gemm(bf16, acc, k_rmem[None, None, s, 0], q[None, None, place, 0], acc)
                else:
                    f16.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, b % self.group_chunks + s > 0)
                    cute.gemm(f16, sums, halves[None, None, s, n % 2], q_f16[None, None, place, 0], sums)
            cute.nvgpu.warpgroup.commit_group()
        cute.nvgpu.warpgroup.wait_group(0)
        self.add_group(acc, sums, keys, scales, power, self.fp8_chunks // self.group_chunks - 1, thread.warp, lane)
        return largest

    @cute.jit
    def add_group(self, acc, sums, keys, scales, power, group: cutlass.Constexpr, warp, lane):
        """acc += sums * scale * power, with the key's scale of group `group`. With d = 576, `scales` already includes
        `power`."""
        for r in cutlass.range_constexpr(2):
            scale = Float32(1.0)
            if const_expr(self.kv.has_rope):
                scale = scales[r][group]
            else:
                place = keys + self.kv.scales + (warp * 16 + 8 * r + spread_key(lane >> 2)) * 8 + group
                # Scale byte 0 means 2^-127, but the shift gives 0. A key has 448 e4m3 channels, and an e4m3 value is at
                # most 448. So a score loses at most 448 * 448 * 2^-127 < 2^-109 times the largest |q|, which does not
                # show in a logit. Scale byte 255 means NaN, but the shift gives infinity; `share_scales` makes the
                # scores of such a key NaN.
                scale = (load_byte(place) << 23).bitcast(Float32) * power
            for i in cutlass.range_constexpr(self.columns):
                at = i // 2 * 4 + 2 * r + i % 2
                acc[at] = cute.math.fma(sums[at], scale, acc[at])

    def read_chunk(self, first, r: int, chunk: int, lane) -> list:
        """Return this lane's words of a chunk of key r, one of the lane's two keys (0 or 1): 16 e4m3 channels, or 8
        bf16 channels from each half of the chunk."""
        row = first + 8 * r * self.kv.pitch + (lane & 3) * 16
        if chunk < self.fp8_chunks:
            return [*load_16(row + K_CHUNK * chunk)]
        start = row + self.kv.row_bytes - 2 * K_CHUNK
        return [*load_16(start), *load_16(start + 64)]

    @cute.jit
    def share_scales(self, keys, exchange: SwapAbExchange, p_stage, largest, thread: Thread):
        """Fill the ScaleTable of stage `p_stage` of P with the scale factors for V. `keys` is the address of the tile's
        bytes.

        largest: the result of `multiply`. Return two lists with one element for each of the lane's two keys. P of a key
        is multiplied by 2^e. The first list has e as Int32. The second list has e as Float32, or NaN for a key with a
        NaN scale.
        """
        lane, table = opaque(thread.lane), exchange.scale_tables + p_stage * SCALE_TABLE_BYTES
        t, powers, exponents = lane & 3, [], []
        for r in cutlass.range_constexpr(2):
            key = thread.warp * 16 + 8 * r + spread_key(lane >> 2)
            if const_expr(self.kv.has_rope):
                own = load_4(keys + key * self.kv.pitch + HEAD_DIM_V + 4 * t)
                most = Int32(own & 0x7FFFFFFF)
            else:
                low, high = load_8(keys + self.kv.scales + key * 8)
                own, second = (low >> Uint32(8 * t)) & 255, (high >> Uint32(8 * t)) & 255
                # The largest bf16 value counts as a scale, too. The exponent of this value is reduced by 9, because
                # e4m3 values, which real scales multiply, are below 2^9.
                rope = (Int32(cutlass.max(largest[r] & 0x7FFF, (largest[r] >> 16) & 0x7FFF)) >> 7) - 9
                most = cutlass.max(Int32(own), rope)
                if t < 3:
                    most = cutlass.max(most, Int32(second))
            for log in cutlass.range_constexpr(2):
                most = cutlass.max(most, cute.arch.shuffle_sync_bfly(most, offset=1 << log))
            if const_expr(self.kv.has_rope):
                most = most >> 23
            power = cutlass.max(cutlass.min(most - 127, MOST_POWER), LEAST_POWER)
            exponent = Float32(power)
            if most == 255:
                exponent = Float32(float("nan"))
            factor = power_of_two(F16_ROOM - power)
            if const_expr(self.kv.has_rope):
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
