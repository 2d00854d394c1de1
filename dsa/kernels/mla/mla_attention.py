"""The mainloops of the consumer warpgroups of MLA attention without swap A/B: rows of Q are M of the wgmmas.

o[r] = sum_j softmax_j(scale * q[r] . k[j]) k[j, :512],  where r is a row: a head of a query

A CTA has TILE_M rows. Keys have 576 or 512 channels and come in tiles of TILE_N keys.

Warp roles
- Score (one warpgroup): computes S = Q K^T by wgmma, with Q_RMEM_CHUNKS k chunks of Q in registers and the others in
  shared memory. It computes the online softmax in registers (mla_softmax.py) and writes P in 16 bits to shared memory.
- Output (two warpgroups): each accumulates 64 rows x 256 channels of O += P V and writes them (mla_epilogue.py).
- Load (one warpgroup): loads keys. All four warps gather selected keys (topk_gather.py), or one warp loads consecutive
  keys (decode_producer.py).
Pipelines
- Work tiles and v chunks pass from the load warps to the score and output warps, and rope parts to the score warps
  (mla_tiles.py).
- P passes from the score warps to the output warps, in two halves of 32 keys (mla_softmax.py).
Overlap: during the softmax of a tile, the score warpgroup computes no S, and the tile's P does not exist yet. To keep
the tensor cores busy in this time, an output warpgroup delays half of O += P V of the previous tile (128 of 256
channels) until S of this tile is done.
Registers: the numbers per score, output and load thread satisfy score + 2 x output + load = 512, the register file
(65536) divided by 128 threads per warpgroup. A score thread needs 32 for S and 16 per k chunk of Q in registers. An
output thread needs 128 for O. A wgmma with 256 columns does not compile in a CTA of 512 threads, so O += P V runs in v
chunks of 128 columns.
"""

from enum import IntEnum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.pipeline import PipelineState, arrive, start
from dsa.cute.sm90 import WARPGROUP, opaque
from dsa.kernels.mla.limits import TILE_M, TILE_N
from dsa.kernels.mla.mla_epilogue import HALF_V, STAGED, Epilogue
from dsa.kernels.mla.mla_roles import MlaShared, QTile, Results, RoleRegisters, WorkTileInfo
from dsa.kernels.mla.mla_softmax import Exchange, ExchangeMemory, SoftmaxState, write_p
from dsa.kernels.mla.mla_tiles import (
    K16,
    K_CHUNK,
    K_PER_V,
    ROPE_AFTER,
    ROPE_CHUNK,
    V_CHUNK,
    V_CHUNKS,
    KvPipeline,
    KvStages,
    KvState,
    k_chunk_order,
    tiled_mma,
)


class WarpRole(IntEnum):
    """The first warp of each role."""

    SCORE = 0
    OUTPUT = 4
    LOAD = 12


class NamedBarrier(IntEnum):
    SCORE = 1
    OUTPUT = 2


THREADS = 4 * WARPGROUP
REGISTERS = RoleRegisters(152, 160, 40)
Q_RMEM_CHUNKS = 5  # k chunks of Q in registers: the first ones in the order of `k_chunk_order`


class TiledMmas(NamedTuple):
    """The tiled MMAs: `qk` and `qk_rmem` for S = Q K^T with Q in shared memory and in registers, `pv` for O += P V."""

    qk: cute.TiledMma
    qk_rmem: cute.TiledMma
    pv: cute.TiledMma


class MlaAttention:
    """Attention over keys of `head_dim` channels, 576 or 512, in the stages `kv`; `epilogue` writes the
    results.

    A kernel can override `prefetch_q` and `prologue`. It must define how Q is loaded and which keys a row sees:

    load_q(shared, q_rmem, state, warp, lane)
        Complete the load of the work tile's Q into registers and shared memory. Return the state after Q's stages if Q
        comes through the key stages, otherwise `state`.
    apply_mask(scores, softmax, shared, state, work, q_tile, key, tid, lane)
        Set the scores of keys that a row does not see to -inf. If the values of such keys can be NaN in shared memory,
        zero-fill them. `state`: the ring state before the tile. `key`: index of the tile's first key.
    """

    q_in_ring = False  # whether Q comes through the key stages, as one tile before the keys

    def __init__(self, kv: KvStages, head_dim: int, epilogue: Epilogue):
        self.dtype, self.kv = kv.dtype, kv
        self.order = k_chunk_order(head_dim)
        self.exchange_memory = ExchangeMemory(kv.dtype)
        self.epilogue = epilogue

    def tiled_mmas(self) -> TiledMmas:
        return TiledMmas(
            tiled_mma(self.dtype, "K K", (TILE_M, TILE_N)),
            tiled_mma(self.dtype, "K K", (TILE_M, TILE_N), a_in_registers=True),
            tiled_mma(self.dtype, "K MN", (TILE_M, V_CHUNK)),
        )

    def q_layout(self) -> cute.ComposedLayout:
        shape = (TILE_M, TILE_N, (len(self.order) - Q_RMEM_CHUNKS) * K_CHUNK)
        return sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, shape, self.dtype, 1)

    def operand_storage(self) -> type:
        @cute.struct
        class OperandStorage:
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(self.q_layout())], 1024]
            kv: self.kv.tensor_storage()

        return OperandStorage

    def shared(self, storage) -> MlaShared:
        q_layout = self.q_layout()
        return MlaShared(
            self.kv.pipeline(storage.pipeline),
            self.exchange_memory.exchange(storage.exchange),
            self.kv.tensors(storage.operands.kv),
            storage.operands.q.get_tensor(q_layout.outer, swizzle=q_layout.inner),
        )

    @cute.jit
    def prefetch_q(self, q, shared: MlaShared, q_rmem, work_state: PipelineState, q_tile: QTile, warp, lane):
        """Start to load Q of the next work tile before the load warp publishes the work tile.

        A no-op here. Kernels whose load warp announces batch_idx early (AnnouncedWorkTilePipeline) override it.
        """

    @cute.jit
    def prologue(self, softmax: SoftmaxState, work: WorkTileInfo, q_tile: QTile, tile_row):
        """Set `softmax.limits` for `apply_mask`: the number of keys that each of the lane's rows sees. The rows are
        `tile_row` and `tile_row` + 8.

        A no-op here. Kernels whose mask needs the limits override it.
        """

    @cute.jit
    def score_mainloop(
        self,
        q,
        results: Results,
        mmas: TiledMmas,
        shared: MlaShared,
        q_tile: QTile,
        scale,
        tid,
        warp,
        lane,
    ):
        pipeline, exchange = shared.pipeline, shared.exchange
        thr = mmas.qk.get_slice(tid)
        rq = mmas.qk.make_fragment_A(thr.partition_A(shared.q))
        rk = mmas.qk.make_fragment_B(thr.partition_B(shared.kv.v))
        rr = mmas.qk.make_fragment_B(thr.partition_B(shared.kv.rope))
        q_shape = mmas.qk_rmem.get_slice(tid).partition_shape_A((TILE_M, K_CHUNK))
        q_rmem = cute.make_rmem_tensor((*q_shape, Q_RMEM_CHUNKS), self.dtype)
        acc = cute.make_rmem_tensor(thr.partition_shape_C((TILE_M, TILE_N)), Float32)
        scores = cute.make_tensor(acc.iterator, cute.make_layout(TILE_N // 2))
        tile_row = warp * 16 + lane // 4  # the lane's second row is 8 further
        softmax = SoftmaxState(*[cute.make_rmem_tensor((2,), dtype) for dtype in (Int32, Float32, Float32, Float32)])
        state, p_state, end_state = pipeline.start(), start(), start()
        work_state, batch_idx = start(), Int32(0)
        while batch_idx >= 0:
            self.prefetch_q(q, shared, q_rmem, work_state, q_tile, warp, lane)
            work = pipeline.work.current(work_state)
            work_state = pipeline.work.release(work_state)
            batch_idx = work.batch_idx
            if batch_idx >= 0:
                self.prologue(softmax, work, q_tile, tile_row)
                softmax.reset()
                state = self.load_q(shared, q_rmem, state, warp, lane)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=NamedBarrier.SCORE, number_of_threads=WARPGROUP)
                key = work.first_tile * TILE_N
                for _ in cutlass.range(work.tiles, unroll=1):
                    tile_state = state
                    state = self.start_scores(acc, mmas, q_rmem, rq, rk, rr, pipeline, state)
                    exchange.p_pipeline.producer_wait(p_state)
                    cute.nvgpu.warpgroup.wait_group(0)
                    exchange.scored.arrive()
                    self.apply_mask(scores, softmax, shared, tile_state, work, q_tile, key, tid, lane)
                    write_p(scores, softmax, exchange, p_state, scale, warp, lane, self.epilogue.with_max_logits)
                    self.kv.release(pipeline.rope, tile_state.rope)
                    p_state = exchange.p_pipeline.advance(p_state)
                    key += TILE_N
                exchange.end.producer_wait(end_state)
                for r in cutlass.range_constexpr(2):
                    self.epilogue.write_lse(results, exchange, work, q_tile, softmax, r, tile_row + 8 * r, lane)
                cute.arch.sync_warp()
                exchange.end.producer_commit(end_state)
                end_state = exchange.end.advance(end_state)

    @cute.jit
    def start_scores(self, acc, mmas: TiledMmas, q_rmem, rq, rk, rr, pipeline: KvPipeline, state: KvState) -> KvState:
        """Issue acc = Q K^T of the tile at `state`, one k chunk after the other as they arrive. Return the state after
        the tile."""
        cute.nvgpu.warpgroup.fence()
        loaded = self.kv.tile_is_loaded(pipeline, KvState(pipeline.v.skip(state.v, V_CHUNKS - 1), state.rope))
        for n, chunk in enumerate(self.order):
            if not loaded:
                if const_expr(n == ROPE_AFTER * K_PER_V):
                    pipeline.rope.consumer_wait(state.rope)
                if const_expr(chunk < ROPE_CHUNK):
                    pipeline.v.consumer_wait(state.v, chunk % K_PER_V)
                self.kv.fence()
            v_stage, rope_stage = opaque(state.v.stage), opaque(state.rope.stage)
            for step in cutlass.range_constexpr(K_CHUNK // K16):
                keys = rr[None, None, step, rope_stage]
                if const_expr(chunk < ROPE_CHUNK):
                    keys = rk[None, None, chunk % K_PER_V * (K_CHUNK // K16) + step, v_stage]
                if const_expr(n < Q_RMEM_CHUNKS):
                    mmas.qk_rmem.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, n + step > 0)
                    cute.gemm(mmas.qk_rmem, acc, q_rmem[None, None, step, n], keys, acc)
                else:
                    mmas.qk.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, n + step > 0)
                    at = (n - Q_RMEM_CHUNKS) * (K_CHUNK // K16) + step
                    cute.gemm(mmas.qk, acc, rq[None, None, at, 0], keys, acc)
            if const_expr(chunk < ROPE_CHUNK and chunk % K_PER_V == K_PER_V - 1):
                state = pipeline.advance_v(state)
        cute.nvgpu.warpgroup.commit_group()
        return pipeline.advance_rope(state)

    @cute.jit
    def output_mainloop(
        self,
        results: Results,
        mma: cute.TiledMma,
        shared: MlaShared,
        q_tile: QTile,
        tid,
        warp,
        lane,
        side,
    ):
        """Run output warpgroup `side` over all work tiles of this CTA. Warpgroup 0 computes the first 256 channels of
        O, warpgroup 1 the last 256."""
        pipeline, exchange, v = shared.pipeline, shared.exchange, shared.kv.v
        thr = mma.get_slice(tid)
        values = cute.make_tensor(v.iterator, cute.select(v.layout, mode=[1, 0, 2]))
        rp = mma.make_fragment_A(thr.partition_A(exchange.p))
        rv = mma.make_fragment_B(thr.partition_B(values))
        flat = cute.make_rmem_tensor((HALF_V // 2,), Float32)
        of_v_chunk = cute.make_layout(thr.partition_shape_C((TILE_M, V_CHUNK)))
        accs = [cute.make_tensor(flat.iterator + half * (V_CHUNK // 2), of_v_chunk) for half in range(2)]
        tile_row = warp * 16 + lane // 4
        work_state, end_state, batch_idx = start(), start(), Int32(0)
        v_state, p_state, scored_phase = PipelineState(Int32(side), Int32(0)), start(), Int32(0)
        mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
        while batch_idx >= 0:
            work = pipeline.work.current(work_state)
            work_state = pipeline.work.release(work_state)
            batch_idx, tiles = work.batch_idx, work.tiles
            if batch_idx >= 0:
                flat.fill(0.0)
                last_p = p_state
                if const_expr(self.q_in_ring):
                    v_state = pipeline.v.skip(v_state, V_CHUNKS)
                for n in cutlass.range(tiles, unroll=1):
                    exchange.p_pipeline.consumer_wait(p_state, 0)
                    upper = exchange.rescale[tile_row, p_state.stage]
                    lower = exchange.rescale[tile_row + 8, p_state.stage]
                    if cute.arch.vote_any_sync(upper != 1.0 or lower != 1.0):
                        for i in cutlass.range_constexpr(HALF_V // 2):
                            flat[i] *= lower if i // 2 % 2 else upper
                    cute.nvgpu.warpgroup.fence()
                    for half in cutlass.range_constexpr(2):
                        if const_expr(half == 1):
                            scored_phase ^= 1
                            if n < tiles - 1:
                                exchange.scored.wait(scored_phase)  # S of the next tile is done
                        for step in cutlass.range_constexpr(TILE_N // K16):
                            if const_expr(half == 0 and step == TILE_N // 32):
                                exchange.p_pipeline.consumer_wait(p_state, 1)
                            a, b = rp[None, None, step, p_state.stage], rv[None, None, step, v_state.stage]
                            cute.gemm(mma, accs[half], a, b, accs[half])
                        cute.nvgpu.warpgroup.commit_group()
                        cute.nvgpu.warpgroup.wait_group(0)
                        self.kv.release(pipeline.v, v_state)
                        v_state = pipeline.v.skip(v_state, 2)
                    if n < tiles - 1:
                        exchange.p_pipeline.consumer_release(p_state)
                    last_p = p_state
                    p_state = exchange.p_pipeline.advance(p_state)
                exchange.end.consumer_wait(end_state)
                upper, lower = exchange.inverse[tile_row], exchange.inverse[tile_row + 8]
                row = opaque(q_tile.first_row + tile_row)
                rows = [cutlass.min(row + 8 * r, q_tile.rows - 1) for r in range(2)]
                whole = (flat, upper, lower, results, q_tile, batch_idx, row, rows, exchange, last_p.stage, side)
                if const_expr(results.out_partial is None):
                    self.store_whole(*whole, warp, lane)
                else:
                    if work.split_idx >= 0:
                        targets = [results.out_partial[work.split_idx, q_tile.kv_head, rows[r], None] for r in range(2)]
                        self.epilogue.store_partial(flat, upper, lower, targets, q_tile.rows - row, side, lane)
                    else:
                        self.store_whole(*whole, warp, lane)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    arrive(exchange.end.consumer_barrier(end_state))
                    if tiles > 0:
                        arrive(exchange.p_pipeline.consumer_barrier(last_p))
                end_state = exchange.end.advance(end_state)

    @cute.jit
    def store_whole(
        self,
        acc,
        upper,
        lower,
        results: Results,
        q_tile: QTile,
        batch_idx,
        row,
        rows,
        exchange: Exchange,
        p_stage,
        side,
        warp,
        lane,
    ):
        """Store O of a work tile that is not a split.

        row   the lane's first row among the rows of the `q_tile`'s KV head; it can be past the last row
        rows  the lane's two rows; a row past the last row is replaced by the last row
        """
        coords = [q_tile.coord(batch_idx, rows[r]) for r in range(2)]
        self.store_staged(acc, upper, lower, results, coords, q_tile.rows - row, exchange, p_stage, side, warp, lane)

    @cute.jit
    def store_staged(
        self, acc, upper, lower, results: Results, coords, left, exchange: Exchange, p_stage, side, warp, lane
    ):
        """Store O of two rows per lane, staged in the memory of stage `p_stage` of P.

        coords  (sequence, query, head) of each of the two rows
        left    number of valid rows from the lane's first row on; the lane's second row is 8 further

        The barrier ensures that both output warpgroups have read the stage of P before either of them overwrites it.
        """
        staging = cute.recast_ptr(exchange.p.iterator, cute.make_swizzle(0, 4, 3), dtype=self.dtype)
        staging += p_stage * (TILE_M * TILE_N) + (side * 4 + warp) * 16 * STAGED
        cute.arch.barrier(barrier_id=NamedBarrier.OUTPUT, number_of_threads=2 * WARPGROUP)
        self.epilogue.store(acc, upper, lower, results, coords, left, staging, side, lane)
