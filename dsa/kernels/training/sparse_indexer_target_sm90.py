"""The indexer loss of the sparse stage: the KL divergence between the attention's and the indexer's distributions over
each query's selected keys.

p[j] = sum_h exp(scale q_h . kv[j] - lse_h), normalised over j;  I[j] = sum_i w_i relu(q_idx_i . k_idx[j])
kl = sum_j p[j] log(p[j] / softmax(I)[j]);  d_scores[j] = softmax(I)[j] - p[j], for j of a query's selected keys

Plan
- A work tile is a query (static persistent scheduler). A CTA iterates over the query's keys, in tiles of 64. The rows
  of the products are heads, so each lane keeps the LSEs and weights of two rows in registers. Q stays in registers
  (RMEM_CHUNKS chunks of 64 channels) and in shared memory (the other chunks). Operand B is the keys, in shared memory.
- Two attention warpgroups. With more than 64 heads, each has 64 heads and computes every tile. With at most 64 heads,
  each has all heads, and the warpgroups alternate tiles. One computes exponentials while the other multiplies. Each
  warp sums the exponentials over its 16 heads and passes the sums to the index warpgroup through a pipeline.
- The index warpgroup computes the indexer's scores of every tile and adds up the attention's sums. After a query's last
  tile it normalises p and softmax(I) and stores kl and d_scores, while the attention warpgroups start the next query.
- The producer warpgroup gathers 16 bytes per lane: keys into a pipeline of chunks, index keys into a pipeline of tiles.
  A query's q rows go through the same pipelines, before the query's keys.
- RAISED is added to the exponents (in log2). The caller's LSE can include a window and a sink, so the scores of all
  selected keys of a head can be far below the LSE. With RAISED, terms down to 2^(-126 - RAISED), about e^-129, still
  count. The factor 2^RAISED cancels when p is normalised.
Shared memory: stages of keys, index keys and sums; the chunks of Q that are not in registers; p and I of a query.
Registers: 2 x ATTENTION_REGISTERS + INDEX_REGISTERS + PRODUCER_REGISTERS = 512, the register file divided by the 128
threads of a warpgroup.
Constraints: bf16; 576 or 512 channels, up to 128 heads; up to 64 index heads of 64 or 128 channels; up to
MAX_SPARSE_KEYS keys.
Roofline: per tile of 128 heads x 576 channels and 64 index heads x 128 channels, wgmma takes 2560 cycles and shared
memory takes 2240. The measured time is 4190 cycles, and 3200 with 64 heads. A tile of attention's forward pass with 64
heads takes 3140 cycles, but gathers no index keys, so only 80% of the bytes. Compared with attention's forward pass,
the kernel takes 0.65 to 0.72 times as long with 128 heads and 0.82 to 1.21 times as long with 64.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.copies import arrive_when_gathered
from dsa.cute.fake_tensors import fake_stream
from dsa.cute.pipeline import Pipeline, PipelineState, pipeline_storage, start
from dsa.cute.reductions import warp_reduce_sum
from dsa.cute.shared_memory import pack
from dsa.cute.sm90 import LN2, LOG2E, SHARED_BYTES, WARPGROUP, opaque
from dsa.cute.work_tile import static_persistent_scheduler
from dsa.kernels.training.fake_tensors import ShippedVariants, fake_indices, fake_line, fake_numbers, fake_rows
from dsa.kernels.training.limits import INDEX_CHANNELS, MAX_SPARSE_HEADS, MAX_SPARSE_KEYS, MLA_CHANNELS
from dsa.kernels.training.mainloop import (
    accumulator,
    finish_prologue,
    multiply_and_wait,
    release,
    skip,
    smem_layout,
    thread_indices,
    tiled_mma,
    words_of,
)
from dsa.kernels.training.topk_gather import (
    CHUNK,
    CHUNK_BYTES,
    STEPS,
    TILE,
    QuerySchedule,
    gather_chunk,
    gather_tile,
    head_rows,
    key_rows,
    load_chunk,
    load_tile,
    own_rows,
    selected,
    wait_for_wgmma,
)
from dsa.runtime.compile_cache import cached, compile_sm90

THREADS = 4 * WARPGROUP
INDEX_STAGES, SUM_STAGES = 2, 4
# Numbers of attention and index warps, and the index of the first producer warp.
ATTENTION_WARPS, INDEX_WARPS, PRODUCER_WARP = 8, 4, 12
INDEX_BARRIER, ATTENTION_BARRIER = 1, 2  # named barriers; attention warpgroup i uses ATTENTION_BARRIER + i
NOTHING = -3e38  # finite, so that NOTHING - NOTHING is not NaN
SMALLEST = 2.0**-126
INFINITY = float("inf")
ATTENTION_REGISTERS, INDEX_REGISTERS, PRODUCER_REGISTERS = 176, 112, 48
RMEM_CHUNKS = 7  # chunks of Q in registers
KEY_STAGES = {576: 17, 512: 19}  # stages, each for a chunk of a tile of keys; keyed by the number of channels
RELEASE_GROUP = 3  # chunks per wgmma group; a group's stages are released after the next group is issued
RAISED = 60.0  # in log2; 2^60 x 128 heads x MAX_SPARSE_KEYS is finite in fp32


@dataclass(frozen=True)
class Pipelines:
    """The pipelines of a CTA. keys: chunks of 64 rows of q or kv. index: tiles of 64 rows of q_idx or k_idx. sums: a
    tile's sums of exponentials, from the attention warpgroups to the index warpgroup."""

    keys: Pipeline
    index: Pipeline
    sums: Pipeline


@dataclass(frozen=True)
class SharedTensors:
    """fp32 tensors in shared memory.

    sums            [64 keys, 8 warps, SUM_STAGES]: a tile's sums of exponentials over each attention warp's heads
    own_sums        [64 keys, 4 warps, 2]: a tile's weighted scores, summed over each index warp's heads; two buffers,
                    for even and odd tiles
    target, scores  [MAX_SPARSE_KEYS]: a query's p before normalisation, and I
    parts           [12]: partial results that the index warps exchange in a query's epilogue
    """

    sums: cute.Tensor
    own_sums: cute.Tensor
    target: cute.Tensor
    scores: cute.Tensor
    parts: cute.Tensor


@dataclass(frozen=True)
class Inputs:
    """The inputs: q [T, H, d], kv [Tk, d], q_idx [T, Hi, di] and k_idx [Tk, di], bf16; w_idx [T, Hi] and lse [T, H],
    fp32; indices [T, K], int32."""

    q: cute.Tensor
    kv: cute.Tensor
    q_idx: cute.Tensor
    k_idx: cute.Tensor
    w_idx: cute.Tensor
    indices: cute.Tensor
    lse: cute.Tensor


def sums_state(tile: Int32) -> PipelineState:
    """Return the state of the pipeline of sums at key tile `tile`, counted over all queries of the CTA."""
    return PipelineState(tile & (SUM_STAGES - 1), (tile >> SUM_STAGES.bit_length() - 1) & 1)


@cute.jit
def sum_rows(values, lane):
    """Sum a wgmma accumulator tile of 64 columns over the warp's 16 rows.

    values[2 j + e]: the sum of the lane's two rows in column 8 j + 2 (lane % 4) + e. -> [the sum of column 2 lane, the
    sum of column 2 lane + 1]. This is a reduce-scatter of 14 shuffles: each step halves the number of columns per lane.
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


class SparseIndexerTargetSm90:
    """The kernel. channels: channels per key. row_tiles: 1 or 2, for up to 64 or 128 heads. index_channels: channels
    per index key."""

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
        smem_mma = tiled_mma(BFloat16, (TILE, TILE))
        rmem_mma = tiled_mma(BFloat16, (TILE, TILE), from_registers=True)
        keys_layout = smem_layout(TILE, CHUNK, BFloat16, self.stages)
        index_layout = smem_layout(TILE, self.index_channels, BFloat16, INDEX_STAGES)
        q_layout = smem_layout(TILE, CHUNK, BFloat16, self.smem_chunks * 2)

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
        self.kernel(
            *(Inputs(q, kv, q_idx, k_idx, w_idx, indices, lse), kl, d_scores, scale),
            *(smem_mma, rmem_mma, keys_layout, index_layout, q_layout),
        ).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True)

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
            # Every producer thread arrives for its copies of keys and index keys. For the sums, each attention warp
            # arrives once. Consumers arrive once per warp.
            pipelines.keys.init(ATTENTION_WARPS, WARPGROUP)
            pipelines.index.init(INDEX_WARPS, WARPGROUP)
            pipelines.sums.init(INDEX_WARPS, 4 * self.row_tiles)
        finish_prologue()
        schedule = QuerySchedule.of(scheduler, inputs.q, inputs.indices)
        if warp >= PRODUCER_WARP:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            self.produce(inputs, pipelines, keys, index, schedule, warp - PRODUCER_WARP, lane)
        elif warp >= ATTENTION_WARPS:
            cute.arch.setmaxregister_decrease(INDEX_REGISTERS)
            self.index(inputs, pipelines, shared, kl, d_scores, index, schedule, warp - ATTENTION_WARPS, lane)
        else:
            cute.arch.setmaxregister_increase(ATTENTION_REGISTERS)
            self.attend(
                *(inputs, pipelines, shared, smem_mma, rmem_mma, keys, sq, scale, schedule, warp // 4, warp % 4, lane)
            )

    @cute.jit
    def produce(self, inputs: Inputs, pipelines: Pipelines, keys, index, schedule: QuerySchedule, warp, lane):
        """Run the producer warpgroup: load the q rows and then the keys of every query of this CTA. keys, index: the
        stages of `pipelines.keys` and of `pipelines.index` in shared memory."""
        keys_start, index_start = Int32(keys.iterator.toint()), Int32(index.iterator.toint())
        count = inputs.kv.shape[0]
        rows = own_rows(warp, lane)
        key_state, index_state = start(), start()
        for query in cutlass.range(schedule.first, schedule.queries, schedule.step, unroll=1):
            for part in cutlass.range_constexpr(self.row_tiles):
                sources, valid = head_rows(inputs.q, query, part * TILE, rows, lane)
                key_state = self.load_chunks(pipelines.keys, keys_start, sources, valid, key_state, warp, lane)
            sources, valid = head_rows(inputs.q_idx, query, 0, rows, lane)
            pipelines.index.producer_wait(index_state)
            index_state = gather_tile(
                pipelines.index, index_state, index_start, self.index_chunks, sources, valid, warp, lane
            )
            found = selected(inputs.indices[query, None], Int32(0), rows, count)
            for tile in cutlass.range(schedule.key_tiles, unroll=1):
                sources, valid = key_rows(inputs.kv, found, lane)
                index_sources, _ = key_rows(inputs.k_idx, found, lane)
                # Prefetch the next tile's indices while this tile's keys are gathered.
                found = selected(inputs.indices[query, None], (tile + 1) * TILE, rows, count)
                key_state = self.load_chunks(pipelines.keys, keys_start, sources, valid, key_state, warp, lane)
                pipelines.index.producer_wait(index_state)
                index_state = gather_tile(
                    pipelines.index, index_state, index_start, self.index_chunks, index_sources, valid, warp, lane
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
        """Run attention warpgroup `side`: compute each tile's exponentials, and sum them over each warp's heads."""
        tid = warp * 32 + lane
        thr = smem_mma.get_slice(tid)
        q_smem = smem_mma.make_fragment_A(thr.partition_A(sq))
        rk = smem_mma.make_fragment_B(thr.partition_B(keys))
        chunk_shape = rmem_mma.get_slice(tid).partition_shape_A((TILE, CHUNK))
        q_rmem = cute.make_rmem_tensor((*chunk_shape, RMEM_CHUNKS), BFloat16)
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
        """Consume the q rows of 64 heads, from head part * TILE on, from the pipeline of keys. If this warpgroup
        computes with these heads, copy the rows' first RMEM_CHUNKS chunks to registers and the other chunks to shared
        memory."""
        words = words_of(q_rmem, 4, STEPS, RMEM_CHUNKS)
        target = cute.recast_ptr(sq.iterator, cute.make_swizzle(0, 4, 3), dtype=BFloat16)
        source = cute.recast_ptr(keys.iterator, cute.make_swizzle(0, 4, 3), dtype=BFloat16)
        vector = cute.make_rmem_tensor((8,), BFloat16)
        for chunk in cutlass.range_constexpr(self.chunks):
            pipeline.consumer_wait(state)
            if self.row_tiles == 1 or side == part:
                memory = source + state.stage * (TILE * CHUNK)
                if const_expr(chunk < RMEM_CHUNKS):
                    load_chunk(words, chunk, memory, warp, lane)
                else:
                    chunk_start = target + (side * self.smem_chunks + chunk - RMEM_CHUNKS) * (TILE * CHUNK)
                    for i in cutlass.range_constexpr(TILE * CHUNK // (8 * WARPGROUP)):
                        here = (warp * (TILE * CHUNK // 32) + i * 32 + lane) * 8
                        cute.autovec_copy(cute.make_tensor(memory + here, cute.make_layout(8)), vector)
                        cute.autovec_copy(vector, cute.make_tensor(chunk_start + here, cute.make_layout(8)))
            cute.arch.sync_warp()
            state = release(pipeline, state)
        return state

    @cute.jit
    def multiply(self, acc, mmas, queries, rk, pipeline: Pipeline, state: PipelineState, side) -> PipelineState:
        """Compute acc = Q K^T of the next tile, chunk by chunk. The stages of a group of chunks are released after the
        next group is issued. -> the state after the tile."""
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
        """Sum a tile's exponentials over the warp's heads, and pass the sums to the index warpgroup. tile: index of the
        tile, counted over all queries of the CTA."""
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

    @cute.jit
    def index(
        self,
        inputs: Inputs,
        pipelines: Pipelines,
        shared: SharedTensors,
        kl,
        d_scores,
        index_keys,
        schedule: QuerySchedule,
        warp,
        lane,
    ):
        """Run the index warpgroup: for every tile compute the indexer's scores I, and add up the attention warps' sums
        of exponentials. After a query's last tile compute the query's distributions, loss and d_scores."""
        tid = warp * 32 + lane
        # This role's own TiledMma, because a TiledMma whose field is set in one role's branch is unusable in another's.
        mma = tiled_mma(BFloat16, (TILE, TILE), from_registers=True)
        thr = mma.get_slice(tid)
        rk = mma.make_fragment_B(thr.partition_B(index_keys))
        q_rmem = cute.make_rmem_tensor(thr.partition_shape_A((TILE, self.index_channels)), BFloat16)
        words = words_of(q_rmem, 4, STEPS, self.index_chunks)
        acc, flat = accumulator(thr, (TILE, TILE))
        source = cute.recast_ptr(index_keys.iterator, cute.make_swizzle(0, 4, 3), dtype=BFloat16)
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
            load_tile(words, self.index_chunks, source, state, warp, lane)
            cute.arch.sync_warp()
            state = release(pipelines.index, state)
            # Each thread handles one column of every tile. In warps 0 and 1 row_sum is the thread's sum of the target.
            # In warps 2 and 3 row_max is the thread's highest score, and row_sum is the sum of exponentials relative to
            # row_max.
            row_sum, row_max = Float32(0.0), Float32(NOTHING)
            for tile in cutlass.range(schedule.key_tiles, unroll=1):
                valid = selected(inputs.indices[query, None], tile * TILE, [column], inputs.kv.shape[0])[0] >= 0
                wait_for_wgmma(pipelines.index, state)
                multiply_and_wait(mma, acc, q_rmem, rk, opaque(state.stage))
                state = release(pipelines.index, state)
                self.sum_scores(flat, weights, shared, tile & 1, warp, lane)
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
    def sum_scores(self, flat, weights, shared: SharedTensors, stage, warp, lane):
        """Sum a tile's weighted scores w relu(q . k) over the warp's index heads, and store the sums to buffer `stage`
        of `own_sums`."""
        values = []
        for i in cutlass.range_constexpr(TILE // 4):
            at = i // 2 * 4 + i % 2
            # x + |x| is exactly 2 relu(x), and the weights are halved. Unlike max(x, 0), it keeps NaN.
            upper, lower = (x + cute.math.absf(x) for x in (flat[at], flat[at + 2]))
            values.append(cute.math.fma(lower, weights[1], upper * weights[0]))
        sums = cute.make_rmem_tensor((2,), Float32)
        sums[0], sums[1] = sum_rows(values, lane)
        cute.autovec_copy(sums, cute.local_tile(shared.own_sums[None, warp, stage], (2,), (lane,)))

    @cute.jit
    def epilogue(self, shared: SharedTensors, kl, d_scores, query, tiles, row_sum, row_max, warp, lane):
        """Compute the query's distributions and, from these, kl and d_scores. Store kl and d_scores. row_sum, row_max:
        the thread's results over its column in all tiles (see `index`)."""
        tid = warp * 32 + lane
        for log in cutlass.range_constexpr(5):
            other_max = cute.arch.shuffle_sync_bfly(row_max, offset=1 << log)
            other = cute.arch.shuffle_sync_bfly(row_sum, offset=1 << log)
            higher = cute.arch.fmax(row_max, other_max)
            # In warps 0 and 1, which have the target, all maxima are NOTHING, so the factors are 1.
            row_sum = row_sum * exp(row_max - higher) + other * exp(other_max - higher)
            row_max = higher
        shared.parts[2 * warp], shared.parts[2 * warp + 1] = row_sum, row_max
        cute.arch.barrier(barrier_id=INDEX_BARRIER, number_of_threads=WARPGROUP)
        mass = shared.parts[0] + shared.parts[2]
        row_max = cute.arch.fmax(shared.parts[5], shared.parts[7])
        row_sum = shared.parts[4] * exp(shared.parts[5] - row_max)
        row_sum += shared.parts[6] * exp(shared.parts[7] - row_max)
        # If the target's sum is 0, for example without valid keys, the loss and the gradients are 0.
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
                # log2 treats p below SMALLEST as 0, so the term would be infinite or NaN. A NaN p is not below SMALLEST
                # and enters the loss.
                loss += Float32(0.0) if p < SMALLEST else term
            stored[0], stored[1] = pack(kept[0], kept[1], BFloat16), pack(kept[2], kept[3], BFloat16)
            cute.autovec_copy(stored, cute.local_tile(words, (2,), (at,)))
        shared.parts[8 + warp] = warp_reduce_sum(loss)
        # After this barrier a warp can begin the next query, whose tiles overwrite `target` and `scores`. No warp
        # overwrites `parts` before thread 0 has read them: the next query's epilogue comes after a barrier in that
        # query's first tile, which thread 0 reaches after it has read the parts.
        cute.arch.barrier(barrier_id=INDEX_BARRIER, number_of_threads=WARPGROUP)
        if tid == 0:
            kl[query] = (shared.parts[8] + shared.parts[9]) + (shared.parts[10] + shared.parts[11])


@cached
def compile_sparse_indexer_target(channels: int, row_tiles: int, index_channels: int):
    """-> f(q [T, H, d], kv [Tk, d], q_idx [T, Hi, di], k_idx [Tk, di], w_idx [T, Hi] fp32, indices [T, K] int32, lse
    [T, H] fp32, kl [T] fp32, d_scores [T, K'], scale * log2(e), ctas). The tensors without a dtype here are bf16.

    H is at most 64 * row_tiles, Hi at most 64, and K is 1 to MAX_SPARSE_KEYS. K' is K rounded up to a multiple of 64.
    kl and d_scores are results; the kernel writes all of d_scores. ctas: number of persistent CTAs. Rows of q, kv,
    q_idx and k_idx start at multiples of 16 bytes.
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


def shipped_variants() -> ShippedVariants:
    """Return a (compile function, arguments) pair for each variant that the op can ask for."""
    return [
        (compile_sparse_indexer_target, (channels, row_tiles, index_channels))
        for channels in MLA_CHANNELS
        for row_tiles in range(1, MAX_SPARSE_HEADS // TILE + 1)
        for index_channels in INDEX_CHANNELS
    ]
