"""What a consumer warpgroup does in every kernel that scores contiguous keys: the wgmma of a key tile, the sums over
heads, and the score of a lane's query from the sums of a quad.

A kernel's own loop says which key tiles it takes and what becomes of their scores:

    multiply(mma, scoring.acc, scoring.ra, scoring.rb, ring.index(state), q_stage)
    ...                                   # while it runs: the last tile's epilogue, the next tile
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

RANGE_BARRIER = 1  # a block's queries are in fp16's range


@dataclass(frozen=True)
class Scoring:
    """What a consumer thread holds in registers. It has two keys of a tile, 8 apart.

    acc, flat  its accumulators, as wgmma and as `head_sum` take them
    ra, rb     the operands, in shared memory
    sums       over the heads of its lane: [query][key], pairs of fp16 for half scores
    scales     of the two keys
    w          weights of its columns, halved; pairs of fp16 for half scores
    unit       the factor of the scores of the lane's queries, for half scores
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
    """A kernel has heads, dim, half (fp16 accumulators), accumulators (their type), n (columns of a tile), groups
    (consumer warpgroups), block_q (queries of a block) and lane_q (of these, a lane's)."""

    def scoring(self, mma: cute.TiledMma, sq: cute.Tensor, sk: cute.Tensor, tid: Int32) -> Scoring:
        thr_mma = mma.get_slice(tid % WARPGROUP)
        ra, rb = mma.make_fragment_A(thr_mma.partition_A(sk)), mma.make_fragment_B(thr_mma.partition_B(sq))
        acc = cute.make_rmem_tensor(thr_mma.partition_shape_C((TILE, self.n)), self.accumulators)
        flat = cute.make_tensor(acc.iterator, cute.make_layout(self.n // 2))
        sums, scales = cute.make_rmem_tensor((2 * self.block_q,), Float32), cute.make_rmem_tensor((2,), Float32)
        scales.fill(0.0)
        # The order of these, replaced ones included, decides which registers ptxas takes.
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
        """Wait for a block's queries, and take its weights to registers."""
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
        """For half scores: bring a block's queries into fp16's range, and the weights with them. All consumer
        warpgroups meet in it."""
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
        """Of `key` and `key` + 8."""
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
        """Of the lane's i-th query and of its first or second key: the quad's sums over heads, added up, scaled."""
        upper, odd = (quad & 2) != 0, (quad & 1) != 0
        of_quad = [scoring.sums[2 * (4 * i + j) + half] for j in range(4)]
        if const_expr(self.half):
            value = quad_reduce_scatter(*(half_scores.pair_sum(x) for x in of_quad), upper, odd) * scoring.unit[i]
        else:
            value = quad_reduce_scatter(*of_quad, upper, odd)
        return value * scoring.scales[half]
