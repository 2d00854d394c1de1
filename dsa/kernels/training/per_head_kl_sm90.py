"""The warm-up loss of an indexer with as many heads as the attention has, each following its own:
kl[t, h] = sum_s p log(p / r), p[s] = exp(scale q_h[t] . k[s] - lse[h, t]),
r = softmax_s(w[t, h] relu(q_idx_h[t] . k_idx[s])), whose log of the sum is lse_idx[h, t]

Plan
- One pass: with a sum of e^(I - m) beside sums of p, p log p and p I, nothing is needed twice. kl = (sum p log p -
  sum p I) / sum p + lse_idx; the division takes out what lse was rounded by, which lse_idx would otherwise multiply.
- Two consumer warpgroups have 64 rows each, whose operands stay in registers for the whole work tile, so that wgmma
  reads shared memory for keys only. Tiles of 64 keys: a wgmma of both kinds of scores, then 64 powers a thread.
- One producer warp draws work tiles and loads (per_head_tiles.py). Nothing orders the consumers: turns on the tensor
  cores are no faster.
- m is the maximum of the tiles with hidden keys and of the one behind them. From then on it stays, and a sum that grows
  past 2^60 (RESCALE_THRESHOLD) says that it was too low: that tile is done again with a new one. So most scores are
  compared with nothing.
- relu(x) is (x + |x|) / 2, the half in w: the maximum runs at half the rate.
Shared memory: rows of both kinds, STAGES x 64 keys of both kinds. Registers: 64 scores, d / 4 + di / 4 of rows.
Roofline (clocks for 128 rows x 64 keys, d 128, di 64): wgmma 768; 2 x 8192 powers 1024 of the special function unit.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake_stream
from dsa.cute.pipeline import start
from dsa.cute.sm90 import LN2, LOG2E, SHARED_BYTES, WARPGROUP
from dsa.cute.tile_counter import fake_tile_counter
from dsa.kernels.training.limits import INDEX_CHANNELS, PER_HEAD_CHANNELS
from dsa.kernels.training.per_head_tiles import (
    KEYS,
    ROWS,
    Loads,
    PerHeadTiles,
    SharedTensors,
    WorkTileInfo,
    fake_by_head,
    fake_by_query,
    fake_inputs,
    load_operand,
    multiply,
    operand,
    score_mma,
)
from dsa.kernels.training.q_tiles import fake_q_tiles
from dsa.runtime.compile_cache import cached, compile_sm90

CONSUMERS = 2  # warpgroups
CONSUMER_WARPS, THREADS = 4 * CONSUMERS, (CONSUMERS + 1) * WARPGROUP
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
STAGES = {(64, 64): 6, (64, 128): 4, (128, 64): 6, (128, 128): 4, (192, 64): 4, (192, 128): 3}  # by (d, di)
NOTHING = -3e38  # finite, so that a difference to it is no NaN
RESCALE_THRESHOLD = 2.0**60


class WarpRole(IntEnum):
    """The first warp of each role."""

    CONSUMER = 0
    PRODUCER = CONSUMER_WARPS


class PerHeadKlSm90(PerHeadTiles):
    def __init__(self, dim: int, index_dim: int):
        super().__init__(dim, index_dim, STAGES[dim, index_dim], CONSUMER_WARPS)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        q_idx: cute.Tensor,
        k_idx: cute.Tensor,
        w: cute.Tensor,
        lse: cute.Tensor,
        q_tiles: cute.Tensor,
        tile_counter: cute.Tensor,
        kl: cute.Tensor,
        lse_idx: cute.Tensor,
        scale: Float32,
        heads_together: Int32,
        ctas: Int32,
        stream,
    ):
        self.shared = self.storage()
        assert self.shared.size_in_bytes() <= SHARED_BYTES
        loads = self.loads(q, k, q_idx, k_idx)
        group = q.shape[1] // k.shape[1]
        self.kernel(
            *(loads, w, lse, q_tiles, tile_counter, kl, lse_idx, scale * LOG2E, heads_together, group),
            score_mma(True),
        ).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True)

    @cute.kernel
    def kernel(
        self,
        loads: Loads,
        w: cute.Tensor,
        lse: cute.Tensor,
        q_tiles: cute.Tensor,
        tile_counter: cute.Tensor,
        kl: cute.Tensor,
        lse_idx: cute.Tensor,
        scale: Float32,
        heads_together: Int32,
        group: Int32,
        mma: cute.TiledMma,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        shared = self.shared_tensors(SmemAllocator().allocate(self.shared))
        if tid == 0:
            self.init(shared, CONSUMER_WARPS, CONSUMER_WARPS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        wait_for_prerequisite_grids()
        if warp >= WarpRole.PRODUCER:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == WarpRole.PRODUCER:
                self.produce(loads, shared, q_tiles, tile_counter, w.shape[1], heads_together, group, lane)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consume(shared, mma, w, lse, kl, lse_idx, scale, tid, warp, lane)

    @cute.jit
    def consume(self, shared: SharedTensors, mma, w, lse, kl, lse_idx, scale, tid, warp, lane):
        """The mainloop of a consumer warpgroup: its 64 rows of every work tile of this CTA."""
        thr = mma.get_slice(tid)
        rk = mma.make_fragment_B(thr.partition_B(shared.k))
        rk_idx = mma.make_fragment_B(thr.partition_B(shared.k_idx))
        rows, row_words = operand(mma, ROWS, self.dim)
        index_rows, index_words = operand(mma, ROWS, self.index_dim)
        acc = cute.make_rmem_tensor(thr.partition_shape_C((ROWS, KEYS)), Float32)
        index_acc = cute.make_rmem_tensor(thr.partition_shape_C((ROWS, KEYS)), Float32)
        scores = cute.make_tensor(acc.iterator, cute.make_layout(KEYS // 2))
        index_scores = cute.make_tensor(index_acc.iterator, cute.make_layout(KEYS // 2))
        # Of a lane's two rows: factors, what they see, and sums of e^(I - row_max), p, p log p and p I.
        weight, base, row_max, limit = (cute.make_rmem_tensor((2,), x) for x in (Float32, Float32, Float32, Int32))
        sums = cute.make_rmem_tensor((2, 4), Float32)
        own_row = warp * 16 + (lane >> 2)
        work_state, row_state, key_state = start(), start(), start()
        work_tile = shared.work_tiles.current(work_state)
        while work_tile.head >= 0:
            for r in cutlass.range_constexpr(2):
                row = own_row + 8 * r
                limit[r] = work_tile.limit(row)
                base[r], weight[r], row_max[r] = Float32(float("inf")), Float32(0.0), Float32(0.0)
                if row < work_tile.rows:
                    row_max[r] = Float32(NOTHING)
                    base[r] = lse[work_tile.head, work_tile.first_q + row] * LOG2E
                    weight[r] = w[work_tile.first_q + row, work_tile.head] * (0.5 * LOG2E)
            sums.fill(0.0)
            # All rows see all keys of the tiles below.
            whole = work_tile.limit(0) >> 6
            shared.rows.consumer_wait(row_state)
            load_operand(row_words, shared.q, warp * 16, lane)
            load_operand(index_words, shared.q_idx, warp * 16, lane)
            cute.arch.sync_warp()
            shared.rows.consumer_release(row_state)
            row_state = shared.rows.advance(row_state)
            for n in cutlass.range(work_tile.tiles, unroll=1):
                tile = work_tile.tiles - 1 - n
                shared.keys.consumer_wait(key_state)
                cute.nvgpu.warpgroup.fence()
                multiply(mma, acc, rows, rk[None, None, None, key_state.stage], True)
                multiply(mma, index_acc, index_rows, rk_idx[None, None, None, key_state.stage], True)
                cute.nvgpu.warpgroup.wait_group(0)
                shared.keys.consumer_release(key_state)
                key_state = shared.keys.advance(key_state)
                careful = tile >= whole - 1
                if not careful:
                    careful = self.add(scores, index_scores, sums, weight, base, row_max, scale)
                if careful:
                    self.add_carefully(scores, index_scores, sums, weight, base, row_max, limit, scale, tile, lane)
            self.epilogue(sums, weight, row_max, work_tile, own_row, kl, lse_idx, lane)
            work_state = shared.work_tiles.release(work_state)
            work_tile = shared.work_tiles.current(work_state)

    @cute.jit
    def add(self, scores, index_scores, sums, weight, base, row_max, scale):
        """Add a tile all of whose keys are seen, unless `row_max` is too low for it. -> whether it is."""
        own = cute.make_rmem_tensor((2, 4), Float32)
        own.fill(0.0)
        for i in cutlass.range_constexpr(KEYS // 2):
            r = i // 2 % 2
            twice = index_scores[i] + cute.math.absf(index_scores[i])
            own[r, 0] += cute.math.exp2(cute.math.fma(twice, weight[r], -row_max[r]), fastmath=True)
            x = cute.math.fma(scores[i], scale, -base[r])
            p = cute.math.exp2(x, fastmath=True)
            own[r, 1] += p
            own[r, 2] = cute.math.fma(p, x, own[r, 2])
            own[r, 3] = cute.math.fma(p, twice, own[r, 3])
        again = cute.arch.vote_any_sync(own[0, 0] > RESCALE_THRESHOLD or own[1, 0] > RESCALE_THRESHOLD)
        if not again:
            for i in cutlass.range_constexpr(4):
                for r in cutlass.range_constexpr(2):
                    sums[r, i] += own[r, i]
        return again

    @cute.jit
    def add_carefully(self, scores, index_scores, sums, weight, base, row_max, limit, scale, tile, lane):
        """Add a tile, whatever is in it, after `row_max` has been raised to what it needs."""
        first = tile * KEYS + (lane & 3) * 2
        for r in cutlass.range_constexpr(2):
            new_max = Float32(NOTHING)
            for i in cutlass.range_constexpr(KEYS // 4):
                j = i // 2 * 4 + 2 * r + i % 2
                twice = index_scores[j] + cute.math.absf(index_scores[j])
                value = twice * weight[r]
                new_max = cute.arch.fmax(new_max, value if first + (j // 4 * 8 + i % 2) < limit[r] else new_max)
            new_max = cute.arch.fmax(new_max, cute.arch.shuffle_sync_bfly(new_max, offset=1))
            new_max = cute.arch.fmax(new_max, cute.arch.shuffle_sync_bfly(new_max, offset=2))
            raised = cute.arch.fmax(row_max[r], new_max)
            sums[r, 0] *= cute.math.exp2(row_max[r] - raised, fastmath=True)
            row_max[r] = raised
            for i in cutlass.range_constexpr(KEYS // 4):
                j = i // 2 * 4 + 2 * r + i % 2
                seen = first + (j // 4 * 8 + i % 2) < limit[r]
                twice = index_scores[j] + cute.math.absf(index_scores[j]) if seen else Float32(0.0)
                power = cute.math.fma(twice, weight[r], -raised) if seen else Float32(NOTHING)
                x = cute.math.fma(scores[j], scale, -base[r]) if seen else Float32(NOTHING)
                x = cute.arch.fmax(x, NOTHING)
                p = cute.math.exp2(x, fastmath=True)
                sums[r, 0] += cute.math.exp2(power, fastmath=True)
                sums[r, 1] += p
                sums[r, 2] = cute.math.fma(p, x, sums[r, 2])
                sums[r, 3] = cute.math.fma(p, twice, sums[r, 3])

    @cute.jit
    def epilogue(self, sums, weight, row_max, work_tile: WorkTileInfo, own_row, kl, lse_idx, lane):
        for r in cutlass.range_constexpr(2):
            total = []
            for i in cutlass.range_constexpr(4):
                value = sums[r, i] + cute.arch.shuffle_sync_bfly(sums[r, i], offset=1)
                total.append(value + cute.arch.shuffle_sync_bfly(value, offset=2))
            row = own_row + 8 * r
            if lane % 4 == 0 and row < work_tile.rows:
                loss, result = Float32(0.0), Float32(float("inf"))
                if work_tile.limit(row) > 0:
                    power = row_max[r] + cute.math.log2(total[0])
                    loss = ((total[2] - weight[r] * total[3]) / total[1] + power) * LN2
                    result = power * LN2
                kl[work_tile.first_q + row, work_tile.head] = loss
                lse_idx[work_tile.head, work_tile.first_q + row] = result


@cached
def compile_per_head_kl(dim: int, index_dim: int):
    """-> f(q [Tq, H, d], k [Tk, Hk, d], q_idx [Tq, H, di], k_idx [Tk, 1, di], w [Tq, H], lse [H, Tq],
    q_tiles [S, 8] int32, tile_counter [1] int32 of 0, kl [Tq, H], lse_idx [H, Tq], scale, heads_together, ctas): bf16,
    what is no row of q or k fp32. q_tiles: see dsa.ops.training._warmup_per_head; heads_together: a divisor of H."""
    tokens, keys, heads = cute.sym_int(), cute.sym_int(), cute.sym_int()
    inputs = fake_inputs(tokens, keys, heads, dim, index_dim)
    w, kl = (fake_by_query(tokens, heads) for _ in range(2))
    lse, lse_idx = (fake_by_head(heads, tokens) for _ in range(2))
    arguments = *inputs, w, lse, fake_q_tiles(), fake_tile_counter(), kl, lse_idx, Float32(1.0), Int32(1), Int32(1)
    return compile_sm90(PerHeadKlSm90(dim, index_dim), *arguments, fake_stream())


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [(compile_per_head_kl, (dim, index_dim)) for dim in PER_HEAD_CHANNELS for index_dim in INDEX_CHANNELS]
