"""The mainloops and the softmax of the consumer warpgroups of sparse MLA with swap A/B, for 16-bit and FP8 keys.

There are one or two score warpgroups; two take the tiles of keys in turns. The online softmax converts S^T of a tile,
64 keys x `head_tile` heads, to P^T. The two output warpgroups accumulate O^T += V^T P^T. Each has 256 channels x
`head_tile` of O^T.

P = 2^(score - row_max), with a row_max per head. The true maximum can exceed row_max by up to RESCALE_THRESHOLD, in
log2. The score warpgroup of a tile checks with an or-reducing barrier whether any column (head) of the tile exceeds
this limit. Only then do its warps compute the columns' true maxima, for which they exchange data through shared memory.
Two score warpgroups read and update row_max in turns, in the order of the tiles. Each score warpgroup has a row_sum of
the tiles that it scores.
"""

import operator
from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr

from dsa.cute.pipeline import PipelineState, state_at, state_at_of_two
from dsa.cute.shared_memory import pack, store_matrices
from dsa.cute.sm90 import LN2, WARPGROUP, opaque
from dsa.kernels.mla.limits import TILE_N
from dsa.kernels.mla.mla_roles import Coord, MlaShared, Results, RoleRegisters, Thread, WorkTileInfo
from dsa.kernels.mla.mla_softmax import NO_MAX, RESCALE_THRESHOLD
from dsa.kernels.mla.sparse_mla_kernel import SparseMlaKernel
from dsa.kernels.mla.swap_ab_exchange import F16_ROOM, NamedBarrier, SwapAbExchange, SwapAbExchangeMemory
from dsa.kernels.mla.topk_gather import TopkGather

# For FP8 caches, P is f16, and row_max is RAISED lower, so that P is 2^RAISED times as large. P is then at most
# 2^(RESCALE_THRESHOLD + RAISED), which fits in f16. A head's largest P is at least 2^RAISED, so a P that is 2^-31 of
# the largest is 2^-24 or more and does not underflow to 0.
RAISED = 7.0


@cute.jit
def vote_any(condition: Boolean, barrier_id: Int32, threads: cutlass.Constexpr):
    """Return whether the condition holds for at least one of the barrier's threads. The threads wait for each other."""
    own = Int32(1) if condition else Int32(0)
    found = cute.arch.inline_ptx(
        "{{ .reg .pred p, q; setp.ne.s32 q, {$r0}, 0; "
        f"barrier.cta.red.or.pred p, {{$r1}}, {threads}, q; "
        "selp.s32 {$w0}, 1, 0, p; }}",
        write_only_types=[Int32],
        read_only_args=[own, Int32(barrier_id)],
    )
    return found != 0


@cute.jit
def power_of_two(exponent: Int32) -> Float32:
    """Return 2^exponent, for exponents from -126 to 127."""
    return ((exponent + 127) << 23).bitcast(Float32)


@cute.jit
def spread_key(row):
    """Return the index, among eight adjacent keys, of the key that is row `row` of the wgmma operand K in S^T = K Q^T.

    Rows 2 i and 2 i + 1, which a warp reads at the same time, are keys i and i + 4: their bytes are in different banks
    (fp8_kv_gather.py).
    """
    return (row >> 1) + ((row & 1) << 2)


class ValueOperands(NamedTuple):
    """For O^T += V^T P^T: tiled MMA, V^T (`v`) and P^T (`p`) as wgmma operands, accumulators of O^T (`accs`). flat: a
    one-dimensional view of all accumulators."""

    mma: cute.TiledMma
    v: cute.Tensor
    p: cute.Tensor
    accs: list[cute.Tensor]
    flat: cute.Tensor


class SwapAbAttention(SparseMlaKernel):
    """Sparse MLA with swap A/B, for `head_tile` heads of a query per CTA, 16, 32 or 64.

    dtype            dtype of Q and P; None for an FP8 cache (see `SwapAbExchangeMemory`)
    with_max_logits  also write the maximum logits; not for an FP8 cache

    With an FP8 cache (`fp8_kv`) there are three differences. Each key has a power of two (ScaleTable), which multiplies
    P but not row_sum. In the rows of the wgmma operand K and of S^T, each eight adjacent keys are in the order of
    `spread_key`. O is also divided by 2^F16_ROOM.

    A kernel defines how Q is loaded, how a tile is scored and multiplied, and how O^T is written:

    load_q(operands, shared, ring, coord)
        Copy the work tile's Q, which begins at tile number `ring` of the ring of keys, to the memory of Q. Return
        `q_power` for `score_tile`: the power of two by which Q was divided, or None if Q was not divided.
    score_tile(operands, shared, q_power, ring, tile_count, tile, max_logits, scale, thread)
        Compute P^T of tile `tile` of the work tile. The work tile's first tile is number `ring` of the ring of
        keys and number `tile_count` of the tiles of P.
    skip_q(pipeline, state)
        Return the ring state after the stages with a work tile's Q, which an output warpgroup does not read.
    add_tile(operands, shared, state, tile_count, thread)
        Compute O^T += V^T P^T of the next tile, which is number `tile_count` of the tiles of P. Return the
        ring state after the tile.
    write(operands, results, shared, work, group, coord)
        Write O^T times `inverse` to the result, or to the partial result of a split.
    """

    q_stages = 1  # stages of the ring that a work tile's Q occupies
    acc_channels = TILE_N  # channels of an accumulator of O^T

    def __init__(
        self,
        kv: TopkGather,
        dtype: type[cutlass.Numeric] | None,
        head_tile: int,
        score_warpgroups: int,
        registers: RoleRegisters,
        with_max_logits: bool = False,
    ):
        memory = SwapAbExchangeMemory(dtype, kv.head_dim, head_tile, score_warpgroups)
        super().__init__(kv, memory, head_tile, score_warpgroups, registers)
        self.fp8_kv, self.p_dtype, self.with_max_logits = memory.fp8_kv, memory.p_dtype, with_max_logits
        self.columns, self.raised = head_tile // 4, RAISED if self.fp8_kv else 0.0  # columns (heads) per lane

    def key_of(self, row):
        return spread_key(row) if self.fp8_kv else row

    def number(self, thread: Thread):
        """Return the thread's index among the threads of all score warpgroups."""
        return thread.side * WARPGROUP + thread.tid

    def sync_warpgroup(self, thread: Thread):
        cute.arch.barrier(barrier_id=NamedBarrier.SCORE_WARPGROUP + thread.side, number_of_threads=WARPGROUP)

    def sync_score(self):
        cute.arch.barrier(barrier_id=NamedBarrier.SCORE, number_of_threads=self.score_warpgroups * WARPGROUP)

    @cute.jit
    def score_mainloop(
        self,
        results: Results,
        operands,
        shared: MlaShared,
        group,
        scale,
        coord: Coord,
    ):
        pipeline, exchange, thread, max_logits = shared.pipeline, shared.exchange, coord.thread, None
        if const_expr(self.with_max_logits):
            max_logits = cute.make_rmem_tensor((self.columns,), Float32)
        # Counts so far: `ring` counts tiles in the ring of keys, including those of Q; `work_count` counts work tiles;
        # `tile_count` counts tiles of P.
        ring, work_count, tile_count, batch_idx = Int32(0), Int32(0), Int32(0), Int32(0)
        while batch_idx >= 0:
            work_state = state_at_of_two(work_count)
            work = pipeline.work.current(work_state)
            pipeline.work.release(work_state)
            batch_idx = work.batch_idx
            if batch_idx >= 0:
                # Wait until all score warpgroups are done with the previous work tile's Q.
                self.sync_score()
                q_power = self.load_q(operands, shared, ring, coord)
                ring += self.q_stages
                self.prologue(exchange, thread)
                if const_expr(self.with_max_logits):
                    max_logits.fill(-float("inf"))
                cute.arch.fence_proxy("async.shared", space="cta")
                self.sync_score()
                first = (tile_count ^ thread.side) & (self.score_warpgroups - 1)
                for tile in cutlass.range(first, work.tiles, self.score_warpgroups, unroll=1):
                    self.score_tile(operands, shared, q_power, ring, tile_count, tile, max_logits, scale, thread)
                ring, tile_count = ring + work.tiles, tile_count + work.tiles
                end_state = state_at(work_count, 1)
                self.write_lse(results, exchange, work, group, tile_count, end_state, max_logits, coord)
                work_count += 1

    @cute.jit
    def prologue(self, exchange: SwapAbExchange, thread: Thread):
        """Reset row_max and row_sum for a work tile. The caller must call `sync_score` before the first tile is
        scored."""
        zeros = cute.make_rmem_tensor((4,), Float32)
        zeros.fill(0.0)
        if thread.side == 0 and thread.tid < self.head_tile:
            exchange.row_max[thread.tid] = Float32(NO_MAX)
        for i in cutlass.range_constexpr(self.columns // 4):
            cute.autovec_copy(zeros, exchange.row_sum[None, self.number(thread), i])

    @cute.jit
    def softmax(
        self,
        acc,
        exchange: SwapAbExchange,
        valid_mask,
        powers,
        exponents,
        max_logits,
        scale,
        p_state: PipelineState,
        thread: Thread,
    ):
        """Convert the scores `acc` (S^T, overwritten) of a tile to P^T in shared memory. Update row_max and row_sum. If
        row_max is raised, also write the factors by which O^T must be multiplied before V^T P^T is added.

        valid_mask  a bit for each of the warp's 16 keys
        powers      if `fp8_kv`: an Int32 exponent e for each of the lane's two keys; otherwise None. P in shared memory
                    contains the factor 2^e, row_sum does not
        exponents   `powers` as Float32, which is added to the scores in log2; NaN for a key with a NaN scale
        max_logits  if `with_max_logits`: running maxima of the lane's columns, which are updated; otherwise None
        scale       softmax scale * log2(e)
        p_state     stage of P to write
        """
        scores, stage = cute.make_tensor(acc.iterator, cute.make_layout(self.head_tile // 2)), p_state.stage
        lane, number = opaque(thread.lane), opaque(self.number(thread))
        row_max = cute.make_tensor(
            exchange.row_max.iterator + (lane & 3) * 2, cute.make_layout((2, self.head_tile // 8), stride=(1, 8))
        )
        pair = cute.make_rmem_tensor((2,), Float32)
        # In place: scale the scores to log2 and, for FP8 keys, add the exponent of the key's power of two.
        for r in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(self.columns):
                at = i // 2 * 4 + 2 * r + i % 2
                scores[at] = cute.math.fma(scores[at], scale, exponents[r]) if self.fp8_kv else scores[at] * scale
        if valid_mask != 0xFFFF:
            for r in cutlass.range_constexpr(2):
                if (valid_mask >> Uint32(8 * r + self.key_of(lane >> 2))) & 1 == 0:
                    for i in cutlass.range_constexpr(self.columns):
                        scores[i // 2 * 4 + 2 * r + i % 2] = -Float32(float("inf"))
        if const_expr(self.with_max_logits):
            for c in cutlass.range_constexpr(self.columns):
                at = c // 2 * 4 + c % 2
                max_logits[c] = cute.arch.fmax(max_logits[c], cute.arch.fmax(scores[at], scores[at + 2]))
        if const_expr(self.score_warpgroups > 1):
            # Wait for this warpgroup's turn to read row_max; warpgroup 0 is first. The other warpgroup has scored the
            # previous tile. If it raised row_max for that tile, this warpgroup rescales its row_sum.
            exchange.order.wait(p_state.phase ^ 1 ^ thread.side, stage)
            self.rescale_row_sum(exchange, stage ^ 1, thread)
        excess = -Float32(float("inf"))
        for n in cutlass.range_constexpr(self.head_tile // 8):
            cute.autovec_copy(row_max[None, n], pair)
            for i in cutlass.range_constexpr(2):
                excess = cute.arch.fmax(excess, cute.arch.fmax(scores[4 * n + i], scores[4 * n + 2 + i]) - pair[i])
        rescales = vote_any(excess > RESCALE_THRESHOLD + self.raised, NamedBarrier.VOTE + thread.side, WARPGROUP)
        if rescales:
            self.raise_row_max(scores, exchange, stage, thread)
        if thread.warp == 0:
            with cute.arch.elect_one():
                exchange.rescaled[stage] = Int32(1) if rescales else Int32(0)
        if rescales:
            self.sync_warpgroup(thread)
            self.rescale_row_sum(exchange, stage, thread)
        own_row_max = row_max
        if const_expr(self.score_warpgroups > 1):
            own_row_max = cute.make_rmem_tensor((2, self.head_tile // 8), Float32)
            for n in cutlass.range_constexpr(self.head_tile // 8):
                cute.autovec_copy(row_max[None, n], own_row_max[None, n])
            cute.arch.sync_warp()
            exchange.order.arrive(stage ^ 1)
        start = Int32(exchange.p.iterator.toint()) + stage * (2 * TILE_N * self.head_tile)
        # For stmatrix, lane 8 i + r addresses row r of matrix i. The four matrices are 16 keys x 16 heads of P^T:
        # matrix i has half i % 2 of the keys and half i / 2 of the heads.
        key = thread.warp * 16 + (lane & 8) + self.key_of(lane & 7)
        row_sum = cute.make_rmem_tensor((4,), Float32)
        without = [power_of_two(-power) for power in powers] if self.fp8_kv else [Float32(1.0)] * 2
        for j in cutlass.range_constexpr(self.head_tile // 16):
            weights = []
            cute.autovec_copy(exchange.row_sum[None, number, j], row_sum)
            for i in cutlass.range_constexpr(8):
                if const_expr(i % 4 == 0):
                    cute.autovec_copy(own_row_max[None, 2 * j + i // 4], pair)
                weight = cute.math.exp2(scores[8 * j + i] - pair[i % 2], fastmath=True)
                at = i // 4 * 2 + i % 2
                row_sum[at] = cute.math.fma(weight, without[i // 2 % 2], row_sum[at])
                weights.append(weight)
            cute.autovec_copy(row_sum, exchange.row_sum[None, number, j])
            words = [pack(weights[2 * i], weights[2 * i + 1], self.p_dtype) for i in range(4)]
            offset = key * (2 * self.head_tile) + (2 * j + (lane >> 4)) * 16
            store_matrices(start + (offset ^ ((offset >> 3) & (2 * self.head_tile - 16))), words)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        exchange.p_pipeline.producer_commit(p_state)

    @cute.jit
    def rescale_row_sum(self, exchange: SwapAbExchange, stage, thread: Thread):
        """If the tile in stage `stage` of P raised row_max, multiply the thread's part of row_sum by the tile's rescale
        factors."""
        lane, number = opaque(thread.lane), opaque(self.number(thread))
        if exchange.rescaled[stage] != 0:
            row_sum = cute.make_rmem_tensor((4,), Float32)
            for j in cutlass.range_constexpr(self.columns // 4):
                cute.autovec_copy(exchange.row_sum[None, number, j], row_sum)
                for i in cutlass.range_constexpr(4):
                    row_sum[i] *= exchange.rescale[16 * j + i // 2 * 8 + (lane & 3) * 2 + i % 2, stage]
                cute.autovec_copy(row_sum, exchange.row_sum[None, number, j])

    @cute.jit
    def raise_row_max(self, scores, exchange: SwapAbExchange, stage, thread: Thread):
        """Set row_max to the tile's true maximum minus `raised` in the columns where this raises row_max by more than
        RESCALE_THRESHOLD. Write the rescale factors of all columns; they are 1 where row_max stays.
        """
        tid, column_max = opaque(thread.tid), []
        for c in cutlass.range_constexpr(self.columns):
            column_max.append(cute.arch.fmax(scores[c // 2 * 4 + c % 2], scores[c // 2 * 4 + 2 + c % 2]))
        self.over_warp(exchange, column_max, cute.arch.fmax, thread)
        self.sync_warpgroup(thread)
        if tid < self.head_tile:
            head_max = exchange.by_warp[tid, thread.side * 4]
            for w in cutlass.range_constexpr(1, 4):
                head_max = cute.arch.fmax(head_max, exchange.by_warp[tid, thread.side * 4 + w])
            head_max -= self.raised
            factor, row_max = Float32(1.0), exchange.row_max[tid]
            if head_max > row_max + RESCALE_THRESHOLD:
                factor = cute.math.exp2(row_max - head_max, fastmath=True)
                exchange.row_max[tid] = head_max
            exchange.rescale[tid, stage] = factor

    @cute.jit
    def write_lse(
        self,
        results: Results,
        exchange: SwapAbExchange,
        work: WorkTileInfo,
        group,
        tile_count,
        end_state: PipelineState,
        max_logits,
        coord: Coord,
    ):
        """Write LSE of the work tile's heads, and the maximum logits if `with_max_logits`. Pass
        `SwapAbExchange.inverse`, the factors of O^T, to the output warpgroups.

        LSE is a natural logarithm and does not include the attention sink. Without keys it is +inf, or -inf in a split.

        tile_count  number of tiles of P so far, including those of this work tile
        end_state   state of the pipeline `end`
        """
        thread, first, heads = coord.thread, coord.first_head, coord.heads
        tid, number = opaque(thread.tid), self.number(thread)
        if const_expr(self.score_warpgroups > 1):
            self.sync_score()
            if (tile_count & 1) == thread.side:
                # The other warpgroup scored the last tile. If it raised row_max, this warpgroup rescales its row_sum.
                self.rescale_row_sum(exchange, thread.side ^ 1, thread)
        sums = cute.make_rmem_tensor((4, self.columns // 4), Float32)
        for j in cutlass.range_constexpr(self.columns // 4):
            cute.autovec_copy(exchange.row_sum[None, number, j], sums[None, j])
        self.over_warp(exchange, [sums[c] for c in range(self.columns)], operator.add, thread)
        self.sync_score()
        if thread.side == 0:
            exchange.end.producer_wait(end_state)
            if tid < self.head_tile:
                # Start with the warps that scored the work tile's first tile. So the order of the additions does not
                # depend on earlier work tiles.
                rotation = 4 * (tile_count - work.tiles & self.score_warpgroups - 1)
                row_sum = exchange.by_warp[tid, rotation]
                for w in cutlass.range_constexpr(1, 4 * self.score_warpgroups):
                    row_sum += exchange.by_warp[tid, w ^ rotation]
                inverse, lse = Float32(0.0), Float32(float("inf"))
                if work.split_idx >= 0:
                    lse = -Float32(float("inf"))
                if row_sum != 0.0:
                    whole, row_max = row_sum, exchange.row_max[tid]
                    if work.split_idx < 0:
                        whole += cute.math.exp2(results.sink[tid] - row_max)
                    inverse = (2.0**-F16_ROOM if self.fp8_kv else 1.0) / whole
                    lse = (row_max + cute.math.log2(row_sum)) * LN2
                exchange.inverse[tid] = inverse
                row = first + tid
                if row < heads:
                    if work.split_idx >= 0:
                        results.lse_partial[work.split_idx, 0, row] = lse
                    else:
                        sequence, query = divmod(work.batch_idx, group)
                        results.lse[sequence, row, query] = lse
            cute.arch.sync_warp()
            exchange.end.producer_commit(end_state)
        if const_expr(self.with_max_logits):
            # The maxima overwrite the sums in by_warp, so wait until warpgroup 0 has read the sums.
            self.sync_score()
            self.over_warp(exchange, [max_logits[c] for c in range(self.columns)], cute.arch.fmax, thread)
            self.sync_score()
            if tid < self.head_tile and first + tid < heads:
                head_max = exchange.by_warp[tid, 0]
                for w in cutlass.range_constexpr(1, 4 * self.score_warpgroups):
                    head_max = cute.arch.fmax(head_max, exchange.by_warp[tid, w])
                results.max_logits[work.batch_idx, first + tid] = head_max * LN2

    @cute.jit
    def over_warp(self, exchange: SwapAbExchange, values: list, combine: Callable, thread: Thread):
        """Reduce the values of each column by `combine`, over the eight lanes of the warp that have the column. Write
        the results to `by_warp`.

        `values` has one value per column of the lane. All columns are reduced together, so that their shuffles overlap.
        Reduced one after the other, each column would wait for three shuffles.
        """
        lane = opaque(thread.lane)
        for log in cutlass.range_constexpr(2, 5):
            others = [cute.arch.shuffle_sync_bfly(value, offset=1 << log) for value in values]
            values = [combine(value, other) for value, other in zip(values, others)]
        if lane >> 2 == 0:
            for c in cutlass.range_constexpr(self.columns):
                exchange.by_warp[c // 2 * 8 + (lane & 3) * 2 + c % 2, thread.side * 4 + thread.warp] = values[c]

    def element(self, column: int, j: int) -> int:
        """Return the index in `flat` of the lane's j-th channel in a column of O^T.

        The warpgroup's 256 channels are the rows of four 64-row blocks of wgmmas. A lane has two rows of each block, so
        eight channels per column.
        """
        return j // 2 * (self.head_tile // 2) + column // 2 * 4 + j % 2 * 2 + column % 2

    def head_of(self, column: int, lane):
        """Return the head of the lane's column `column`, as an index among the CTA's heads."""
        return column // 2 * 8 + (lane & 3) * 2 + column % 2

    @cute.jit
    def rescale(self, acc, exchange: SwapAbExchange, p_stage, lane):
        """If the tile in stage `p_stage` of P raised row_max, multiply O^T by the tile's rescale factors."""
        if exchange.rescaled[p_stage] != 0:
            for c in cutlass.range_constexpr(self.columns):
                factor = exchange.rescale[self.head_of(c, lane), p_stage]
                for j in cutlass.range_constexpr(8):
                    acc[self.element(c, j)] *= factor

    @cute.jit
    def output_mainloop(
        self,
        results: Results,
        mma: cute.TiledMma,
        v: cute.Tensor,
        shared: MlaShared,
        state: PipelineState,
        group,
        coord: Coord,
    ):
        """Run an output warpgroup, which computes half of the channels of O^T, over all work tiles of this CTA.

        v      V^T as a wgmma operand
        state  the warpgroup's first state in the ring of tiles (FP8 keys) or of v chunks (16-bit keys)
        """
        pipeline, exchange, thread = shared.pipeline, shared.exchange, coord.thread
        thr = mma.get_slice(thread.tid)
        p = mma.make_fragment_B(thr.partition_B(exchange.p))
        flat = cute.make_rmem_tensor((2 * self.head_tile,), Float32)
        layout = cute.make_layout(thr.partition_shape_C((self.acc_channels, self.head_tile)))
        accs = [cute.make_tensor(flat.iterator + i, layout) for i in range(0, 2 * self.head_tile, cute.size(layout))]
        mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
        operands = ValueOperands(mma, v, p, accs, flat)
        work_count, tile_count, batch_idx = Int32(0), Int32(0), Int32(0)
        while batch_idx >= 0:
            work_state = state_at_of_two(work_count)
            work = pipeline.work.current(work_state)
            pipeline.work.release(work_state)
            batch_idx = work.batch_idx
            if batch_idx >= 0:
                flat.fill(0.0)
                state = self.skip_q(pipeline, state)
                for _ in cutlass.range(work.tiles, unroll=1):
                    state = self.add_tile(operands, shared, state, tile_count, thread)
                    tile_count += 1
                end_state = state_at(work_count, 1)
                exchange.end.consumer_wait(end_state)
                self.write(operands, results, shared, work, group, coord)
                cute.arch.sync_warp()
                exchange.end.consumer_release(end_state)
                work_count += 1
