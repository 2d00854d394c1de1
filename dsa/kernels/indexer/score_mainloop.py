"""Computation of a tile of index scores, which the score kernels of this folder share. An FP8 wgmma multiplies 64 keys
by N columns, one column per (query, head). Each lane sums the weighted relu of the products over its heads. Then the
four lanes of a quad add up their sums, so that each lane gets the scores of different queries or keys.

Each kernel's mainloop chooses the key tiles and uses their scores. With contiguous keys (not in cache pages), the steps
for a tile are:

    multiply(mma, scoring.acc, scoring.ra, scoring.rb, ring.index(state), q_stage)
    ...                                   # during the wgmma: the previous tile's epilogue, the choice of the next tile
    self.take_scales(scoring, k_scale, key)
    ...
    self.finish_tile(scoring, ring, state)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float16, Float32, Int32, Uint32, const_expr
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.copies import tile_load
from dsa.cute.fake_tensors import fake, strides
from dsa.cute.pipeline import Pipeline
from dsa.cute.reductions import quad_reduce_scatter
from dsa.cute.shared_memory import load_8
from dsa.cute.sm90 import REGISTERS, WARP, WARPGROUP
from dsa.kernels.indexer import fp16_accumulation

TILE = 64  # keys per tile
# Greater than every key's index. It stands for the smallest start of queries that see no keys, and for the key of a
# tile that does not exist.
NO_KEY = 2**30
RANGE_BARRIER = 1  # named barrier, with fp16 accumulation: threads wait here until a block's queries are scaled


class Pipelines(NamedTuple):
    """q: ring of blocks of queries. k: rings of key tiles of all consumer warpgroups; `k.ring` returns the ring of one
    warpgroup."""

    q: Pipeline
    k: Pipeline


@dataclass(frozen=True)
class Scoring:
    """State of a consumer thread, in registers except for the operands. A thread has two keys of a tile, 8 rows apart.

    acc, flat  the thread's accumulators: the same registers in the shape of wgmma and in that of `head_sum`
    ra, rb     the wgmma operands, in shared memory
    sums       sums over the lane's heads: [query][key]; pairs of fp16 with fp16 accumulation
    scales     scales of the two keys
    w          weights of the lane's columns. fp32: half of each weight (see `head_sum`). fp16 accumulation: pairs of
               fp16, not halved, but scaled by powers of two (see `pack_weights`)
    unit       with fp16 accumulation: for each query whose scores the lane stores, the power of two to multiply them by
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
    """Base class of the score kernels. columns: N of the wgmma. half: fp16 accumulation (otherwise fp32). groups:
    number of consumer warpgroups. stages: key tiles in flight per consumer warpgroup."""

    def __init__(self, heads: int, dim: int, columns: int, half: bool, groups: int, stages: int):
        self.half, self.accumulators = half, Float16 if half else Float32
        self.head_sum = fp16_accumulation.head_sum if half else head_sum
        self.heads, self.dim, self.n = heads, dim, columns
        self.groups, self.group_stages, self.stages = groups, stages, groups * stages
        self.consumer_warps, self.threads = 4 * groups, (groups + 1) * WARPGROUP
        self.consumer_registers, self.producer_registers = REGISTERS[groups]
        self.block_q = columns // heads  # queries per block
        self.lane_q = self.block_q // 4  # number of queries whose scores a lane stores: every fourth query

    def mma(self) -> cute.TiledMma:
        """Return the wgmma of keys [64, D] and queries [N, D], both e4m3 in shared memory, with fp32 or fp16
        accumulators."""
        major, e4m3 = cute.nvgpu.OperandMajorMode.K, Float8E4M3FN
        return sm90.make_trivial_tiled_mma(e4m3, e4m3, major, major, self.accumulators, (1, 1, 1), (TILE, self.n))

    def loads(self, q: cute.Tensor, k: cute.Tensor, q_stages: int, rows: int = TILE):
        """-> ((q_atom, q_tma, k_atom, k_tma), layouts): the TMA atoms and tensors for copies of a block of queries and
        of a block of `rows` keys.

        layouts: in shared memory, of the queries, of the key tiles, and of the same keys as blocks of `rows` keys."""
        k_layout, rows_layout = (
            sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (keys, self.n, self.dim), Float8E4M3FN, count)
            for keys, count in ((TILE, self.stages), (rows, self.stages * (TILE // rows)))
        )
        q_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (TILE, self.n, self.dim), Float8E4M3FN, q_stages)
        k_atom, k_tma = tile_load(k, rows_layout, (rows, self.dim))
        q_atom, q_tma = tile_load(q, q_layout, (self.n, self.dim))
        return (q_atom, q_tma, k_atom, k_tma), (q_layout, k_layout, rows_layout)

    @cute.jit
    def initialize(self, q_atom: cute.CopyAtom, k_atom: cute.CopyAtom, pipelines: Pipelines, tid, warp):
        if warp == self.consumer_warps:
            cute.nvgpu.cpasync.prefetch_descriptor(q_atom)
            cute.nvgpu.cpasync.prefetch_descriptor(k_atom)
        if tid == 0:
            pipelines.k.init(consumers=WARPGROUP // WARP)
            pipelines.q.init(consumers=self.consumer_warps)

    def scoring(self, mma: cute.TiledMma, sq: cute.Tensor, sk: cute.Tensor, tid: Int32) -> Scoring:
        thr_mma = mma.get_slice(tid % WARPGROUP)
        ra, rb = mma.make_fragment_A(thr_mma.partition_A(sk)), mma.make_fragment_B(thr_mma.partition_B(sq))
        acc = cute.make_rmem_tensor(thr_mma.partition_shape_C((TILE, self.n)), self.accumulators)
        flat = cute.make_tensor(acc.iterator, cute.make_layout(self.n // 2))
        sums, scales = cute.make_rmem_tensor((2 * self.block_q,), Float32), cute.make_rmem_tensor((2,), Float32)
        scales.fill(0.0)
        # The order of these allocations, including those that are replaced below, affects ptxas's register allocation.
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
        """Load the weights of this lane's columns into registers, and wait for the block's queries. With fp16
        accumulation, also bring the queries into fp16's range (`bring_into_range`)."""
        given = cute.make_rmem_tensor((self.n // 4,), Float32) if self.half else scoring.w
        for j in range(self.n // 8):
            t = cutlass.min(block * self.block_q + j * 8 // self.heads, queries - 1)
            for c in range(2):
                weight = weights[t, j * 8 % self.heads + quad * 2 + c]
                given[2 * j + c] = weight if self.half else weight * 0.5
        pipeline.consumer_wait(q_state)
        if self.half:
            self.bring_into_range(scoring, sq, factors, q_state.stage, lambda j, column, c: given[2 * j + c], tid, quad)

    @cute.jit
    def bring_into_range(self, scoring: Scoring, sq, factors, stage, weight_of: cutlass.Constexpr[Callable], tid, quad):
        """With fp16 accumulation: scale a block's queries into fp16's range, and compute scoring.w and scoring.unit
        from the block's weights. All threads of all consumer warpgroups must call this, because it contains a barrier.

        factors    address in shared memory of fp32 [stages, N], the powers of two that the query rows are divided by
        weight_of  (j, column, c) -> weight of column + c, which is the lane's (2 j + c)-th column
        """
        own = factors + stage * (self.n * 4)
        if tid < fp16_accumulation.THREADS:
            at = Int32(sq.iterator.toint()) + stage * (self.n * self.dim)
            fp16_accumulation.bring_into_range(at, own, self.n, self.dim, tid)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=RANGE_BARRIER, number_of_threads=self.groups * WARPGROUP)
        steps = self.heads // 8
        for i in cutlass.range_constexpr(self.block_q):
            scaled = []
            for j in cutlass.range_constexpr(i * steps, (i + 1) * steps):
                column = j * 8 + quad * 2
                powers = load_8(own + column * 4)
                scaled.extend(weight_of(j, column, c) * powers[c].bitcast(Float32) for c in range(2))
            pairs, unit = fp16_accumulation.pack_weights(scaled)
            for j in cutlass.range_constexpr(steps):
                scoring.w[i * steps + j] = pairs[j]
            self.keep_unit(scoring, i, unit, quad)

    @cute.jit
    def keep_unit(self, scoring: Scoring, i: cutlass.Constexpr, unit, quad):
        """Keep the unit of the block's query i in the lane that stores this query's scores."""
        if quad == i % 4:
            scoring.unit[i // 4] = unit

    @cute.jit
    def take_scales(self, scoring: Scoring, k_scale, key):
        """Load the scales of `key` and `key` + 8. Past the last key, load the last key's scale."""
        keys = k_scale.shape[0]
        for half in cutlass.range_constexpr(2):
            scoring.scales[half] = k_scale[cutlass.min(key + 8 * half, keys - 1)]

    @cute.jit
    def finish_tile(self, scoring: Scoring, ring: Pipeline, state):
        cute.nvgpu.warpgroup.wait_group(0)
        ring.consumer_release(state)
        self.add_heads(scoring)

    @cute.jit
    def add_heads(self, scoring: Scoring):
        """Add up the lane's heads of each query, into `scoring.sums`."""
        for t in cutlass.range_constexpr(self.block_q):
            scoring.sums[2 * t], scoring.sums[2 * t + 1] = self.head_sum(scoring.flat, scoring.w, t, self.heads)

    @cute.jit
    def score(self, scoring: Scoring, i: cutlass.Constexpr, half: cutlass.Constexpr, quad):
        """Return the score of the lane's i-th query for the lane's first key (`half` 0) or second key (`half` 1): the
        quad's sum over heads, times the key's scale and, with fp16 accumulation, the query's unit."""
        upper, odd = (quad & 2) != 0, (quad & 1) != 0
        of_quad = [scoring.sums[2 * (4 * i + j) + half] for j in range(4)]
        if const_expr(self.half):
            value = quad_reduce_scatter(*map(fp16_accumulation.pair_sum, of_quad), upper, odd) * scoring.unit[i]
        else:
            value = quad_reduce_scatter(*of_quad, upper, odd)
        return value * scoring.scales[half]


@cute.jit
def thread_index():
    """-> (thread, warp, lane) in a one-dimensional CTA. The compiler knows that the warp index is uniform."""
    tid, _, _ = cute.arch.thread_idx()
    return tid, cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()


def tile_partition(atom: cute.CopyAtom, smem: cute.Tensor, x: cute.Tensor, shape: tuple[int, int], at=(None, 0)):
    """Partition shared memory `smem` [rows, columns, stages] and the blocks of x (global memory) for copies by the TMA
    `atom`. x is divided into blocks of `shape`. `at` has a block's index for each mode of x, or None for all blocks
    along the mode. -> (smem [one copy, stage], x [one copy, block])."""
    source, target = cute.group_modes(cute.local_tile(x, shape, at), 0, 2), cute.group_modes(smem, 0, 2)
    return cute.nvgpu.cpasync.tma_partition(atom, 0, cute.make_layout(1), target, source)


def registers_fit(columns: int, groups: int) -> bool:
    """Whether a consumer thread's registers hold the fp32 accumulators and weights of `columns` columns and 24 other
    numbers. groups: number of consumer warpgroups."""
    return columns // 2 + columns // 4 + 24 <= REGISTERS[groups][0]


@cute.jit
def head_sum(acc, weights, query: cutlass.Constexpr, heads: cutlass.Constexpr):
    """-> the sums sum_h w[h] relu(acc[key, query * heads + h]) over this lane's heads, for the lane's two keys.

    acc      this thread's accumulators, flat: [column / 8][key half][2 adjacent columns], where half 1 is 8 keys after
             half 0
    weights  w / 2 of this lane's columns, flat: [column / 8][2]
    """
    sums = [Float32(0.0), Float32(0.0)]
    for j in cutlass.range_constexpr(heads // 8):
        column = query * (heads // 8) + j
        for c in cutlass.range_constexpr(2):
            for half in cutlass.range_constexpr(2):
                # x + |x| = 2 relu(x) exactly, and w is halved. The addition runs on the FMA pipe, at twice the rate of
                # a maximum, and propagates NaN.
                x = acc[4 * column + 2 * half + c]
                sums[half] = cute.math.fma(x + cute.math.absf(x), weights[2 * column + c], sums[half])
    return sums


@cute.jit
def key_range(starts, ends, query, keys):
    """-> (first key that the query sees, number of keys that it sees), clipped to the existing keys. Start and end are
    clipped before the subtraction, because the difference of two int32 can overflow."""
    start = cutlass.min(cutlass.max(starts[query], 0), keys)
    end = cutlass.min(cutlass.max(ends[query], start), keys)
    return start, end - start


@cute.jit
def keys_of_block(block, block_q, queries, starts, ends, keys, lane):
    """-> (smallest start, largest end) of the non-empty key ranges of a block of `block_q` queries; (NO_KEY, 0) if all
    ranges are empty. The whole warp calls this."""
    low, high = Int32(NO_KEY), Int32(0)
    query = block * block_q + lane
    if lane < block_q and query < queries:
        start, length = key_range(starts, ends, query, keys)
        if length > 0:
            low, high = start, start + length
    return cute.arch.warp_redux_sync(low, "min"), cute.arch.warp_redux_sync(high, "max")


def fake_scored(heads: int, dim: int, queries) -> tuple[cute.Tensor, ...]:
    """Return fake tensors for scores over contiguous keys: q [S * H, D] e4m3, k [Skv, D] e4m3, k_scale [Skv] fp32,
    weights [S, H] fp32, starts [S] int32, ends [S] int32."""
    keys = cute.sym_int()
    q = fake(Float8E4M3FN, (cute.sym_int(), dim), (dim, 1))
    k = fake(Float8E4M3FN, (keys, dim), (*strides(1, 16), 1))
    weights = fake(Float32, (queries, heads), (*strides(1), 1), 4)
    starts, ends = (fake(Int32, (queries,), (1,), 4) for _ in range(2))
    return q, k, fake(Float32, (keys,), (1,), 4), weights, starts, ends
