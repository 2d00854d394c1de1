"""The mainloop of the score warpgroups with swap A/B, for 16-bit and FP8 keys, and their online softmax.

The warpgroups take the tiles of keys in turns. The softmax turns S^T of 64 keys x heads into P^T.
P is relative to row_max, which may lag behind the true maximum by a factor of 2^RESCALE_THRESHOLD. A barrier
with an or-reduction tells whether the lag of any column is larger. Only then are the columns' true maxima
computed, which takes an exchange between the warps. With two score warpgroups, the warpgroups read and update
row_max in turns, in the order of the tiles. Each warpgroup has its own row_sum.
"""

import operator
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr

from dsa.cute.pipeline import PipelineState, state_at, state_at_of_two
from dsa.cute.shared_memory import pack, store_matrices
from dsa.cute.sm90 import LN2, WARPGROUP, opaque
from dsa.kernels.mla.limits import TILE_N
from dsa.kernels.mla.mla_attention import MlaShared
from dsa.kernels.mla.mla_epilogue import Results
from dsa.kernels.mla.mla_softmax import NO_MAX, RESCALE_THRESHOLD
from dsa.kernels.mla.swap_ab_exchange import F16_ROOM, HeadRange, NamedBarrier, SwapAbExchange, Thread
from dsa.kernels.mla.tile_scheduler import WorkTileInfo

# For FP8 caches P is scaled up by 2^RAISED. P is at most 2^(RESCALE_THRESHOLD + RAISED), which fits in f16,
# and a weight of 2^-31 of the largest does not underflow to 0.
RAISED = 7.0


@cute.jit
def vote_any(condition: Boolean, barrier_id: Int32, threads: cutlass.Constexpr):
    """Return whether the condition holds for any of the barrier's threads. All of them wait for each other."""
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
    """Return 2^exponent."""
    return ((exponent + 127) << 23).bitcast(Float32)


@cute.jit
def spread_key(row):
    """Return which of eight keys is row `row` of the wgmmas.

    Neighbouring rows are keys four apart, which are in different banks.
    """
    return (row >> 1) + ((row & 1) << 2)


class SwapAbScoreLoop:
    """The loop over tiles for `head_tile` heads of a query, 16, 32 or 64.

    score_warpgroups  number of score warpgroups
    p_dtype           of P
    key_exponents     whether each key comes with a power of two, which multiplies P but not row_sum. Then
                      each eight keys are in the order of `spread_key`, and O is also divided by 2^F16_ROOM
    with_max_logits   also write the maximum logits

    A kernel adds how Q is loaded and how a tile is scored:

    load_q(operands, shared, ring, heads, thread)
        Copy the work tile's Q, which came as tile `ring` of the ring, to its own memory. Return what
        `score_tile` needs to know of Q.
    score_tile(operands, shared, q_power, ring, tile_count, tile, max_logits, scale, thread)
        Compute P^T of tile `tile` of the work tile, whose first tile has the position `ring` in the ring and
        `tile_count` in P.
    """

    q_stages = 1  # stages of the ring that a work tile's Q takes

    def __init__(
        self,
        head_tile: int,
        score_warpgroups: int,
        p_dtype: type[cutlass.Numeric],
        key_exponents: bool,
        with_max_logits: bool = False,
    ):
        self.head_tile, self.score_warpgroups, self.p_dtype = head_tile, score_warpgroups, p_dtype
        self.key_exponents, self.with_max_logits = key_exponents, with_max_logits
        self.columns = head_tile // 4  # columns (heads) per lane
        self.raised = RAISED if key_exponents else 0.0

    @cute.jit
    def key_of(self, row):
        """Return which of eight keys is row `row` of the wgmmas."""
        if const_expr(self.key_exponents):
            row = spread_key(row)
        return row

    def number(self, thread: Thread):
        """Return the thread's index among those of the score warpgroups."""
        return thread.side * WARPGROUP + thread.tid

    def sync_warpgroup(self, thread: Thread):
        cute.arch.barrier(barrier_id=NamedBarrier.SCORE_WARPGROUP + thread.side, number_of_threads=WARPGROUP)

    def sync_score(self):
        cute.arch.barrier(barrier_id=NamedBarrier.SCORE, number_of_threads=self.score_warpgroups * WARPGROUP)

    @cute.jit
    def run(
        self,
        results: Results,
        operands,
        shared: MlaShared,
        heads: HeadRange,
        group,
        scale,
        thread: Thread,
    ):
        """Run a score warpgroup: all work tiles of this CTA."""
        pipeline, exchange, max_logits = shared.pipeline, shared.exchange, None
        if const_expr(self.with_max_logits):
            max_logits = cute.make_rmem_tensor((self.columns,), Float32)
        # Counts so far: tiles of the ring, work tiles, tiles of P.
        ring, work_count, tile_count, batch_idx = Int32(0), Int32(0), Int32(0), Int32(0)
        while batch_idx >= 0:
            work_state = state_at_of_two(work_count)
            work = pipeline.work.current(work_state)
            pipeline.work.release(work_state)
            batch_idx = work.batch_idx
            if batch_idx >= 0:
                # Wait until all score warpgroups are done with the previous Q.
                self.sync_score()
                q_power = self.load_q(operands, shared, ring, heads, thread)
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
                self.write_lse(results, exchange, work, heads, group, tile_count, end_state, max_logits, thread)
                work_count += 1

    @cute.jit
    def prologue(self, exchange: SwapAbExchange, thread: Thread):
        """Reset row_max and row_sum for a work tile. The caller must call `sync_score` afterwards."""
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
        """Write P^T of a tile's scores `acc` to shared memory, and the factors by which O^T must be multiplied
        first.

        valid_mask  a bit for each of the warp's keys
        powers      exponents of the lane's two keys, if `key_exponents`
        exponents   the same as Float32, NaN if a key's scale is
        max_logits  running maxima of the lane's columns, if `with_max_logits`
        p_state     state of P
        """
        scores, stage = cute.make_tensor(acc.iterator, cute.make_layout(self.head_tile // 2)), p_state.stage
        lane, number = opaque(thread.lane), opaque(self.number(thread))
        row_max = cute.make_tensor(
            exchange.row_max.iterator + (lane & 3) * 2, cute.make_layout((2, self.head_tile // 8), stride=(1, 8))
        )
        pair = cute.make_rmem_tensor((2,), Float32)
        # In place: convert the scores to log2, including the key's exponent.
        for r in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(self.columns):
                at = i // 2 * 4 + 2 * r + i % 2
                scores[at] = (
                    cute.math.fma(scores[at], scale, exponents[r]) if self.key_exponents else scores[at] * scale
                )
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
            # Warpgroup 0 goes first.
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
        # Lane 8 i + r addresses row r of matrix i; the matrices are 2 x 2, keys first, then heads.
        key = thread.warp * 16 + (lane & 8) + self.key_of(lane & 7)
        row_sum = cute.make_rmem_tensor((4,), Float32)
        without = [power_of_two(-power) for power in powers] if self.key_exponents else [Float32(1.0)] * 2
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
        """Rescale the thread's sums if the tile in stage `stage` of P changed row_max."""
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
        """Set row_max to the true maxima of the columns where it lags too much, and write the rescale factors."""
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
        heads: HeadRange,
        group,
        tile_count,
        end_state: PipelineState,
        max_logits,
        thread: Thread,
    ):
        """Write LSE of the work tile's heads, and the factors for O^T.

        tile_count: tiles scored so far; end_state: state of `inverse`.
        """
        tid, number = opaque(thread.tid), self.number(thread)
        if const_expr(self.score_warpgroups > 1):
            self.sync_score()
            if (tile_count & 1) == thread.side:
                # The other warpgroup scored the last tile.
                self.rescale_row_sum(exchange, thread.side ^ 1, thread)
        sums = cute.make_rmem_tensor((4, self.columns // 4), Float32)
        for j in cutlass.range_constexpr(self.columns // 4):
            cute.autovec_copy(exchange.row_sum[None, number, j], sums[None, j])
        self.over_warp(exchange, [sums[c] for c in range(self.columns)], operator.add, thread)
        self.sync_score()
        if thread.side == 0:
            exchange.end.producer_wait(end_state)
            if tid < self.head_tile:
                # Start with the warps that scored the work tile's first tile, so that the order of the sum
                # does not depend on earlier work tiles.
                turned = 4 * (tile_count - work.tiles & self.score_warpgroups - 1)
                row_sum = exchange.by_warp[tid, turned]
                for w in cutlass.range_constexpr(1, 4 * self.score_warpgroups):
                    row_sum += exchange.by_warp[tid, w ^ turned]
                inverse, lse = Float32(0.0), Float32(float("inf"))
                if work.split_idx >= 0:
                    lse = -Float32(float("inf"))
                if row_sum != 0.0:
                    whole, row_max = row_sum, exchange.row_max[tid]
                    if work.split_idx < 0:
                        whole += cute.math.exp2(results.sink[tid] - row_max)
                    inverse = (2.0**-F16_ROOM if self.key_exponents else 1.0) / whole
                    lse = (row_max + cute.math.log2(row_sum)) * LN2
                exchange.inverse[tid] = inverse
                row = heads.first + tid
                if row < heads.total:
                    if work.split_idx >= 0:
                        results.lse_partial[work.split_idx, 0, row] = lse
                    else:
                        sequence, query = divmod(work.batch_idx, group)
                        results.lse[sequence, row, query] = lse
            cute.arch.sync_warp()
            exchange.end.producer_commit(end_state)
        if const_expr(self.with_max_logits):
            # by_warp is reused: wait until its sums have been read.
            self.sync_score()
            self.over_warp(exchange, [max_logits[c] for c in range(self.columns)], cute.arch.fmax, thread)
            self.sync_score()
            if tid < self.head_tile and heads.first + tid < heads.total:
                head_max = exchange.by_warp[tid, 0]
                for w in cutlass.range_constexpr(1, 4 * self.score_warpgroups):
                    head_max = cute.arch.fmax(head_max, exchange.by_warp[tid, w])
                results.max_logits[work.batch_idx, heads.first + tid] = head_max * LN2

    @cute.jit
    def over_warp(self, exchange: SwapAbExchange, values: list, combine: Callable, thread: Thread):
        """Reduce the lanes' column values over the warp, and write the results to `by_warp`.

        All columns are reduced together. One after the other, each would wait for three shuffles.
        """
        lane = opaque(thread.lane)
        for log in cutlass.range_constexpr(2, 5):
            others = [cute.arch.shuffle_sync_bfly(value, offset=1 << log) for value in values]
            values = [combine(value, other) for value, other in zip(values, others)]
        if lane >> 2 == 0:
            for c in cutlass.range_constexpr(self.columns):
                exchange.by_warp[c // 2 * 8 + (lane & 3) * 2 + c % 2, thread.side * 4 + thread.warp] = values[c]
