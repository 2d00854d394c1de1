"""Mainloop parts that the kernels of scores over contiguous keys share: a consumer warpgroup's wgmma of a key tile, the
sums over heads, and each lane's score from the sums of its quad.

Each kernel's own loop chooses the key tiles and uses their scores:

    multiply(mma, scoring.acc, scoring.ra, scoring.rb, ring.index(state), q_stage)
    ...                                   # during the wgmma: the previous tile's epilogue, the choice of the next tile
    self.take_scales(scoring, k_scale, key)
    ...
    self.finish_tile(scoring, ring, state)
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from dsa.cute.pipeline import Pipeline
from dsa.cute.reductions import quad_reduce_scatter
from dsa.cute.shared_memory import load_8
from dsa.cute.sm90 import WARPGROUP
from dsa.kernels.indexer import half_scores
from dsa.kernels.indexer.score_tile import TILE, head_sum

RANGE_BARRIER = 1  # named barrier: a block's queries are in fp16's range


@dataclass(frozen=True)
class Scoring:
    """State of a consumer thread, in registers except for the operands. The thread has two keys of a tile, 8 apart.

    acc, flat  its accumulators, in the shapes that wgmma and `head_sum` take
    ra, rb     the wgmma operands, in shared memory
    sums       over the lane's heads: [query][key]; pairs of fp16 with fp16 accumulation
    scales     of the two keys
    w          weights of its columns: w / 2 in fp32, or pairs of fp16 with fp16 accumulation
    unit       power of two that the scores of each query are multiplied by, with fp16 accumulation
    """

    acc: cute.Tensor
    flat: cute.Tensor
    ra: cute.Tensor
    rb: cute.Tensor
    sums: cute.Tensor
    scales: cute.Tensor
    w: cute.Tensor
    unit: cute.Tensor


class ScoreMainloop:
    """Base of the kernels. They set heads, dim, half (fp16 accumulation), accumulators (their type), n (columns per
    tile), groups (consumer warpgroups), block_q (queries per block) and lane_q (queries per lane)."""

    def scoring(self, mma: cute.TiledMma, sq: cute.Tensor, sk: cute.Tensor, tid: Int32) -> Scoring:
        thr_mma = mma.get_slice(tid % WARPGROUP)
        ra, rb = mma.make_fragment_A(thr_mma.partition_A(sk)), mma.make_fragment_B(thr_mma.partition_B(sq))
        acc = cute.make_rmem_tensor(thr_mma.partition_shape_C((TILE, self.n)), self.accumulators)
        flat = cute.make_tensor(acc.iterator, cute.make_layout(self.n // 2))
        sums, scales = cute.make_rmem_tensor((2 * self.block_q,), Float32), cute.make_rmem_tensor((2,), Float32)
        scales.fill(0.0)
        # The order of these allocations, including the replaced ones, affects ptxas's register allocation.
        w = cute.make_rmem_tensor((self.n // 4,), Float32)
        unit = cute.make_rmem_tensor((self.lane_q,), Float32)
        if self.half:
            flat = cute.recast_tensor(flat, Uint32)
            sums = cute.make_rmem_tensor((2 * self.block_q,), Uint32)
            w = cute.make_rmem_tensor((self.n // 8,), Uint32)
        sums.fill(0)
        return Scoring(acc, flat, ra, rb, sums, scales, w, unit)

    def take_queries(
        self, scoring: Scoring, sq, factors, weights, block, queries, pipeline: Pipeline, q_state, tid, quad
    ):
        """Wait for a block's queries, and load its weights into registers."""
        if self.half:
            self.bring_into_range(scoring, sq, factors, weights, block, queries, pipeline, q_state, tid, quad)
            return
        for j in range(self.n // 8):
            t = cutlass.min(block * self.block_q + j * 8 // self.heads, queries - 1)
            for c in range(2):
                scoring.w[2 * j + c] = weights[t, j * 8 % self.heads + quad * 2 + c] * 0.5
        pipeline.consumer_wait(q_state)

    @cute.jit
    def bring_into_range(
        self, scoring: Scoring, sq, factors, weights, block, queries, pipeline: Pipeline, q_state, tid, quad
    ):
        """With fp16 accumulation: scale a block's queries into fp16's range, and adjust the weights. All consumer
        warpgroups synchronize in it."""
        given = cute.make_rmem_tensor((self.n // 4,), Float32)
        for j in cutlass.range_constexpr(self.n // 8):
            t = cutlass.min(block * self.block_q + j * 8 // self.heads, queries - 1)
            for c in cutlass.range_constexpr(2):
                given[2 * j + c] = weights[t, j * 8 % self.heads + quad * 2 + c]
        pipeline.consumer_wait(q_state)
        own = factors + q_state.stage * (self.n * 4)
        if tid < half_scores.THREADS:
            at = Int32(sq.iterator.toint()) + q_state.stage * (self.n * self.dim)
            half_scores.bring_into_range(at, own, self.n, self.dim, tid)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=RANGE_BARRIER, number_of_threads=self.groups * WARPGROUP)
        steps = self.heads // 8
        for i in cutlass.range_constexpr(self.block_q):
            scaled = []
            for j in cutlass.range_constexpr(i * steps, (i + 1) * steps):
                powers = load_8(own + (j * 8 + quad * 2) * 4)
                scaled.extend(given[2 * j + c] * powers[c].bitcast(Float32) for c in range(2))
            pairs, scale = half_scores.pack_weights(scaled)
            for j in cutlass.range_constexpr(steps):
                scoring.w[i * steps + j] = pairs[j]
            if quad == i % 4:
                scoring.unit[i // 4] = scale

    @cute.jit
    def take_scales(self, scoring: Scoring, k_scale, key):
        """Load the scales of `key` and `key` + 8."""
        keys = k_scale.shape[0]
        for half in cutlass.range_constexpr(2):
            scoring.scales[half] = k_scale[cutlass.min(key + 8 * half, keys - 1)]

    @cute.jit
    def finish_tile(self, scoring: Scoring, ring: Pipeline, state):
        """Wait for the tile's product, free its keys, and add up the heads."""
        cute.nvgpu.warpgroup.wait_group(0)
        ring.consumer_release(state)
        for t in cutlass.range_constexpr(self.block_q):
            if const_expr(self.half):
                first, second = half_scores.head_sum(scoring.flat, scoring.w, t, self.heads)
            else:
                first, second = head_sum(scoring.flat, scoring.w, t, self.heads)
            scoring.sums[2 * t], scoring.sums[2 * t + 1] = first, second

    @cute.jit
    def score(self, scoring: Scoring, i: cutlass.Constexpr, half: cutlass.Constexpr, quad):
        """Score of the lane's i-th query and its first or second key: add up the quad's sums over heads, and scale."""
        upper, odd = (quad & 2) != 0, (quad & 1) != 0
        of_quad = [scoring.sums[2 * (4 * i + j) + half] for j in range(4)]
        if const_expr(self.half):
            value = quad_reduce_scatter(*(half_scores.pair_sum(x) for x in of_quad), upper, odd) * scoring.unit[i]
        else:
            value = quad_reduce_scatter(*of_quad, upper, odd)
        return value * scoring.scales[half]
