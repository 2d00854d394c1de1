"""The index warpgroup of the sparse stage's target kernel, and the definitions that the kernel's roles share.

The index warpgroup computes the indexer's scores of every tile and adds up the attention's sums. After a query's last
tile it computes both distributions, the loss and its gradient to the scores."""

from dataclasses import dataclass
from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32

from dsa.cute.pipeline import Pipeline, PipelineState, start
from dsa.cute.reductions import warp_reduce_sum
from dsa.cute.shared_memory import load_matrices, pack, swizzled
from dsa.cute.sm90 import LN2, LOG2E, WARPGROUP, opaque
from dsa.kernels.training.mainloop import accumulator, release, words_of
from dsa.kernels.training.topk_gather import CHUNK, TILE, QuerySchedule, selected, wait_for_wgmma

THREADS = 4 * WARPGROUP
STEPS = CHUNK // 16  # wgmma instructions per chunk
INDEX_STAGES, SUM_STAGES = 2, 4
ATTENTION_WARPS, INDEX_WARPS = 8, 4
INDEX_BARRIER, ATTENTION_BARRIER = 1, 2  # named barriers, one per warpgroup: + the attention warpgroup's number
NOTHING = -3e38  # finite, so that NOTHING - NOTHING is not NaN
SMALLEST = 2.0**-126
INFINITY = float("inf")


class WarpRole(IntEnum):
    """The first warp of each role. The roles have two, one and one warpgroups."""

    ATTENTION = 0
    INDEX = ATTENTION_WARPS
    PRODUCER = ATTENTION_WARPS + INDEX_WARPS


@dataclass(frozen=True)
class Pipelines:
    """keys: chunks of q or kv rows. index: tiles of index rows. sums: the attention's sums of exponentials per tile."""

    keys: Pipeline
    index: Pipeline
    sums: Pipeline


@dataclass(frozen=True)
class SharedTensors:
    """
    sums            [64 keys, 8 warps, SUM_STAGES]: a tile's sums of exponentials over each attention warp's heads
    own_sums        [64 keys, 4 warps, 2]: a tile's weighted scores, summed over each index warp's heads
    target, scores  [MAX_SPARSE_KEYS]: p before normalisation, and I
    parts           [12]: partial results that the index warps exchange in a query's epilogue
    """

    sums: cute.Tensor
    own_sums: cute.Tensor
    target: cute.Tensor
    scores: cute.Tensor
    parts: cute.Tensor


@dataclass(frozen=True)
class Inputs:
    """q [T, H, d], kv [Tk, d], q_idx [T, Hi, di], k_idx [Tk, di], w_idx [T, Hi], indices [T, K], lse [T, H]"""

    q: cute.Tensor
    kv: cute.Tensor
    q_idx: cute.Tensor
    k_idx: cute.Tensor
    w_idx: cute.Tensor
    indices: cute.Tensor
    lse: cute.Tensor


def sums_state(tile: Int32) -> PipelineState:
    """State of the pipeline of sums at key tile `tile`, counted over all queries of the CTA."""
    return PipelineState(tile & (SUM_STAGES - 1), (tile >> SUM_STAGES.bit_length() - 1) & 1)


@cute.jit
def load_q_rmem(words, chunk: cutlass.Constexpr, source: cute.Pointer, warp, lane):
    """Load a warp's part of a chunk of 64 rows from shared memory as operand A: words [4, STEPS, chunks]."""
    for step in cutlass.range_constexpr(STEPS):
        address = source + swizzled(warp * 16 + (lane & 15), 2 * step + (lane >> 4))
        for i, word in enumerate(load_matrices(Int32(address.toint()))):
            words[i, step, chunk] = word


@cute.jit
def sum_rows(values, lane):
    """Sums over a warp's 16 rows of a wgmma accumulator tile of 64 columns.

    values[2 j + e]: the lane's value of column 8 j + 2 (lane % 4) + e. -> the sums of columns 2 lane and 2 lane + 1. A
    reduce-scatter of 14 shuffles: each step halves the number of columns per lane.
    """
    for log in cutlass.range_constexpr(4, 1, -1):
        upper = (lane >> log) & 1 != 0
        half = len(values) // 2
        kept = [values[half + i] if upper else values[i] for i in range(half)]
        sent = [values[i] if upper else values[half + i] for i in range(half)]
        values = [keep + cute.arch.shuffle_sync_bfly(send, offset=1 << log) for keep, send in zip(kept, sent)]
    return values


@cute.jit
def exp(x: Float32):
    return cute.math.exp2(x * LOG2E, fastmath=True)


class IndexWarpgroup:
    """index_chunks: chunks per index row. row_tiles: the attention has `row_tiles` x 64 heads."""

    def __init__(self, index_chunks: int, row_tiles: int):
        self.index_chunks, self.row_tiles = index_chunks, row_tiles

    @cute.jit
    def run(
        self,
        inputs: Inputs,
        pipelines: Pipelines,
        shared: SharedTensors,
        kl,
        d_scores,
        mma,
        index,
        schedule: QuerySchedule,
        warp,
        lane,
    ):
        """Process all queries of this CTA."""
        tid = warp * 32 + lane
        thr = mma.get_slice(tid)
        rk = mma.make_fragment_B(thr.partition_B(index))
        q_rmem = cute.make_rmem_tensor((*thr.partition_shape_A((TILE, CHUNK)), self.index_chunks), BFloat16)
        words = words_of(q_rmem, 4, STEPS, self.index_chunks)
        acc, flat = accumulator(thr, (TILE, TILE))
        source = cute.recast_ptr(index.iterator, cute.make_swizzle(0, 4, 3), dtype=BFloat16)
        weights = cute.make_rmem_tensor((2,), Float32)
        state, tiles = start(), Int32(0)
        column = tid & (TILE - 1)
        for query in cutlass.range(schedule.first, schedule.queries, schedule.step, unroll=1):
            for r in cutlass.range_constexpr(2):
                head = warp * 16 + (lane >> 2) + 8 * r
                weights[r] = Float32(0.0)
                if head < inputs.q_idx.shape[1]:
                    weights[r] = inputs.w_idx[query, head] * 0.5
            pipelines.index.consumer_wait(state)
            for chunk in cutlass.range_constexpr(self.index_chunks):
                memory = source + (state.stage * self.index_chunks + chunk) * (TILE * CHUNK)
                load_q_rmem(words, chunk, memory, warp, lane)
            cute.arch.sync_warp()
            state = release(pipelines.index, state)
            # Warps 0 and 1 keep the target's sum of their column. Warps 2 and 3 keep the highest score and the sum of
            # exponentials relative to it.
            row_sum, row_max = Float32(0.0), Float32(NOTHING)
            for tile in cutlass.range(schedule.key_tiles, unroll=1):
                valid = selected(inputs.indices[query, None], tile * TILE, [column], inputs.kv.shape[0])[0] >= 0
                wait_for_wgmma(pipelines.index, state)
                own = opaque(state.stage)
                cute.nvgpu.warpgroup.fence()
                for chunk in cutlass.range_constexpr(self.index_chunks):
                    for step in cutlass.range_constexpr(STEPS):
                        mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, chunk + step > 0)
                        keys = rk[None, None, step, own * self.index_chunks + chunk]
                        cute.gemm(mma, acc, q_rmem[None, None, step, chunk], keys, acc)
                cute.nvgpu.warpgroup.commit_group()
                cute.nvgpu.warpgroup.wait_group(0)
                state = release(pipelines.index, state)
                self.sum_heads(flat, weights, shared, tile & 1, warp, lane)
                cute.arch.barrier(barrier_id=INDEX_BARRIER, number_of_threads=WARPGROUP)
                sums = sums_state(tiles + tile)
                pipelines.sums.consumer_wait(sums)
                if warp < 2:
                    amount = shared.sums[column, 0, sums.stage]
                    for i in cutlass.range_constexpr(1, 4 * self.row_tiles):
                        amount += shared.sums[column, i, sums.stage]
                    if not valid:
                        amount = Float32(0.0)
                    shared.target[tile * TILE + column] = amount
                    row_sum += amount
                else:
                    score = shared.own_sums[column, 0, tile & 1]
                    for i in cutlass.range_constexpr(1, 4):
                        score += shared.own_sums[column, i, tile & 1]
                    if not valid:
                        score = -Float32(INFINITY)
                    shared.scores[tile * TILE + column] = score
                    higher = cute.arch.fmax(row_max, score)
                    row_sum = row_sum * exp(row_max - higher) + exp(score - higher)
                    row_max = higher
                cute.arch.sync_warp()
                pipelines.sums.consumer_release(sums)
            tiles += schedule.key_tiles
            self.epilogue(shared, kl, d_scores, query, schedule.key_tiles, row_sum, row_max, warp, lane)

    @cute.jit
    def sum_heads(self, flat, weights, shared: SharedTensors, stage, warp, lane):
        """Sum a tile's weighted scores over the warp's heads, and store the sums to shared memory."""
        values = []
        for i in cutlass.range_constexpr(TILE // 4):
            at = i // 2 * 4 + i % 2
            # x + |x| is exactly 2 relu(x), and the weights are halved. NaN propagates.
            upper, lower = (x + cute.math.absf(x) for x in (flat[at], flat[at + 2]))
            values.append(cute.math.fma(lower, weights[1], upper * weights[0]))
        sums = cute.make_rmem_tensor((2,), Float32)
        sums[0], sums[1] = sum_rows(values, lane)
        cute.autovec_copy(sums, cute.local_tile(shared.own_sums[None, warp, stage], (2,), (lane,)))

    @cute.jit
    def epilogue(self, shared: SharedTensors, kl, d_scores, query, tiles, row_sum, row_max, warp, lane):
        """Compute the query's distributions, KL and d_scores. row_sum, row_max: the thread's results for its column."""
        tid = warp * 32 + lane
        for log in cutlass.range_constexpr(5):
            other_max = cute.arch.shuffle_sync_bfly(row_max, offset=1 << log)
            other = cute.arch.shuffle_sync_bfly(row_sum, offset=1 << log)
            higher = cute.arch.fmax(row_max, other_max)
            # In the target's warps all maxima are NOTHING, so the factors are 1.
            row_sum = row_sum * exp(row_max - higher) + other * exp(other_max - higher)
            row_max = higher
        shared.parts[2 * warp], shared.parts[2 * warp + 1] = row_sum, row_max
        cute.arch.barrier(barrier_id=INDEX_BARRIER, number_of_threads=WARPGROUP)
        mass = shared.parts[0] + shared.parts[2]
        row_max = cute.arch.fmax(shared.parts[5], shared.parts[7])
        row_sum = shared.parts[4] * exp(shared.parts[5] - row_max)
        row_sum += shared.parts[6] * exp(shared.parts[7] - row_max)
        # A target without mass gives a loss and gradients of 0.
        inverse, lse = Float32(0.0), Float32(INFINITY)
        if not mass == 0.0:
            inverse, lse = 1.0 / mass, row_max + cute.math.log2(row_sum) * LN2
        row = d_scores[query, None]
        target, scores, kept = (cute.make_rmem_tensor((4,), Float32) for _ in range(3))
        stored = cute.make_rmem_tensor((2,), Uint32)
        words = words_of(row, row.shape[0] // 2)
        loss = Float32(0.0)
        for at in cutlass.range(tid, tiles * (TILE // 4), WARPGROUP, unroll=1):
            cute.autovec_copy(cute.local_tile(shared.target, (4,), (at,)), target)
            cute.autovec_copy(cute.local_tile(shared.scores, (4,), (at,)), scores)
            for i in cutlass.range_constexpr(4):
                p, log_student = target[i] * inverse, scores[i] - lse
                kept[i] = exp(log_student) - p
                term = p * (cute.math.log2(p, fastmath=True) * LN2 - log_student)
                # log2 takes p below SMALLEST for 0. NaN is not below it and enters the loss.
                loss += Float32(0.0) if p < SMALLEST else term
            stored[0], stored[1] = pack(kept[0], kept[1], BFloat16), pack(kept[2], kept[3], BFloat16)
            cute.autovec_copy(stored, cute.local_tile(words, (2,), (at,)))
        shared.parts[8 + warp] = warp_reduce_sum(loss)
        # After this barrier the next query's first tile may overwrite target and scores. The parts are safe: they are
        # written after that tile's barrier, which thread 0 reaches only after it has read them.
        cute.arch.barrier(barrier_id=INDEX_BARRIER, number_of_threads=WARPGROUP)
        if tid == 0:
            kl[query] = (shared.parts[8] + shared.parts[9]) + (shared.parts[10] + shared.parts[11])
