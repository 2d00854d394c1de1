"""The output warpgroups for an FP8 cache, with swap A/B: O^T += V^T P^T, and the store of O.

Each warpgroup has 256 channels x `head_tile` of O^T, and each warp has 64 of these channels. A lane has eight of the
warp's channels: 4 (lane / 4) to 4 (lane / 4) + 3, and the four channels 32 above these. The warpgroup computes four
wgmma products of 64 rows (channels), 16 rows per warp. Product j has the (2 j)-th and (2 j + 1)-th of a lane's eight
channels, in rows lane / 4 and lane / 4 + 8 of the warp's 16 rows.

An e4m3 value is exact in f16. A value times its scale factor is rounded to f16 (ScaleTable in
swap_ab_exchange.py).
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Uint32, const_expr

from dsa.cute.pipeline import PipelineState, start, state_at_of_two
from dsa.cute.shared_memory import load_4, load_8, pack
from dsa.cute.sm90 import opaque
from dsa.kernels.mla.fp8_kv_convert import halves_of_two, interleave, times, times_split, times_to_f16
from dsa.kernels.mla.fp8_kv_gather import Fp8KvPipeline
from dsa.kernels.mla.limits import HEAD_DIM_V, TILE_N
from dsa.kernels.mla.mla_roles import Coord, MlaShared, Results, Thread, WorkTileInfo
from dsa.kernels.mla.mla_tiles import K16, K_CHUNK, ROPE_CHUNK, tiled_mma
from dsa.kernels.mla.swap_ab_attention import SwapAbAttention, ValueOperands
from dsa.kernels.mla.swap_ab_exchange import SCALE_TABLE_BYTES, SwapAbExchange

LAST_CHUNK = ROPE_CHUNK - 1  # last chunk of the value; bf16 if keys have 512 channels


class Fp8KvValues(SwapAbAttention):
    """The output warpgroups for keys in `kv` and `head_tile` heads of a query, 16, 32 or 64."""

    @property
    def ahead(self) -> bool:
        """Whether to load the values and factors of a step during the previous step. Other variants lack the registers
        for it.
        """
        return self.kv.has_rope and self.head_tile < 32

    def value_mma(self) -> cute.TiledMma:
        return tiled_mma(Float16, "K MN", (TILE_N, self.head_tile), a_in_registers=True)

    @cute.jit
    def output(self, results: Results, shared: MlaShared, mmas, group, coord: Coord):
        thread = Thread(coord.warp // 4 - self.score_warpgroups, coord.warp % 4, coord.lane)
        # V^T in registers: two buffers, each with the operands of two wgmma products over 16 keys.
        v = cute.make_rmem_tensor((*mmas[1].get_slice(thread.tid).partition_shape_A((TILE_N, K16)), 2, 2), Float16)
        self.output_mainloop(results, mmas[1], v, shared, start(), group, coord._replace(thread=thread))

    @cute.jit
    def skip_q(self, pipeline: Fp8KvPipeline, state: PipelineState) -> PipelineState:
        for _ in cutlass.range_constexpr(self.kv.q_stages):
            # Wait for Q's stages, too. A parity wait cannot tell apart phases that differ by two, so a wait must not
            # skip a phase.
            pipeline.kv.consumer_wait(state)
            pipeline.kv.consumer_release(state)
            state = pipeline.kv.advance(state)
        return state

    def chunk_of(self, thread: Thread):
        """Return the index of the warp's 64-channel chunk of the value."""
        return thread.side * 4 + thread.warp

    @cute.jit
    def add_tile(
        self,
        operands: ValueOperands,
        shared: MlaShared,
        state: PipelineState,
        tile_count,
        thread: Thread,
    ) -> PipelineState:
        pipeline, exchange, chunk = shared.pipeline, shared.exchange, self.chunk_of(thread)
        pipeline.kv.consumer_wait(state)
        lane = opaque(thread.lane)
        first = shared.kv + state.stage * self.kv.stage_bytes + (lane & 3) * 2 * self.kv.pitch
        first += chunk * K_CHUNK + (lane >> 2) * 4
        numbers = self.numbers_of(first, 0, 0) if self.ahead else None
        p_state = state_at_of_two(tile_count)
        exchange.p_pipeline.consumer_wait(p_state)
        self.rescale(operands.flat, exchange, p_state.stage, thread.lane)
        scales = self.table.of_block(exchange.scale_tables + p_state.stage * SCALE_TABLE_BYTES, chunk)
        scales += (lane & 3) * self.table.entry
        self.add(operands, first, scales, numbers, p_state.stage, chunk, lane)
        cute.arch.sync_warp()
        pipeline.kv.consumer_release(state)
        cute.nvgpu.warpgroup.wait_group(0)
        exchange.p_pipeline.consumer_release(p_state)
        return pipeline.kv.advance(state)

    @cute.jit
    def write(
        self,
        operands: ValueOperands,
        results: Results,
        shared: MlaShared,
        work: WorkTileInfo,
        group,
        coord: Coord,
    ):
        if work.split_idx >= 0:
            rows = results.out_partial[work.split_idx, 0, None, None]
            self.write_rows(operands, shared.exchange, rows, coord)
        else:
            sequence, query = divmod(work.batch_idx, group)
            self.write_rows(operands, shared.exchange, results.out[sequence, query, None, None], coord)

    @cute.jit
    def write_rows(self, operands: ValueOperands, exchange: SwapAbExchange, rows, coord: Coord):
        """Write O to the `rows` [heads, 512] of a query or split.

        The rows of adjacent heads are adjacent, so a lane's elements are at constant offsets from the lane's first
        element.
        """
        lane = opaque(coord.thread.lane)
        channel = self.chunk_of(coord.thread) * K_CHUNK + (lane >> 2) * 4
        first = coord.first_head + self.head_of(0, lane)
        own = cute.local_tile(rows, (1, 4), (first, channel // 4))
        inverses = Int32(exchange.inverse.iterator.toint()) + 4 * self.head_of(0, lane)
        # Load all factors before the first branch. If the loads were inside the branches, the lane would wait for each
        # load separately.
        pairs = [load_8(inverses + 4 * self.head_of(c, 0)) for c in range(0, self.columns, 2)]
        for c in cutlass.range_constexpr(self.columns):
            further, inverse = self.head_of(c, 0), pairs[c // 2][c % 2].bitcast(Float32)
            numbers = [operands.flat[self.element(c, j)] * inverse for j in range(8)]
            if first + further < coord.heads:
                for half in cutlass.range_constexpr(2):
                    place = own.iterator + (further * HEAD_DIM_V + 32 * half)
                    self.store(numbers[4 * half : 4 * half + 4], cute.make_tensor(place, cute.make_layout(4)))

    @cute.jit
    def add(self, operands: ValueOperands, first, scales, numbers, p_stage, chunk, lane):
        """Issue O^T += V^T P^T of a tile. At the return the lane has read the tile's bytes, but the last products can
        still be in flight.

        first    address of the lane's first key in the tile, at the lane's first channel
        scales   address of the scale factors of the lane's first pair of keys
        numbers  if `ahead`: the result of `numbers_of` for the first step and half; otherwise None
        """
        # The layout of `words`: [2 channels of a product, 2 halves of 16 keys, 2 products, 2 buffers].
        words = cute.make_tensor(cute.recast_ptr(operands.v.iterator, dtype=Uint32), cute.make_layout((2, 2, 2, 2)))
        factors = self.factors_of(scales, 0) if self.ahead else None
        for s in cutlass.range_constexpr(TILE_N // K16):
            for half in cutlass.range_constexpr(2):
                if const_expr(self.ahead):
                    following, next_factors = numbers, factors
                    if const_expr(2 * s + half + 1 < 2 * TILE_N // K16):
                        following = self.numbers_of(first, s + half, 1 - half)
                        if const_expr(half == 1):
                            next_factors = self.factors_of(scales, s + 1)
                    self.from_bytes(words, numbers, factors, s, half)
                    numbers, factors = following, next_factors
                elif const_expr(self.kv.has_rope):
                    self.from_bytes(words, self.numbers_of(first, s, half), self.factors_of(scales, s), s, half)
                elif chunk == LAST_CHUNK:
                    self.from_numbers(words, first + (lane >> 2) * 4, scales, s, half)
                else:
                    self.from_bytes(words, self.numbers_of(first, s, half), self.factors_of(scales, s), s, half)
                self.start_products(operands, p_stage, s, half)

    def row(self, i: int, s: int) -> int:
        """Return the byte offset of the lane's i-th key (0 to 3) of step s from the lane's first key. A step has 16
        keys."""
        return (16 * s + i % 2 + i // 2 * 8) * self.kv.pitch

    def numbers_of(self, first, s: int, half: int) -> list:
        """Return four words, one for each of the lane's four keys in step s. A word has four e4m3 channels: half `half`
        of the lane's eight channels."""
        return [load_4(first + self.row(i, s) + 32 * half) for i in range(4)]

    def factors_of(self, scales, s: int) -> list:
        """Return the scale factors of the lane's four keys in step s, one `ScaleTable.pair` per pair of keys."""
        return [self.table.pair(scales, 8 * s + 4 * k) for k in range(2)]

    @cute.jit
    def from_bytes(self, words, numbers, factors, s: cutlass.Constexpr, half: cutlass.Constexpr):
        """Write V^T operands of two products over the 16 keys of step s to `words`: e4m3 values times their scale
        factors."""
        multiply = times_split if self.table.split else times
        if const_expr(s > 0):
            cute.nvgpu.warpgroup.wait_group(1)
        for k in cutlass.range_constexpr(2):
            four = halves_of_two(numbers[2 * k], numbers[2 * k + 1])
            for i in cutlass.range_constexpr(4):
                words[i % 2, k, i // 2, half] = multiply(four[i], *factors[k])

    @cute.jit
    def from_numbers(self, words, first, scales, s: cutlass.Constexpr, half: cutlass.Constexpr):
        """Write V^T operands of two products over the 16 keys of step s to `words`: bf16 values times their scale
        factors. Only for keys of 512 channels."""
        numbers = [load_8(first + self.row(i, s) + 64 * half) for i in range(4)]
        if const_expr(s > 0):
            cute.nvgpu.warpgroup.wait_group(1)
        for k in cutlass.range_constexpr(2):
            factors = self.table.pair(scales, 8 * s + 4 * k)[0]
            low, high = (factors << 16).bitcast(Float32), (factors & Uint32(0xFFFF0000)).bitcast(Float32)
            for j in cutlass.range_constexpr(2):
                pairs = interleave(numbers[2 * k][j], numbers[2 * k + 1][j])
                for i in cutlass.range_constexpr(2):
                    words[i, k, j, half] = times_to_f16(pairs[i], low, high)

    @cute.jit
    def start_products(self, operands: ValueOperands, p_stage, s: cutlass.Constexpr, half: cutlass.Constexpr):
        """Issue two of the four products over the keys of step s: those of half `half` of the lane's channels."""
        cute.nvgpu.warpgroup.fence()
        for j in cutlass.range_constexpr(2):
            acc, v = operands.accs[2 * half + j], operands.v[None, None, 0, j, half]
            cute.gemm(operands.mma, acc, v, operands.p[None, None, s, p_stage], acc)
        cute.nvgpu.warpgroup.commit_group()

    @cute.jit
    def store(self, four, part):
        """Store the fp32 values `four` to four adjacent channels of a row, in the row's dtype: bf16 (out) or fp32
        (partial results)."""
        if const_expr(part.element_type is BFloat16):
            words = cute.make_rmem_tensor((2,), Uint32)
            words[0], words[1] = pack(four[0], four[1], BFloat16), pack(four[2], four[3], BFloat16)
            cute.autovec_copy(cute.recast_tensor(words, BFloat16), part)
        else:
            vector = cute.make_rmem_tensor((4,), Float32)
            for j in cutlass.range_constexpr(4):
                vector[j] = four[j]
            cute.autovec_copy(vector, part)
