"""Gradients of the per-head warm-up loss to the indexer's queries, keys and weights:
D = (r - p) 1[x > 0], x = q_idx_h[t] . k_idx[s]; A_h[t] = sum_s D k_idx[s]
dq_idx_h[t] = g w A_h[t];  dw[t, h] = g q_idx_h[t] . A_h[t];  dk_idx[s] = sum_{t, h} D g w q_idx_h[t]
with p and r as in per_head_kl_sm90.py, from both logs of sums, and g[t, h] the loss's own gradient.

Plan
- One pass: x and the attention's scores are computed again, D goes from registers to A += D K and by shared memory to
  the other product. Two score warpgroups have 64 rows each, and keep A in registers; a key warpgroup multiplies D by
  g w q, which it keeps in registers for all keys of a work tile; one producer warp draws work tiles and loads.
- A tile's scores are multiplied together with the D of the tile before: that product runs beside the powers. The two
  score warpgroups take turns.
- A key's gradient is a sum over all rows. Each head has a part of its own in global memory, 64 keys as 16 KiB in the
  order in which registers have them; q tiles add to it in the order of their queries, so the sum is always the same. A
  q tile goes through its keys downwards, and the one after it begins two tiles above. A warp publishes how many tiles
  it has added, and waits for the same warp of the q tile before. The first q tile stores.
- Waiting for the q tile before is expensive: the more heads run through the q tiles together, the fewer q tiles of a
  head are under way at a time. What all these heads' parts take should fit in the L2 cache.
- per_head_key_sum_sm90.py adds up the heads.
Shared memory: rows of both kinds, STAGES x 64 keys of both kinds, two D of 128 x 64.
Registers: 64 scores, 16 of D, di / 2 of A, and of the rows what fits.
Roofline (clocks for 128 rows x 64 keys, d 128, di 64): wgmma 1280; shared memory about 1100; powers 1024.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake_stream
from dsa.cute.pipeline import Pipeline, pipeline_storage, start, state_at, state_at_of_two
from dsa.cute.shared_memory import load_16, pack, store_16, store_matrices
from dsa.cute.sm90 import LOG2E, SHARED_BYTES, WARP, WARPGROUP, opaque
from dsa.cute.tile_counter import fake_tile_counter
from dsa.kernels.training.global_sums import add_4, await_count, publish, store_4
from dsa.kernels.training.limits import INDEX_CHANNELS, PER_HEAD_CHANNELS, PER_HEAD_KEY_WARPS
from dsa.kernels.training.per_head_tiles import (
    CHUNK,
    DTYPE,
    KEYS,
    ROWS,
    Loads,
    PerHeadTiles,
    SharedTensors,
    WorkTileInfo,
    fake_by_head,
    fake_by_query,
    fake_inputs,
    fake_rows,
    load_operand,
    load_step,
    load_transposed,
    multiply,
    operand,
    score_mma,
)
from dsa.kernels.training.q_tiles import fake_q_tiles
from dsa.runtime.compile_cache import cached, compile_sm90

SCORE_WARPGROUPS = 2
SCORE_WARPS, KEY_WARPS = 4 * SCORE_WARPGROUPS, PER_HEAD_KEY_WARPS
THREADS = (SCORE_WARPGROUPS + 2) * WARPGROUP
STAGES = {(64, 64): 4, (64, 128): 4, (128, 64): 4, (128, 128): 2, (192, 64): 2, (192, 128): 2}  # by (d, di)
D_STAGES = 2
PART = KEYS * CHUNK  # numbers of a part of a key tile's gradient


class Registers(NamedTuple):
    """Of a thread of each role's warpgroups."""

    score: int
    key: int
    producer: int


REGISTERS = {64: Registers(192, 96, 32), 128: Registers(176, 128, 32)}  # by di


class WarpRole(IntEnum):
    """The first warp of each role."""

    SCORE = 0
    KEY = SCORE_WARPS
    PRODUCER = SCORE_WARPS + KEY_WARPS


class Barrier(IntEnum):
    """Named barriers: the turn of score warpgroup 0 or 1; the factors of the key warpgroup's rows are there or read."""

    TURN = 1  # + the warpgroup's number
    FACTORS = 3


class PerHeadGradientSm90(PerHeadTiles):
    def __init__(self, dim: int, index_dim: int):
        super().__init__(dim, index_dim, STAGES[dim, index_dim], SCORE_WARPS + KEY_WARPS)
        self.chunks = index_dim // CHUNK
        # Which rows fit in the registers, beside scores, D and A.
        self.q_rmem, self.q_idx_rmem = dim <= 128 and index_dim == 64, index_dim == 64

    def difference_layout(self) -> cute.ComposedLayout:
        """D [keys, rows, stage], a row's keys one after the other."""
        return sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, (64, KEYS, ROWS), DTYPE, D_STAGES)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        q_idx: cute.Tensor,
        k_idx: cute.Tensor,
        w: cute.Tensor,
        lse: cute.Tensor,
        lse_idx: cute.Tensor,
        g: cute.Tensor,
        q_tiles: cute.Tensor,
        tile_counter: cute.Tensor,
        done: cute.Tensor,
        dq_idx: cute.Tensor,
        dw: cute.Tensor,
        parts: cute.Tensor,
        scale: Float32,
        heads_together: Int32,
        ctas: Int32,
        stream,
    ):
        layout = self.difference_layout()
        tile_storage = self.storage()

        @cute.struct
        class Storage:
            d_barriers: pipeline_storage(D_STAGES)
            factors: cute.struct.MemRange[Float32, ROWS]
            tiles: tile_storage
            d: cute.struct.Align[cute.struct.MemRange[DTYPE, cute.cosize(layout)], 1024]

        assert Storage.size_in_bytes() <= SHARED_BYTES
        self.shared = Storage
        k_major, mn_major = cute.nvgpu.OperandMajorMode.K, cute.nvgpu.OperandMajorMode.MN
        registers = cute.nvgpu.warpgroup.OperandSource.RMEM
        make, both, one = sm90.make_trivial_tiled_mma, (ROWS // 64, 1, 1), (1, 1, 1)
        query_mma = make(DTYPE, DTYPE, k_major, mn_major, Float32, both, (64, self.index_dim), registers)
        key_mma = make(DTYPE, DTYPE, k_major, mn_major, Float32, one, (64, KEYS), registers)
        mmas = score_mma(self.q_rmem), score_mma(self.q_idx_rmem), query_mma, key_mma
        group = q.shape[1] // k.shape[1]
        self.kernel(
            *(self.loads(q, k, q_idx, k_idx), w, lse, lse_idx, g, q_tiles, tile_counter, done, dq_idx, dw, parts),
            *(scale * LOG2E, heads_together, group, *mmas, layout),
        ).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True)

    @cute.kernel
    def kernel(
        self,
        loads: Loads,
        w: cute.Tensor,
        lse: cute.Tensor,
        lse_idx: cute.Tensor,
        g: cute.Tensor,
        q_tiles: cute.Tensor,
        tile_counter: cute.Tensor,
        done: cute.Tensor,
        dq_idx: cute.Tensor,
        dw: cute.Tensor,
        parts: cute.Tensor,
        scale: Float32,
        heads_together: Int32,
        group: Int32,
        main_mma: cute.TiledMma,
        index_mma: cute.TiledMma,
        query_mma: cute.TiledMma,
        key_mma: cute.TiledMma,
        d_layout: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        storage = SmemAllocator().allocate(self.shared)
        shared = self.shared_tensors(storage.tiles)
        sd = storage.d.get_tensor(d_layout.outer, swizzle=d_layout.inner)
        d = Pipeline.of(storage.d_barriers, D_STAGES)
        factors = storage.factors.get_tensor(cute.make_layout(ROWS))
        if tid == 0:
            self.init(shared, SCORE_WARPS + KEY_WARPS, SCORE_WARPS)
            d.init(KEY_WARPS, SCORE_WARPS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        wait_for_prerequisite_grids()
        registers = REGISTERS[self.index_dim]
        if warp >= WarpRole.PRODUCER:
            cute.arch.setmaxregister_decrease(registers.producer)
            if warp == WarpRole.PRODUCER:
                self.produce(loads, shared, q_tiles, tile_counter, w.shape[1], heads_together, group, lane)
        elif warp >= WarpRole.KEY:
            cute.arch.setmaxregister_decrease(registers.key)
            own = tid - WarpRole.KEY * WARP
            self.sum_keys(shared, key_mma, sd, d, factors, w, g, done, parts, own, warp - WarpRole.KEY, lane)
        else:
            cute.arch.setmaxregister_increase(registers.score)
            mmas = main_mma, index_mma, query_mma
            self.score(shared, *mmas, sd, d, w, lse, lse_idx, g, dq_idx, dw, scale, tid, warp, lane)

    @cute.jit
    def score(
        self,
        shared: SharedTensors,
        main_mma,
        index_mma,
        query_mma,
        sd,
        d: Pipeline,
        w,
        lse,
        lse_idx,
        g,
        dq_idx,
        dw,
        scale,
        tid,
        warp,
        lane,
    ):
        """The mainloop of a score warpgroup: its 64 rows of every work tile of this CTA."""
        side = warp // 4
        thr, index_thr, query_thr = main_mma.get_slice(tid), index_mma.get_slice(tid), query_mma.get_slice(tid)
        rk = main_mma.make_fragment_B(thr.partition_B(shared.k))
        rk_idx = index_mma.make_fragment_B(index_thr.partition_B(shared.k_idx))
        values = cute.make_tensor(shared.k_idx.iterator, cute.select(shared.k_idx.layout, mode=[1, 0, 2]))
        rv = query_mma.make_fragment_B(query_thr.partition_B(values))
        if const_expr(self.q_rmem):
            rows, row_words = operand(main_mma, ROWS, self.dim)
        else:
            rows = main_mma.make_fragment_A(thr.partition_A(shared.q))[None, None, None, 0]
        if const_expr(self.q_idx_rmem):
            index_rows, index_words = operand(index_mma, ROWS, self.index_dim)
        else:
            index_rows = index_mma.make_fragment_A(index_thr.partition_A(shared.q_idx))[None, None, None, 0]
        differences, words = operand(query_mma, ROWS, KEYS)
        acc, index_acc = (cute.make_rmem_tensor(thr.partition_shape_C((ROWS, KEYS)), Float32) for _ in range(2))
        query_acc = cute.make_rmem_tensor(query_thr.partition_shape_C((ROWS, self.index_dim)), Float32)
        scores, index_scores = (cute.make_tensor(x.iterator, cute.make_layout(KEYS // 2)) for x in (acc, index_acc))
        sums = cute.make_tensor(query_acc.iterator, cute.make_layout(self.index_dim // 2))
        # Of a lane's two rows.
        weight, base, index_base = (cute.make_rmem_tensor((2,), Float32) for _ in range(3))
        query_mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
        own_row = warp * 16 + (lane >> 2)
        # Of work tiles and of key tiles so far: pipelines walked by states would take more registers.
        count, steps = Int32(0), Uint32(0)
        if side == 1:
            cute.arch.barrier_arrive(barrier_id=Barrier.TURN, number_of_threads=SCORE_WARPGROUPS * WARPGROUP)
        work_tile = shared.work_tiles.current(state_at_of_two(count))
        while work_tile.head >= 0:
            for r in cutlass.range_constexpr(2):
                row = own_row + 8 * r
                base[r], index_base[r], weight[r] = Float32(float("inf")), Float32(float("inf")), Float32(0.0)
                if row < work_tile.rows:
                    base[r] = lse[work_tile.head, work_tile.first_q + row] * LOG2E
                    index_base[r] = lse_idx[work_tile.head, work_tile.first_q + row] * LOG2E
                    weight[r] = w[work_tile.first_q + row, work_tile.head] * (0.5 * LOG2E)
            query_acc.fill(0.0)
            words.fill(0)
            whole = work_tile.limit(0) >> 6  # tiles that all rows see all keys of
            if work_tile.rows < ROWS:
                whole = Int32(0)  # what is loaded for missing rows is another sequence's: D is 0 there, whatever it is
            shared.rows.consumer_wait(state_at(count, 1))
            if const_expr(self.q_rmem):
                load_operand(row_words, shared.q, warp * 16, lane)
            if const_expr(self.q_idx_rmem):
                load_operand(index_words, shared.q_idx, warp * 16, lane)
            if const_expr(self.q_rmem and self.q_idx_rmem):
                cute.arch.sync_warp()
                shared.rows.consumer_release(state_at(count, 1))
            tile = work_tile.tiles
            while tile > 0:
                tile -= 1
                key_state = state_at(steps, self.stages)
                shared.keys.consumer_wait(key_state)
                stage, last = key_state.stage, key_state.stage
                if tile < work_tile.tiles - 1:
                    last = (steps - 1) % self.stages
                else:
                    self.clear_keys(shared, count, tile, stage, tid)
                cute.arch.barrier(barrier_id=Barrier.TURN + side, number_of_threads=SCORE_WARPGROUPS * WARPGROUP)
                cute.nvgpu.warpgroup.fence()
                multiply(main_mma, acc, rows, rk[None, None, None, stage], True)
                multiply(index_mma, index_acc, index_rows, rk_idx[None, None, None, stage], True)
                # Of the tile before; for the first one, of zeros.
                multiply(query_mma, query_acc, differences, rv[None, None, None, last], False)
                cute.arch.barrier_arrive(
                    barrier_id=Barrier.TURN + 1 - side, number_of_threads=SCORE_WARPGROUPS * WARPGROUP
                )
                cute.nvgpu.warpgroup.wait_group(1)
                if tile < whole:
                    self.differ(scores, index_scores, weight, base, index_base, scale)
                else:
                    own = shared.work_tiles.read(state_at_of_two(count))
                    first = tile * KEYS + (lane & 3) * 2
                    limits = [own.limit(own_row + 8 * r) - first for r in range(2)]
                    self.differ(scores, index_scores, weight, base, index_base, scale, limits)
                cute.nvgpu.warpgroup.wait_group(0)
                if tile < work_tile.tiles - 1:
                    shared.keys.consumer_release(state_at(steps - 1, self.stages))
                for i in cutlass.range_constexpr(KEYS // 4):
                    words[i] = pack(scores[2 * i], scores[2 * i + 1], DTYPE)
                d_state = state_at(steps, D_STAGES)
                d.producer_wait(d_state)
                self.store_difference(words, sd, d_state.stage, warp, lane)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                d.producer_commit(d_state)
                steps += 1
            if work_tile.tiles > 0:
                last_state = state_at(steps - 1, self.stages)
                cute.nvgpu.warpgroup.fence()
                multiply(query_mma, query_acc, differences, rv[None, None, None, last_state.stage], False)
                cute.nvgpu.warpgroup.wait_group(0)
                shared.keys.consumer_release(last_state)
            # The rows of dq_idx go through the stage that is next, and is not committed.
            staging = state_at(steps, D_STAGES)
            d.producer_wait(staging)
            index_own = index_words if const_expr(self.q_idx_rmem) else None
            own = shared.work_tiles.read(state_at_of_two(count))
            self.epilogue(sums, index_own, shared, sd, staging.stage, own, w, g, dq_idx, dw, warp, lane)
            if const_expr(not (self.q_rmem and self.q_idx_rmem)):
                cute.arch.sync_warp()
                shared.rows.consumer_release(state_at(count, 1))
            shared.work_tiles.release(state_at_of_two(count))
            count += 1
            work_tile = shared.work_tiles.current(state_at_of_two(count))

    @cute.jit
    def clear_keys(self, shared: SharedTensors, count, tile, stage, tid):
        """Zeros over the index keys behind the sequence's: D is 0 there, but 0 * NaN would be NaN. Each score
        warpgroup does it before its first product with D, and needs a barrier of its own threads behind."""
        behind = shared.work_tiles.read(state_at_of_two(count)).length - tile * KEYS
        if behind < KEYS:
            zero = Uint32(0)
            start = Int32(shared.k_idx.iterator.toint()) + stage * (KEYS * self.index_dim * 2)
            for chunk in cutlass.range_constexpr(self.chunks):
                for place in cutlass.range(behind * 8 + tid % WARPGROUP, KEYS * 8, WARPGROUP, unroll=1):
                    store_16(start + chunk * (KEYS * CHUNK * 2) + place * 16, [zero, zero, zero, zero])
            cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def differ(self, scores, index_scores, weight, base, index_base, scale, limits: cutlass.Constexpr = None):
        """scores = D of a tile. limits: how many keys, counted from the lane's first, its rows see; None: all."""
        for i in cutlass.range_constexpr(KEYS // 2):
            r = i // 2 % 2
            x = index_scores[i]
            twice = x + cute.math.absf(x)
            learnt = cute.math.exp2(cute.math.fma(twice, weight[r], -index_base[r]), fastmath=True)
            p = cute.math.exp2(cute.math.fma(scores[i], scale, -base[r]), fastmath=True)
            active = x > 0.0
            if const_expr(limits is not None):
                active = active and i // 4 * 8 + i % 2 < limits[r]
            scores[i] = learnt - p if active else Float32(0.0)

    @cute.jit
    def store_difference(self, words, sd, stage, warp, lane):
        row = warp * 16 + (lane & 15)
        start = Int32(sd.iterator.toint()) + stage * (ROWS * KEYS * 2) + row * (2 * KEYS)
        for k in cutlass.range_constexpr(KEYS // 16):
            own = [words[4 * k + i] for i in range(4)]
            store_matrices(start + (((2 * k + (lane >> 4)) ^ (row & 7)) << 4), own)

    @cute.jit
    def epilogue(
        self, sums, index_words, shared: SharedTensors, sd, stage, work_tile: WorkTileInfo, w, g, dq_idx, dw, warp, lane
    ):
        """Store a warp's 16 rows of dq_idx, through its rows of a stage of D, and of dw."""
        own_row = opaque(warp * 16 + (lane >> 2))
        factor, inner = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32)
        inner.fill(0.0)
        if work_tile.tiles > 0:
            four = cute.make_rmem_tensor((4,), Uint32)
            own = cute.make_tensor(cute.recast_ptr(four.iterator, dtype=DTYPE), cute.make_layout(8))
            for step in cutlass.range_constexpr(self.index_dim // 16):
                loaded = (
                    [index_words[4 * step + i] for i in range(4)]
                    if const_expr(self.q_idx_rmem)
                    else load_step(shared.q_idx, warp * 16, step, lane)
                )
                for i in cutlass.range_constexpr(4):
                    four[i] = loaded[i]
                for i in cutlass.range_constexpr(8):
                    inner[i // 2 % 2] += own[i].to(Float32) * sums[8 * step + i]
        for r in cutlass.range_constexpr(2):
            row = own_row + 8 * r
            total = inner[r] + cute.arch.shuffle_sync_bfly(inner[r], offset=1)
            total += cute.arch.shuffle_sync_bfly(total, offset=2)
            factor[r] = Float32(0.0)
            if row < work_tile.rows:
                upstream = g[work_tile.first_q + row, work_tile.head]
                factor[r] = upstream * w[work_tile.first_q + row, work_tile.head]
                if lane % 4 == 0:
                    dw[work_tile.first_q + row, work_tile.head] = upstream * total
        row = warp * 16 + (lane & 15)
        start = Int32(sd.iterator.toint()) + stage * (ROWS * KEYS * 2)
        for chunk in cutlass.range_constexpr(self.chunks):
            for k in cutlass.range_constexpr(CHUNK // 16):
                places = [chunk * 32 + 8 * k + 2 * i for i in range(4)]
                packed = [pack(sums[i] * factor[i // 2 % 2], sums[i + 1] * factor[i // 2 % 2], DTYPE) for i in places]
                store_matrices(start + row * (2 * CHUNK) + (((2 * k + (lane >> 4)) ^ (row & 7)) << 4), packed)
            cute.arch.sync_warp()
            eight = cute.make_rmem_tensor((4,), Uint32)
            for i in cutlass.range_constexpr(4):
                out = warp * 16 + 4 * i + (lane >> 3)
                loaded = load_16(start + out * (2 * CHUNK) + (((lane & 7) ^ (out & 7)) << 4))
                if out < work_tile.rows:
                    for j in cutlass.range_constexpr(4):
                        eight[j] = loaded[j]
                    target = dq_idx[work_tile.first_q + out, work_tile.head, None]
                    target = cute.local_tile(target, (8,), (chunk * 8 + (lane & 7),))
                    cute.autovec_copy(cute.recast_tensor(eight, DTYPE), target)
            cute.arch.sync_warp()

    @cute.jit
    def sum_keys(self, shared: SharedTensors, mma, sd, d: Pipeline, factors, w, g, done, parts, tid, warp, lane):
        """The mainloop of the key warpgroup: what a work tile adds to the keys' gradients."""
        rd = mma.make_fragment_B(mma.get_slice(tid).partition_B(sd))
        operands = [operand(mma, 64, ROWS) for _ in range(self.chunks)]
        acc = cute.make_rmem_tensor(mma.get_slice(tid).partition_shape_C((64, KEYS)), Float32)
        sums = cute.make_tensor(acc.iterator, cute.make_layout(KEYS // 2))
        work_state, row_state, d_state = start(), start(), start()
        work_tile = shared.work_tiles.current(work_state)
        while work_tile.head >= 0:
            factor = Float32(0.0)
            if tid < work_tile.rows:
                factor = w[work_tile.first_q + tid, work_tile.head] * g[work_tile.first_q + tid, work_tile.head]
            # All have read the last work tile's.
            cute.arch.barrier(barrier_id=Barrier.FACTORS, number_of_threads=WARPGROUP)
            factors[tid] = factor
            cute.arch.barrier(barrier_id=Barrier.FACTORS, number_of_threads=WARPGROUP)
            shared.rows.consumer_wait(row_state)
            for chunk in cutlass.range_constexpr(self.chunks):
                load_transposed(operands[chunk][1], shared.q_idx, chunk, warp, lane)
            cute.arch.sync_warp()
            shared.rows.consumer_release(row_state)
            row_state = shared.rows.advance(row_state)
            for chunk in cutlass.range_constexpr(self.chunks):
                self.scale_operand(*operands[chunk], factors, lane)
            own = done.iterator + ((Int64(work_tile.head) * done.shape[1] + work_tile.q_tile) * KEY_WARPS + warp)
            tile, before, known = work_tile.tiles, work_tile.before, Int32(0)
            part = Int64(work_tile.head) * parts.shape[1] + (work_tile.first_k >> 6) + work_tile.sequence + tile
            target = parts.iterator + part * (PART * self.chunks) + tid * 4
            added = Int32(0)
            while tile > 0:
                tile -= 1
                target -= PART * self.chunks
                d.consumer_wait(d_state)
                for chunk in cutlass.range_constexpr(self.chunks):
                    cute.nvgpu.warpgroup.fence()
                    multiply(mma, acc, operands[chunk][0], rd[None, None, None, d_state.stage], True)
                    cute.nvgpu.warpgroup.wait_group(0)
                    if const_expr(chunk == 0):
                        if added > 0:
                            publish(own, added)
                        if tile < before:
                            known = await_count(own - KEY_WARPS, known, before - tile)
                    if const_expr(chunk == self.chunks - 1):
                        d.consumer_release(d_state)
                    self.add(sums, target + chunk * PART, tile < before)
                d_state = d.advance(d_state)
                added += 1
            if added > 0:
                publish(own, added)
            work_state = shared.work_tiles.release(work_state)
            work_tile = shared.work_tiles.current(work_state)

    @cute.jit
    def add(self, sums, target, begun: Boolean):
        if begun:
            for j in cutlass.range_constexpr(KEYS // 8):
                add_4(Int64((target + j * (4 * WARPGROUP)).toint()), [sums[4 * j + i] for i in range(4)])
        else:
            for j in cutlass.range_constexpr(KEYS // 8):
                store_4(Int64((target + j * (4 * WARPGROUP)).toint()), [sums[4 * j + i] for i in range(4)])

    @cute.jit
    def scale_operand(self, numbers, words, factors, lane):
        """Multiply rows, which are an operand's columns, by their factors; what has the factor 0 may be NaN."""
        flat = cute.make_tensor(numbers.iterator, cute.make_layout(2 * cute.size(words)))
        for i in cutlass.range_constexpr(cute.size(words)):
            row = i // 4 * 16 + i // 2 % 2 * 8 + (lane & 3) * 2
            both = [factors[row + e] for e in range(2)]
            pair = [flat[2 * i + e].to(Float32) * x if x != 0.0 else Float32(0.0) for e, x in enumerate(both)]
            words[i] = pack(pair[0], pair[1], DTYPE)


@cached
def compile_per_head_gradient(dim: int, index_dim: int):
    """-> f(q [Tq, H, d], k [Tk, Hk, d], q_idx [Tq, H, di], k_idx [Tk, 1, di], w [Tq, H], lse [H, Tq], lse_idx [H, Tq],
    g [Tq, H], q_tiles [S, 8] int32, tile_counter [1] and done [H, S, 4] int32 of 0, dq_idx [Tq, H, di], dw [Tq, H],
    parts [H, Tk // 64 + B, 64 di], scale, heads_together, ctas): bf16, what is no row of q or k fp32."""
    tokens, keys, heads, count, part_tiles = (cute.sym_int() for _ in range(5))
    inputs = fake_inputs(tokens, keys, heads, dim, index_dim)
    w, g, dw = (fake_by_query(tokens, heads) for _ in range(3))
    lse, lse_idx = (fake_by_head(heads, tokens) for _ in range(2))
    compact = cute.runtime.make_fake_compact_tensor
    done = compact(Int32, (heads, count, KEY_WARPS), stride_order=(2, 1, 0), assumed_align=4)
    parts = compact(Float32, (heads, part_tiles, KEYS * index_dim), stride_order=(2, 1, 0), assumed_align=16)
    return compile_sm90(
        PerHeadGradientSm90(dim, index_dim),
        *(*inputs, w, lse, lse_idx, g, fake_q_tiles(count), fake_tile_counter(), done),
        *(fake_rows((tokens, heads, index_dim)), dw, parts, Float32(1.0), Int32(1), Int32(1), fake_stream()),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [(compile_per_head_gradient, (dim, index_dim)) for dim in PER_HEAD_CHANNELS for index_dim in INDEX_CHANNELS]
