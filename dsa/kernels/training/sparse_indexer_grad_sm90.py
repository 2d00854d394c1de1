"""Gradients of q, k and w in the sparse stage's indexer scores, I[t, j] = sum_i w[t, i] relu(q_i[t] . k[j]), where j
runs over each query's selected keys.

With d[t, j] = g[t] d_scores[t, j] and a = 1 where q_i[t] . k[j] > 0, else 0:
G_i[t] = sum_j d a k[j];  dq_i[t] = w[t, i] G_i[t];  dw[t, i] = q_i[t] . G_i[t];  dk[j] += sum_i d a w[t, i] q_i[t]

i runs over the index heads. d_scores come from sparse_indexer_target_sm90.py, and g[t] is the gradient of that kernel's
kl[t].

Plan
- A work tile is a query (static persistent scheduler). A CTA iterates over the query's selected keys, in tiles of 64.
  The producer warpgroup gathers the keys and copies their d_scores, 16 bytes per lane, into a pipeline of tiles. A
  query's q is loaded once for all tiles of the query.
- The query warpgroup computes the products q k of a tile, with heads as rows. It multiplies the keys by d_scores where
  q k is positive and by 0 elsewhere (operand A, in registers). So it accumulates G / g over the query's tiles.
- Two key warpgroups alternate tiles. The tile's warpgroup computes the products q k again, with keys as rows, which
  costs less than to transpose the query warpgroup's operand. Then it multiplies g w q, which it keeps in bf16 in a
  buffer in shared memory, by d_scores where q k is positive and by 0 elsewhere. This product is the tile's dk, which
  the warpgroup adds to global memory from registers. The columns of g w q are permuted so that a lane has four adjacent
  channels of dk.
- `fixed_point`: dk is accumulated in 64-bit integers, in multiples of a power of two, so the sum does not depend on the
  order. Here g w q is permuted so that the four lanes of a quad have four adjacent channels: a lane's two adjacent
  columns are four channels apart.
Shared memory: KEY_STAGES tiles of keys and d_scores, q of two queries, a buffer of g w q per key warpgroup.
Constraints: bf16; up to 64 index heads of 64 or 128 channels.
Roofline: bound by L2 reductions. The reductions of dk, 32 KiB per tile of 128 channels, take 2650 cycles at 2.8 TB/s, a
rate derived from the times of other implementations. wgmma takes 1024 cycles per tile with 64 heads. Measured: 2650
cycles with 2048 selected of 8192 keys, and a rate of 2.3 TB/s with 65536 keys. With `fixed_point` the kernel takes 2.6
to 3.1 times as long.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.copies import gather_16
from dsa.cute.fake_tensors import fake_stream
from dsa.cute.pipeline import Pipeline, pipeline_storage, start
from dsa.cute.shared_memory import load_16, pack, store_16, swizzled
from dsa.cute.sm90 import SHARED_BYTES, WARPGROUP, opaque
from dsa.cute.wgmma import multiply
from dsa.cute.work_tile import static_persistent_scheduler
from dsa.kernels.training.fake_tensors import ShippedVariants, fake_indices, fake_numbers, fake_rows
from dsa.kernels.training.global_sums import add_4, add_fixed
from dsa.kernels.training.limits import INDEX_CHANNELS
from dsa.kernels.training.mainloop import (
    K_MAJOR,
    MN_MAJOR,
    accumulator,
    add_product,
    finish_prologue,
    multiply_and_wait,
    operand_a,
    release,
    skip,
    smem_layout,
    swap_modes,
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
    gather_tile,
    head_rows,
    key_rows,
    load_tile,
    own_rows,
    selected,
    wait_for_wgmma,
)
from dsa.runtime.compile_cache import cached, compile_sm90

THREADS = 4 * WARPGROUP
# First warp of the two key warpgroups, and number of consumer warps, which is the index of the first producer warp.
KEY_GRADIENT_WARP, CONSUMER_WARPS = 4, 12
QUERY_REGISTERS, KEY_REGISTERS, PRODUCER_REGISTERS = 168, 144, 48
KEY_STAGES, QUERY_STAGES = 6, 2
KEY_GRADIENT_BARRIER = 1  # key warpgroup i uses named barrier KEY_GRADIENT_BARRIER + i


@dataclass(frozen=True)
class SharedTensors:
    """Stages in shared memory, bf16: d_scores [64 keys, KEY_STAGES], keys [64, di, KEY_STAGES], queries [64 heads, di,
    QUERY_STAGES]. di: channels of an index head."""

    d_scores: cute.Tensor
    keys: cute.Tensor
    queries: cute.Tensor


@dataclass(frozen=True)
class Inputs:
    """The inputs: q [T, H, di], k [Tk, di], w [T, H] fp32, indices [T, K] int32, d_scores [T, K rounded up to a
    multiple of 64], g [T] fp32. q, k and d_scores are bf16."""

    q: cute.Tensor
    k: cute.Tensor
    w: cute.Tensor
    indices: cute.Tensor
    d_scores: cute.Tensor
    g: cute.Tensor


class SparseIndexerGradSm90:
    def __init__(self, channels: int, fixed_point: bool):
        self.channels, self.chunks, self.fixed_point = channels, channels // CHUNK, fixed_point

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        w: cute.Tensor,
        indices: cute.Tensor,
        d_scores: cute.Tensor,
        g: cute.Tensor,
        fixed_scale: cute.Tensor | None,
        dq: cute.Tensor,
        dw: cute.Tensor,
        dk: cute.Tensor,
        ctas: Int32,
        stream,
    ):
        scores_mma = tiled_mma(BFloat16, (TILE, TILE))
        rmem_mma = tiled_mma(BFloat16, (TILE, TILE), from_registers=True)
        # One TiledMma per role, because a TiledMma whose field is set in one role's branch is unusable in another's.
        query_mma, key_mma = (
            tiled_mma(BFloat16, (TILE, self.channels), (K_MAJOR, MN_MAJOR), from_registers=True) for _ in range(2)
        )
        layouts = [smem_layout(TILE, self.channels, BFloat16, stages) for stages in (KEY_STAGES, QUERY_STAGES, 2)]

        @cute.struct
        class Storage:
            key_barriers: pipeline_storage(KEY_STAGES)
            query_barriers: pipeline_storage(QUERY_STAGES)
            d_scores: cute.struct.Align[cute.struct.MemRange[BFloat16, TILE * KEY_STAGES], 128]
            keys: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layouts[0])], 1024]
            queries: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layouts[1])], 1024]
            weighted: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layouts[2])], 1024]

        assert Storage.size_in_bytes() <= SHARED_BYTES
        self.storage = Storage
        self.kernel(
            *(Inputs(q, k, w, indices, d_scores, g), fixed_scale, dq, dw, dk),
            *(scores_mma, rmem_mma, query_mma, key_mma, *layouts),
        ).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True)

    @cute.kernel
    def kernel(
        self,
        inputs: Inputs,
        fixed_scale: cute.Tensor | None,
        dq: cute.Tensor,
        dw: cute.Tensor,
        dk: cute.Tensor,
        scores_mma: cute.TiledMma,
        rmem_mma: cute.TiledMma,
        query_mma: cute.TiledMma,
        key_mma: cute.TiledMma,
        keys_layout: cute.ComposedLayout,
        queries_layout: cute.ComposedLayout,
        weighted_layout: cute.ComposedLayout,
    ):
        tid, warp, lane = thread_indices()
        scheduler = static_persistent_scheduler()
        storage = SmemAllocator().allocate(self.storage)
        weighted = storage.weighted.get_tensor(weighted_layout.outer, swizzle=weighted_layout.inner)
        # `keys` passes tiles of keys with their d_scores, `queries` passes the q rows of a query's heads.
        keys, queries = Pipeline.of(storage.key_barriers, KEY_STAGES), Pipeline.of(storage.query_barriers, QUERY_STAGES)
        shared = SharedTensors(
            storage.d_scores.get_tensor(cute.make_layout((TILE, KEY_STAGES))),
            storage.keys.get_tensor(keys_layout.outer, swizzle=keys_layout.inner),
            storage.queries.get_tensor(queries_layout.outer, swizzle=queries_layout.inner),
        )
        if tid == 0:
            # Each producer lane arrives for its copies; consumers arrive once per warp.
            keys.init(CONSUMER_WARPS, WARPGROUP)
            queries.init(CONSUMER_WARPS, WARPGROUP)
        finish_prologue()
        schedule = QuerySchedule.of(scheduler, inputs.q, inputs.indices)
        if warp >= CONSUMER_WARPS:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            self.produce(inputs, keys, queries, shared, schedule, warp - CONSUMER_WARPS, lane)
        elif warp < KEY_GRADIENT_WARP:
            cute.arch.setmaxregister_increase(QUERY_REGISTERS)
            self.query_gradient(inputs, keys, queries, shared, dq, dw, rmem_mma, query_mma, schedule, warp, lane)
        else:
            cute.arch.setmaxregister_increase(KEY_REGISTERS)
            self.key_gradient(
                *(inputs, keys, queries, shared, fixed_scale, dk, scores_mma, key_mma, weighted, schedule),
                *(warp // 4 - 1, warp % 4, lane),
            )

    @cute.jit
    def produce(
        self,
        inputs: Inputs,
        keys: Pipeline,
        queries: Pipeline,
        shared: SharedTensors,
        schedule: QuerySchedule,
        warp,
        lane,
    ):
        keys_start, queries_start = Int32(shared.keys.iterator.toint()), Int32(shared.queries.iterator.toint())
        scores_start = Int32(shared.d_scores.iterator.toint())
        rows = own_rows(warp, lane)
        key_state, query_state = start(), start()
        for query in cutlass.range(schedule.first, schedule.queries, schedule.step, unroll=1):
            sources, valid = head_rows(inputs.q, query, 0, rows, lane)
            queries.producer_wait(query_state)
            query_state = gather_tile(queries, query_state, queries_start, self.chunks, sources, valid, warp, lane)
            # A tile's d_scores are 128 bytes: 8 lanes of warp 0 copy 16 bytes each.
            scores = Int64(inputs.d_scores[query, None].iterator.toint()) + lane * 16
            found = selected(inputs.indices[query, None], Int32(0), rows, inputs.k.shape[0])
            for tile in cutlass.range(schedule.key_tiles, unroll=1):
                sources, valid = key_rows(inputs.k, found, lane)
                # Prefetch the next tile's indices while this tile's keys are gathered.
                found = selected(inputs.indices[query, None], (tile + 1) * TILE, rows, inputs.k.shape[0])
                keys.producer_wait(key_state)
                if warp == 0 and lane < 8:
                    target = scores_start + key_state.stage * (2 * TILE) + lane * 16
                    gather_16(target, scores + tile * (2 * TILE), True)
                key_state = gather_tile(keys, key_state, keys_start, self.chunks, sources, valid, warp, lane)

    @cute.jit
    def where_positive(self, word: Uint32, low: Float32, high: Float32):
        """Return `word` with each 16-bit half set to 0 unless the product q k of that half is positive. low, high:
        these products."""
        keep = Uint32(0)
        if low > 0.0:
            keep = Uint32(0xFFFF)
        if high > 0.0:
            keep |= Uint32(0xFFFF0000)
        return word & keep

    @cute.jit
    def query_gradient(
        self,
        inputs: Inputs,
        keys: Pipeline,
        queries: Pipeline,
        shared: SharedTensors,
        dq,
        dw,
        rmem_mma,
        sum_mma,
        schedule: QuerySchedule,
        warp,
        lane,
    ):
        tid = warp * 32 + lane
        thr, sum_thr = rmem_mma.get_slice(tid), sum_mma.get_slice(tid)
        rk = rmem_mma.make_fragment_B(thr.partition_B(shared.keys))
        rv = sum_mma.make_fragment_B(sum_thr.partition_B(swap_modes(shared.keys)))
        q_rmem = cute.make_rmem_tensor(thr.partition_shape_A((TILE, self.channels)), BFloat16)
        q_words = words_of(q_rmem, 4, STEPS, self.chunks)
        operand, words = operand_a(sum_thr, (TILE, TILE), BFloat16)
        acc, flat = accumulator(thr, (TILE, TILE))
        total, sums = accumulator(sum_thr, (TILE, self.channels))
        source = cute.recast_ptr(shared.queries.iterator, cute.make_swizzle(0, 4, 3), dtype=BFloat16)
        pairs = words_of(shared.d_scores, TILE // 2, KEY_STAGES)
        sum_mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
        key_state, query_state = start(), start()
        for query in cutlass.range(schedule.first, schedule.queries, schedule.step, unroll=1):
            queries.consumer_wait(query_state)
            load_tile(q_words, self.chunks, source, query_state, warp, lane)
            cute.arch.sync_warp()
            query_state = release(queries, query_state)
            sums.fill(0.0)
            for _ in cutlass.range(schedule.key_tiles, unroll=1):
                wait_for_wgmma(keys, key_state)
                here = opaque(key_state.stage)
                multiply_and_wait(rmem_mma, acc, q_rmem, rk, here)
                for j in cutlass.range_constexpr(TILE // 8):
                    word = pairs[4 * j + (lane & 3), here]
                    for r in cutlass.range_constexpr(2):
                        at = 4 * j + 2 * r
                        words[2 * j + r] = self.where_positive(word, flat[at], flat[at + 1])
                add_product(sum_mma, total, operand, rv, here)
                cute.nvgpu.warpgroup.wait_group(0)
                key_state = release(keys, key_state)
            self.epilogue(inputs, dq, dw, q_rmem, sums, query, warp, lane)

    @cute.jit
    def epilogue(self, inputs: Inputs, dq, dw, q_rmem, sums, query, warp, lane):
        """Compute a query's dq = w g sums and dw = g (q . sums), where `sums` is G / g. A lane has `sums` and q of the
        same heads and channels, so dw only needs a reduction over a quad."""
        halves = cute.make_tensor(q_rmem.iterator, cute.make_layout((2, 2, 2, self.channels // 16)))
        scale = inputs.g[query]
        for r in cutlass.range_constexpr(2):
            head = warp * 16 + (lane >> 2) + 8 * r
            weight = Float32(0.0)
            if head < inputs.q.shape[1]:
                weight = inputs.w[query, head] * scale
            amount = Float32(0.0)
            for j in cutlass.range_constexpr(self.channels // 8):
                for e in cutlass.range_constexpr(2):
                    amount = cute.math.fma(halves[e, r, j % 2, j // 2].to(Float32), sums[4 * j + 2 * r + e], amount)
            amount += cute.arch.shuffle_sync_bfly(amount, offset=1)
            amount += cute.arch.shuffle_sync_bfly(amount, offset=2)
            if head < inputs.q.shape[1]:
                if lane & 3 == 0:
                    dw[query, head] = amount * scale
                target = words_of(dq[query, head, None], self.channels // 2)
                for j in cutlass.range_constexpr(self.channels // 8):
                    at = 4 * j + 2 * r
                    target[4 * j + (lane & 3)] = pack(sums[at] * weight, sums[at + 1] * weight, BFloat16)

    @cute.jit
    def key_gradient(
        self,
        inputs: Inputs,
        keys: Pipeline,
        queries: Pipeline,
        shared: SharedTensors,
        fixed_scale,
        dk,
        scores_mma,
        sum_mma,
        weighted,
        schedule: QuerySchedule,
        side,
        warp,
        lane,
    ):
        """Run key warpgroup `side`: compute dk of every second tile of each query, from tile `side` on. weighted: the
        buffers of g w q."""
        tid = warp * 32 + lane
        thr, sum_thr = scores_mma.get_slice(tid), sum_mma.get_slice(tid)
        rk = scores_mma.make_fragment_A(thr.partition_A(shared.keys))
        rq = scores_mma.make_fragment_B(thr.partition_B(shared.queries))
        rw = sum_mma.make_fragment_B(sum_thr.partition_B(swap_modes(weighted)))
        operand, words = operand_a(sum_thr, (TILE, TILE), BFloat16)
        acc, flat = accumulator(thr, (TILE, TILE))
        total, sums = accumulator(sum_thr, (TILE, self.channels))
        scores = cute.make_tensor(
            cute.recast_ptr(shared.d_scores.iterator, dtype=cutlass.Uint16), cute.make_layout((TILE, KEY_STAGES))
        )
        rows = [warp * 16 + (lane >> 2) + 8 * r for r in range(2)]
        multiple = Float32(1.0)
        if const_expr(self.fixed_point):
            multiple = fixed_scale[0]
        key_state, query_state = start(), start()
        for query in cutlass.range(schedule.first, schedule.queries, schedule.step, unroll=1):
            queries.consumer_wait(query_state)
            # Wait until all warps of the warpgroup have finished the products with the previous query's g w q, because
            # `weigh` overwrites it.
            cute.arch.barrier(barrier_id=KEY_GRADIENT_BARRIER + side, number_of_threads=WARPGROUP)
            self.weigh(inputs, shared.queries, weighted, query, query_state.stage, side, tid)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=KEY_GRADIENT_BARRIER + side, number_of_threads=WARPGROUP)
            if side == 1:
                key_state = skip(keys, key_state)
            for tile in cutlass.range(side, schedule.key_tiles, 2, unroll=1):
                found = selected(inputs.indices[query, None], tile * TILE, rows, inputs.k.shape[0])
                wait_for_wgmma(keys, key_state)
                here = opaque(key_state.stage)
                multiply(scores_mma, acc, rk, rq, here, query_state.stage)
                cute.nvgpu.warpgroup.wait_group(0)
                for r in cutlass.range_constexpr(2):
                    score = Uint32(scores[rows[r], here])
                    word = score | score << Uint32(16)
                    for j in cutlass.range_constexpr(TILE // 8):
                        at = 4 * j + 2 * r
                        words[2 * j + r] = self.where_positive(word, flat[at], flat[at + 1])
                cute.arch.sync_warp()
                key_state = release(keys, key_state)
                multiply_and_wait(sum_mma, total, operand, rw, side)
                self.add(dk, sums, found, multiple, lane)
                if tile + 1 < schedule.key_tiles:
                    key_state = skip(keys, key_state)
            query_state = release(queries, query_state)

    @cute.jit
    def weigh(self, inputs: Inputs, queries, weighted, query, stage, side, tid):
        """Write a query's g w q, rounded to bf16, to the warpgroup's buffer in shared memory, with the channels
        permuted for `add`."""
        source = Int32(queries.iterator.toint()) + stage * (self.chunks * CHUNK_BYTES)
        target = Int32(weighted.iterator.toint()) + side * (self.chunks * CHUNK_BYTES)
        for i in cutlass.range_constexpr(2):
            row, column = i * (TILE // 2) + (tid >> 2), (tid & 3) * 2  # column: the first of two vectors of 8 channels
            weight = Float32(0.0)
            if row < inputs.q.shape[1]:
                weight = inputs.w[query, row] * inputs.g[query]
            for chunk in cutlass.range_constexpr(self.chunks):
                offsets = [chunk * CHUNK_BYTES + 2 * swizzled(row, column + h) for h in range(2)]
                values = []
                for offset in offsets:
                    for word in load_16(source + offset):
                        values.append((word << Uint32(16)).bitcast(Float32) * weight)
                        values.append((word & Uint32(0xFFFF0000)).bitcast(Float32) * weight)
                for h in cutlass.range_constexpr(2):
                    if const_expr(self.fixed_point):
                        # Of 8 channels, channels n and n + 4 go to columns 2 n and 2 n + 1. Lane n of a quad has the
                        # sums of these columns.
                        words = [pack(values[8 * h + n], values[8 * h + 4 + n], BFloat16) for n in range(4)]
                    else:
                        # Of 16 channels, channels 4 n + 2 h and 4 n + 2 h + 1 go to columns 8 h + 2 n and
                        # 8 h + 2 n + 1. Lane n of a quad has the sums of these columns.
                        words = [pack(values[4 * n + 2 * h], values[4 * n + 2 * h + 1], BFloat16) for n in range(4)]
                    store_16(target + offsets[h], words)

    @cute.jit
    def add(self, dk, sums, found, multiple, lane):
        """Add `sums`, the lane's part of two rows of a tile's dk, to global memory. found: the keys of these rows,
        negative if invalid. multiple: with `fixed_point`, `sums` are multiplied by this and rounded to integers."""
        start, stride = Int64(dk.iterator.toint()), Int64(dk.stride[0]) * (dk.element_type.width // 8)
        for r in cutlass.range_constexpr(2):
            if found[r] >= 0:
                row = start + found[r] * stride
                if const_expr(self.fixed_point):
                    row += (lane & 3) * 8
                    for j in cutlass.range_constexpr(self.channels // 8):
                        for e in cutlass.range_constexpr(2):
                            add_fixed(row + 64 * j + 32 * e, sums[4 * j + 2 * r + e] * multiple)
                else:
                    row += (lane & 3) * 16
                    for i in cutlass.range_constexpr(self.channels // 16):
                        add_4(row + 64 * i, [sums[8 * i + 4 * h + 2 * r + e] for h in range(2) for e in range(2)])


@cached
def compile_sparse_indexer_grad(channels: int, fixed_point: bool):
    """-> f(q [T, H, di], k [Tk, di], w [T, H] fp32, indices [T, K], d_scores [T, K'], g [T] fp32, fixed_scale [1] fp32
    or None, dq [T, H, di], dw [T, H] fp32, dk [Tk, di], ctas). q, k, d_scores and dq are bf16. Their rows and those of
    dk start at multiples of 16 bytes. indices are int32.

    dq and dw are results. The kernel adds to dk, which is fp32 or, with `fixed_point`, int64 in multiples of 1 /
    fixed_scale. fixed_scale is None without `fixed_point`. ctas: number of persistent CTAs. H is at most 64 and K at
    least 1. K' is K rounded up to a multiple of 64. d_scores must be 0 for invalid indices.
    """
    queries, heads, keys = (cute.sym_int() for _ in range(3))
    return compile_sm90(
        SparseIndexerGradSm90(channels, fixed_point),
        *(
            fake_rows(BFloat16, queries, heads, channels),
            fake_rows(BFloat16, keys, channels),
            fake_numbers(queries, heads),
        ),
        fake_indices(queries),
        fake_rows(BFloat16, queries, cute.sym_int(divisibility=TILE)),
        *(fake_numbers(queries), fake_numbers(1) if fixed_point else None),
        *(fake_rows(BFloat16, queries, heads, channels), fake_numbers(queries, heads)),
        fake_rows(Int64 if fixed_point else Float32, keys, channels),
        *(Int32(1), fake_stream()),
    )


def shipped_variants() -> ShippedVariants:
    """Return a (compile function, arguments) pair for each variant that the op can ask for."""
    return [(compile_sparse_indexer_grad, (channels, fixed)) for channels in INDEX_CHANNELS for fixed in (False, True)]
