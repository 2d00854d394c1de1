"""The sparse stage's indexer loss: the KL divergence of the attention's and the indexer's distributions over each
query's selected keys.

p[j] = sum_h exp(scale q_h . kv[j] - lse_h), normalised over j;  I[j] = sum_i w_i relu(q_idx_i . k_idx[j])
kl = sum_j p[j] log(p[j] / softmax(I)[j]);  d_scores[j] = softmax(I)[j] - p[j], for j of a query's selected keys

Plan
- A work tile is a query (static persistent scheduler). A CTA iterates over tiles of 64 of the query's keys. The
  products' rows are heads, so each lane keeps the LSEs and weights of its two rows in registers. Q stays in registers
  (RMEM_CHUNKS chunks of 64 channels) and in shared memory (the other chunks). Operand B is the keys, in shared memory.
- Two attention warpgroups. With more than 64 heads, each has 64 heads and every tile. With at most 64, each has all
  heads and they alternate tiles. One computes exponentials while the other multiplies. They pass sums over a warp's 16
  heads to the index warpgroup through a pipeline.
- The index warpgroup (sparse_indexer_target_index.py) computes the indexer's scores of every tile and adds up the
  attention's sums. After a query's last tile it normalises, reduces and stores, while the attention warpgroups start
  the next query.
- The producer warpgroup gathers 16 bytes per lane: keys into a pipeline of chunks,
  index keys into a pipeline of tiles. A query's q rows use the same pipelines, before its keys.
- Exponents are shifted up by RAISED. The LSE may include a window and a sink, so all of a head's keys may lie far below
  it. Terms down to 2^(-126 - RAISED), e^-128, still count.
Shared memory: stages of keys, index keys and sums; the chunks of Q that are not in registers; p and I of a query.
Registers: ATTENTION_REGISTERS x 2 + INDEX_REGISTERS + PRODUCER_REGISTERS = 512 per lane of the four warpgroups.
Constraints: bf16; 576 or 512 channels, up to 128 heads; up to 64 index heads of 64 or 128 channels; up to
MAX_SPARSE_KEYS keys.
Roofline: per tile of 128 heads x 576 and 64 index heads x 128, wgmma takes 2560 cycles and shared memory 2240.
Measured: 4190. With 64 heads measured 3200, where attention's forward pass takes 3140 and gathers four fifths as
much. The kernel takes 0.65 to 0.72 times the forward pass's time with 128 heads, 0.82 to 1.21 with 64.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.copies import arrive_when_gathered
from dsa.cute.fake_tensors import fake_stream
from dsa.cute.pipeline import Pipeline, PipelineState, pipeline_storage, start
from dsa.cute.sm90 import LOG2E, SHARED_BYTES, WARPGROUP, opaque
from dsa.cute.work_tile import static_persistent_scheduler
from dsa.kernels.training.fake_tensors import fake_indices, fake_line, fake_numbers, fake_rows
from dsa.kernels.training.limits import INDEX_CHANNELS, MAX_SPARSE_HEADS, MAX_SPARSE_KEYS, MLA_CHANNELS
from dsa.kernels.training.mainloop import accumulator, finish_prologue, release, skip, thread_indices, words_of
from dsa.kernels.training.sparse_indexer_target_index import (
    ATTENTION_BARRIER,
    ATTENTION_WARPS,
    INDEX_STAGES,
    INDEX_WARPS,
    STEPS,
    SUM_STAGES,
    THREADS,
    IndexWarpgroup,
    Inputs,
    Pipelines,
    SharedTensors,
    WarpRole,
    load_q_rmem,
    sum_rows,
    sums_state,
)
from dsa.kernels.training.topk_gather import (
    CHUNK,
    CHUNK_BYTES,
    TILE,
    QuerySchedule,
    chunk_layout,
    gather_chunk,
    head_rows,
    key_rows,
    own_rows,
    selected,
    wait_for_wgmma,
)
from dsa.runtime.compile_cache import cached, compile_sm90

ATTENTION_REGISTERS, INDEX_REGISTERS, PRODUCER_REGISTERS = 176, 112, 48
RMEM_CHUNKS = 7  # chunks of Q in registers
KEY_STAGES = {576: 17, 512: 19}  # chunks of keys, per number of channels
RELEASE_GROUP = 3  # chunks per wgmma group; a group's stages are released while the next group runs
RAISED = 60.0  # in powers of two; 2^60 x 128 heads x MAX_SPARSE_KEYS is finite


class SparseIndexerTargetSm90:
    """channels: per key. row_tiles: 1 or 2, for up to 64 or 128 heads. index_channels: per index key."""

    def __init__(self, channels: int, row_tiles: int, index_channels: int):
        self.channels, self.row_tiles, self.index_channels = channels, row_tiles, index_channels
        self.chunks, self.index_chunks = channels // CHUNK, index_channels // CHUNK
        self.smem_chunks, self.stages = self.chunks - RMEM_CHUNKS, KEY_STAGES[channels]

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kv: cute.Tensor,
        q_idx: cute.Tensor,
        k_idx: cute.Tensor,
        w_idx: cute.Tensor,
        indices: cute.Tensor,
        lse: cute.Tensor,
        kl: cute.Tensor,
        d_scores: cute.Tensor,
        scale: Float32,
        ctas: Int32,
        stream,
    ):
        k_major, registers = cute.nvgpu.OperandMajorMode.K, cute.nvgpu.warpgroup.OperandSource.RMEM
        make, kinds, shape = sm90.make_trivial_tiled_mma, (BFloat16, BFloat16, k_major, k_major), (TILE, TILE)
        smem_mma = make(*kinds, Float32, (1, 1, 1), shape)
        rmem_mma = make(*kinds, Float32, (1, 1, 1), shape, registers)
        keys_layout = chunk_layout(BFloat16, self.stages)
        index_layout = chunk_layout(BFloat16, INDEX_STAGES * self.index_chunks)
        q_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (TILE, TILE, CHUNK), BFloat16, self.smem_chunks * 2)

        @cute.struct
        class Storage:
            key_barriers: pipeline_storage(self.stages)
            index_barriers: pipeline_storage(INDEX_STAGES)
            sum_barriers: pipeline_storage(SUM_STAGES)
            parts: cute.struct.MemRange[Float32, 12]
            keys: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(keys_layout)], 1024]
            index: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(index_layout)], 1024]
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(q_layout)], 1024]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, TILE * ATTENTION_WARPS * SUM_STAGES], 16]
            own_sums: cute.struct.Align[cute.struct.MemRange[Float32, TILE * INDEX_WARPS * 2], 16]
            target: cute.struct.Align[cute.struct.MemRange[Float32, MAX_SPARSE_KEYS], 16]
            scores: cute.struct.Align[cute.struct.MemRange[Float32, MAX_SPARSE_KEYS], 16]

        assert Storage.size_in_bytes() <= SHARED_BYTES
        self.storage = Storage
        inputs = Inputs(q, kv, q_idx, k_idx, w_idx, indices, lse)
        self.kernel(inputs, kl, d_scores, scale, smem_mma, rmem_mma, keys_layout, index_layout, q_layout).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        inputs: Inputs,
        kl: cute.Tensor,
        d_scores: cute.Tensor,
        scale: Float32,
        smem_mma: cute.TiledMma,
        rmem_mma: cute.TiledMma,
        keys_layout: cute.ComposedLayout,
        index_layout: cute.ComposedLayout,
        q_layout: cute.ComposedLayout,
    ):
        tid, warp, lane = thread_indices()
        scheduler = static_persistent_scheduler()
        storage = SmemAllocator().allocate(self.storage)
        keys = storage.keys.get_tensor(keys_layout.outer, swizzle=keys_layout.inner)
        index = storage.index.get_tensor(index_layout.outer, swizzle=index_layout.inner)
        sq = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        pipelines = Pipelines(
            Pipeline.of(storage.key_barriers, self.stages),
            Pipeline.of(storage.index_barriers, INDEX_STAGES),
            Pipeline.of(storage.sum_barriers, SUM_STAGES),
        )
        shared = SharedTensors(
            storage.sums.get_tensor(cute.make_layout((TILE, ATTENTION_WARPS, SUM_STAGES))),
            storage.own_sums.get_tensor(cute.make_layout((TILE, INDEX_WARPS, 2))),
            storage.target.get_tensor(cute.make_layout(MAX_SPARSE_KEYS)),
            storage.scores.get_tensor(cute.make_layout(MAX_SPARSE_KEYS)),
            storage.parts.get_tensor(cute.make_layout(12)),
        )
        if tid == 0:
            # Each producer lane arrives for its copies; consumers arrive once per warp.
            pipelines.keys.init(ATTENTION_WARPS, WARPGROUP)
            pipelines.index.init(INDEX_WARPS, WARPGROUP)
            pipelines.sums.init(INDEX_WARPS, 4 * self.row_tiles)
        finish_prologue()
        schedule = QuerySchedule.of(scheduler, inputs.q, inputs.indices)
        if warp >= WarpRole.PRODUCER:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            self.produce(inputs, pipelines, keys, index, schedule, warp - WarpRole.PRODUCER, lane)
        elif warp >= WarpRole.INDEX:
            cute.arch.setmaxregister_decrease(INDEX_REGISTERS)
            consumer = IndexWarpgroup(self.index_chunks, self.row_tiles)
            own_warp = warp - WarpRole.INDEX
            consumer.run(inputs, pipelines, shared, kl, d_scores, rmem_mma, index, schedule, own_warp, lane)
        else:
            cute.arch.setmaxregister_increase(ATTENTION_REGISTERS)
            mmas = smem_mma, rmem_mma
            self.attend(inputs, pipelines, shared, *mmas, keys, sq, scale, schedule, warp // 4, warp % 4, lane)

    @cute.jit
    def produce(self, inputs: Inputs, pipelines: Pipelines, keys, index, schedule: QuerySchedule, warp, lane):
        """The producer warpgroup: load the q rows and then the keys of every query of this CTA. keys, index: the stages
        of chunks and of index tiles in shared memory."""
        keys_start, index_start = Int32(keys.iterator.toint()), Int32(index.iterator.toint())
        count = inputs.kv.shape[0]
        rows = own_rows(warp, lane)
        key_state, index_state = start(), start()
        for query in cutlass.range(schedule.first, schedule.queries, schedule.step, unroll=1):
            for part in cutlass.range_constexpr(self.row_tiles):
                sources, valid = head_rows(inputs.q, query, part * TILE, rows, lane)
                key_state = self.load_chunks(pipelines.keys, keys_start, sources, valid, key_state, warp, lane)
            sources, valid = head_rows(inputs.q_idx, query, 0, rows, lane)
            index_state = self.load_index(pipelines.index, index_start, sources, valid, index_state, warp, lane)
            found = selected(inputs.indices[query, None], Int32(0), rows, count)
            for tile in cutlass.range(schedule.key_tiles, unroll=1):
                sources, valid = key_rows(inputs.kv, found, lane)
                index_sources, _ = key_rows(inputs.k_idx, found, lane)
                # Prefetch the next tile's indices while this tile's keys are gathered.
                found = selected(inputs.indices[query, None], (tile + 1) * TILE, rows, count)
                key_state = self.load_chunks(pipelines.keys, keys_start, sources, valid, key_state, warp, lane)
                index_state = self.load_index(
                    pipelines.index, index_start, index_sources, valid, index_state, warp, lane
                )

    @cute.jit
    def load_chunks(self, pipeline: Pipeline, start: Int32, sources, valid, state: PipelineState, warp, lane):
        for chunk in cutlass.range_constexpr(self.chunks):
            pipeline.producer_wait(state)
            gather_chunk(start + state.stage * CHUNK_BYTES, sources, valid, chunk, warp, lane)
            arrive_when_gathered(pipeline.producer_barrier(state))
            state = pipeline.advance(state)
        return state

    @cute.jit
    def load_index(self, pipeline: Pipeline, start: Int32, sources, valid, state: PipelineState, warp, lane):
        pipeline.producer_wait(state)
        for chunk in cutlass.range_constexpr(self.index_chunks):
            target = start + (state.stage * self.index_chunks + chunk) * CHUNK_BYTES
            gather_chunk(target, sources, valid, chunk, warp, lane)
        arrive_when_gathered(pipeline.producer_barrier(state))
        return pipeline.advance(state)

    @cute.jit
    def attend(
        self,
        inputs: Inputs,
        pipelines: Pipelines,
        shared: SharedTensors,
        smem_mma,
        rmem_mma,
        keys,
        sq,
        scale,
        schedule: QuerySchedule,
        side,
        warp,
        lane,
    ):
        """The mainloop of attention warpgroup `side`: compute exponentials and sum them over heads."""
        tid = warp * 32 + lane
        thr = smem_mma.get_slice(tid)
        q_smem = smem_mma.make_fragment_A(thr.partition_A(sq))
        rk = smem_mma.make_fragment_B(thr.partition_B(keys))
        rmem_shape = *rmem_mma.get_slice(tid).partition_shape_A((TILE, CHUNK)), RMEM_CHUNKS
        q_rmem = cute.make_rmem_tensor(rmem_shape, BFloat16)
        acc, flat = accumulator(thr, (TILE, TILE))
        offsets = cute.make_rmem_tensor((2,), Float32)
        mmas, queries = (smem_mma, rmem_mma), (q_smem, q_rmem)
        state, tiles = start(), Int32(0)
        for query in cutlass.range(schedule.first, schedule.queries, schedule.step, unroll=1):
            for r in cutlass.range_constexpr(2):
                head = warp * 16 + (lane >> 2) + 8 * r
                if const_expr(self.row_tiles == 2):
                    head += side * TILE
                offsets[r] = -Float32(float("inf"))
                if head < inputs.q.shape[1]:
                    offsets[r] = RAISED - inputs.lse[query, head] * LOG2E
            # Wait until all warps have finished the previous query's products before Q is overwritten: PTX does not
            # say which rows of shared memory a warp's part of a wgmma reads.
            cute.arch.barrier(barrier_id=ATTENTION_BARRIER + side, number_of_threads=WARPGROUP)
            for part in cutlass.range_constexpr(self.row_tiles):
                state = self.load_q(pipelines.keys, q_rmem, keys, sq, state, part, side, warp, lane)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=ATTENTION_BARRIER + side, number_of_threads=WARPGROUP)
            if const_expr(self.row_tiles == 2):
                for tile in cutlass.range(schedule.key_tiles, unroll=1):
                    state = self.multiply(acc, mmas, queries, rk, pipelines.keys, state, side)
                    self.sum_heads(flat, offsets, pipelines, shared, scale, tiles + tile, side * 4 + warp, lane)
            else:
                if side == 1 and schedule.key_tiles > 0:
                    state = skip(pipelines.keys, state, self.chunks)
                for tile in cutlass.range(side, schedule.key_tiles, 2, unroll=1):
                    state = self.multiply(acc, mmas, queries, rk, pipelines.keys, state, side)
                    self.sum_heads(flat, offsets, pipelines, shared, scale, tiles + tile, warp, lane)
                    if tile + 1 < schedule.key_tiles:
                        state = skip(pipelines.keys, state, self.chunks)
            tiles += schedule.key_tiles

    @cute.jit
    def load_q(
        self, pipeline: Pipeline, q_rmem, keys, sq, state: PipelineState, part: cutlass.Constexpr, side, warp, lane
    ) -> PipelineState:
        """Consume 64 rows of the query from the pipeline. If they are this warpgroup's, keep them in registers and
        shared memory."""
        words = words_of(q_rmem, 4, STEPS, RMEM_CHUNKS)
        target = cute.recast_ptr(sq.iterator, cute.make_swizzle(0, 4, 3), dtype=BFloat16)
        source = cute.recast_ptr(keys.iterator, cute.make_swizzle(0, 4, 3), dtype=BFloat16)
        vector = cute.make_rmem_tensor((8,), BFloat16)
        for chunk in cutlass.range_constexpr(self.chunks):
            pipeline.consumer_wait(state)
            if self.row_tiles == 1 or side == part:
                memory = source + state.stage * (TILE * CHUNK)
                if const_expr(chunk < RMEM_CHUNKS):
                    load_q_rmem(words, chunk, memory, warp, lane)
                else:
                    place = target + (side * self.smem_chunks + chunk - RMEM_CHUNKS) * (TILE * CHUNK)
                    for i in cutlass.range_constexpr(TILE * CHUNK // (8 * WARPGROUP)):
                        here = (warp * (TILE * CHUNK // 32) + i * 32 + lane) * 8
                        cute.autovec_copy(cute.make_tensor(memory + here, cute.make_layout(8)), vector)
                        cute.autovec_copy(vector, cute.make_tensor(place + here, cute.make_layout(8)))
            cute.arch.sync_warp()
            state = release(pipeline, state)
        return state

    @cute.jit
    def multiply(self, acc, mmas, queries, rk, pipeline: Pipeline, state: PipelineState, side) -> PipelineState:
        """acc = Q K^T of the next tile, chunk by chunk. A group's stages are released after the next group is
        issued."""
        (smem_mma, rmem_mma), (q_smem, q_rmem) = mmas, queries
        released = state
        cute.nvgpu.warpgroup.fence()
        for chunk in cutlass.range_constexpr(self.chunks):
            wait_for_wgmma(pipeline, state)
            own = opaque(state.stage)
            for step in cutlass.range_constexpr(STEPS):
                if const_expr(chunk < RMEM_CHUNKS):
                    rmem_mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, chunk + step > 0)
                    cute.gemm(rmem_mma, acc, q_rmem[None, None, step, chunk], rk[None, None, step, own], acc)
                else:
                    smem_mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
                    rows = q_smem[None, None, step, side * self.smem_chunks + chunk - RMEM_CHUNKS]
                    cute.gemm(smem_mma, acc, rows, rk[None, None, step, own], acc)
            state = pipeline.advance(state)
            if const_expr(chunk % RELEASE_GROUP == RELEASE_GROUP - 1 or chunk == self.chunks - 1):
                cute.nvgpu.warpgroup.commit_group()
                if const_expr(chunk >= RELEASE_GROUP):
                    cute.nvgpu.warpgroup.wait_group(1)
                    released = release(pipeline, released, RELEASE_GROUP)
        cute.nvgpu.warpgroup.wait_group(0)
        release(pipeline, released, (self.chunks - 1) % RELEASE_GROUP + 1)
        return state

    @cute.jit
    def sum_heads(self, flat, offsets, pipelines: Pipelines, shared: SharedTensors, scale, tile, warp, lane):
        """Sum a tile's exponentials over the warp's heads, and pass the sums on. tile: counted over all queries."""
        values = []
        for i in cutlass.range_constexpr(TILE // 4):
            at = i // 2 * 4 + i % 2
            upper = cute.math.exp2(cute.math.fma(flat[at], scale, offsets[0]), fastmath=True)
            lower = cute.math.exp2(cute.math.fma(flat[at + 2], scale, offsets[1]), fastmath=True)
            values.append(upper + lower)
        sums = cute.make_rmem_tensor((2,), Float32)
        sums[0], sums[1] = sum_rows(values, lane)
        state = sums_state(tile)
        pipelines.sums.producer_wait(state)
        cute.autovec_copy(sums, cute.local_tile(shared.sums[None, warp, state.stage], (2,), (lane,)))
        cute.arch.sync_warp()
        pipelines.sums.producer_commit(state)


@cached
def compile_sparse_indexer_target(channels: int, row_tiles: int, index_channels: int):
    """-> f(q [T, H, d], kv [Tk, d], q_idx [T, Hi, di], k_idx [Tk, di], w_idx [T, Hi] fp32, indices [T, K], lse [T, H]
    fp32, kl [T] fp32, d_scores [T, K'], scale * log2(e), ctas); all others bf16

    H up to 64 * row_tiles, Hi up to 64, K from 1 to MAX_SPARSE_KEYS; K' is K rounded up to a multiple of 64, and all of
    d_scores is written. Rows of q, kv, q_idx and k_idx start at multiples of 16 bytes.
    """
    queries, heads, index_heads, keys = (cute.sym_int() for _ in range(4))
    q, kv = fake_rows(BFloat16, queries, heads, channels), fake_rows(BFloat16, keys, channels)
    q_idx = fake_rows(BFloat16, queries, index_heads, index_channels)
    return compile_sm90(
        SparseIndexerTargetSm90(channels, row_tiles, index_channels),
        *(q, kv, q_idx, fake_rows(BFloat16, keys, index_channels)),
        *(fake_numbers(queries, index_heads), fake_indices(queries), fake_numbers(queries, heads)),
        *(fake_line(Float32, queries), fake_rows(BFloat16, queries, cute.sym_int(divisibility=TILE))),
        *(Float32(0.0), Int32(1), fake_stream()),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [
        (compile_sparse_indexer_target, (channels, row_tiles, index_channels))
        for channels in MLA_CHANNELS
        for row_tiles in range(1, MAX_SPARSE_HEADS // TILE + 1)
        for index_channels in INDEX_CHANNELS
    ]
