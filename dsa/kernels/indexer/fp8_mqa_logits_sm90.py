"""Lightning-indexer scores over contiguous keys.

out[t, s] = kscale[s] * sum_h w[t, h] * relu(q[t, h] . k[s]) for starts[t] <= s < ends[t]. With `compressed`, the score
of key s is in column s - starts[t] instead. There are H heads of D channels.

Plan
- A wgmma tile has 64 keys as rows and N columns, the heads of N / H queries. A thread has accumulators of two keys and,
  for each query, of H / 4 heads. So the sum over heads takes fused multiply-adds in registers and then shuffles over
  the quad. After these (`quad_reduce_scatter`), each lane of the quad has the scores of different queries.
- Warp roles: two or three consumer warpgroups multiply. `choose_config` gives two with N = 256 for 64 heads, three with
  N = 128 for 16 and 32 heads, and two with N = 128 for 8 heads. For fp16 accumulation with 32 or 64 heads of 128
  channels it gives three with N = 256. In the last warpgroup, one warp is the producer. If `clean` (clean_logits), the
  other three warps write -inf to the columns that the consumers do not write, so no separate kernel is needed for this.
- Pipelines: the producer loads by TMA. Queries have a ring of two stages. Each consumer warpgroup has a ring of STAGES
  stages of 64 keys. The consumer warpgroups process the key tiles in turns.
- Mainloop: during a tile's wgmma, the consumers run the previous tile's epilogue (quad reduction, scale, mask, store)
  and wait for the next tile's keys. Only the sums over heads run between two wgmmas. Ordering the consumer warpgroups
  by named barriers (ping-pong) gained nothing: wgmma and the sums compete for the register file
  (docs/explanation/kernels.md).
- fp16 accumulation: the consumer warpgroups first scale a block's queries into fp16's range, in shared memory, and the
  weights by the inverse factors. The sums over heads then take half as many instructions (fp16_accumulation.py).
- Scheduler: static persistent. A work tile is a block of queries by a chunk of keys. Key tiles before the smallest
  start or after the largest end of the block's queries are skipped. In the other tiles, scores outside a query's range
  are replaced by -inf or, with `compressed`, not written.
Shared memory: barriers, 2 x N x D bytes of queries, GROUPS x STAGES x 64 x D bytes of keys; together at most 225 KiB.
Registers: N / 2 for accumulators and N / 4 for weights per consumer thread, or half as many with fp16 accumulation. A
consumer thread has 232 registers with two consumer warpgroups and 160 with three; the other threads have 40 or 32.
Roofline: bound by the tensor cores, 512 cycles for a tile of 64 x 256 x 128. But with fp32 accumulation the sums over
heads (two instructions per accumulator, x + |x| and a multiply-add) do not overlap with wgmma, so a tile takes about
830 cycles. With fp16 accumulation, there are half as many instructions, and three warpgroups hide them. The kernel then
reaches the rate of an FP8 GEMM. Keys come from L2, 8 KB per tile.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Uint32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake, fake_stream, strides
from dsa.cute.pipeline import Pipeline, pipeline_storage, start
from dsa.cute.sm90 import SHARED_BYTES, WARP
from dsa.cute.tuning import choices, tuned
from dsa.cute.wgmma import multiply
from dsa.cute.work_tile import static_persistent_scheduler
from dsa.kernels.indexer.limits import HEAD_DIMS, HEADS, LOGITS_DTYPES
from dsa.kernels.indexer.score_mainloop import (
    NO_KEY,
    TILE,
    Pipelines,
    ScoreMainloop,
    Scoring,
    fake_scored,
    key_range,
    keys_of_block,
    registers_fit,
    thread_index,
    tile_partition,
)
from dsa.runtime.compile_cache import cached, compile_sm90

LOAD_WARP, FILL_WARP = 0, 1  # in the last warpgroup: the producer, and the first of the warps that write -inf
FILL_THREADS = 96  # threads that write -inf, if `clean`
Q_STAGES = 2


@dataclass(frozen=True)
class MqaLogitsConfig:
    """columns: N of the wgmma. stages: key tiles in flight per consumer warpgroup. groups: number of consumer
    warpgroups."""

    columns: int = choices(128, 256)
    stages: int = choices(2, 3, 4, 5, 6, 8)
    groups: int = choices(2, 3)

    def fits(self, heads: int, half: bool = False) -> bool:
        """Whether registers and shared memory (for 128 channels) are enough for this configuration, and a block has a
        multiple of four queries. fp16 accumulation needs half as many registers. With a multiple of four queries, the
        lanes of a quad store equally many scores."""
        shared = (Q_STAGES * self.columns + self.groups * self.stages * TILE) * 128 + 3 * 1024
        columns = self.columns // 2 if half else self.columns
        return registers_fit(columns, self.groups) and shared <= SHARED_BYTES and self.columns % (4 * heads) == 0


# For fp16 accumulation with 32 or 64 heads of 128 channels, as published models have. The accumulators need half as
# many registers as in fp32, so three consumer warpgroups fit even with 256 columns.
HALF_CONFIG = MqaLogitsConfig(256, 5, 3)


class Fp8MqaLogitsSm90(ScoreMainloop):
    def __init__(
        self,
        heads: int,
        dim: int,
        out_dtype: type[cutlass.Numeric],
        clean: bool,
        compressed: bool,
        half: bool,
        cfg: MqaLogitsConfig,
    ):
        super().__init__(heads, dim, cfg.columns, half, cfg.groups, cfg.stages)
        self.out_dtype, self.clean, self.compressed = out_dtype, clean, compressed

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        k_scale: cute.Tensor,
        weights: cute.Tensor,
        starts: cute.Tensor,
        ends: cute.Tensor,
        out: cute.Tensor,
        fill_columns: Int32,
        chunk: Int32,
        ctas: Int32,
        stream,
    ):
        (q_atom, q_tma, k_atom, k_tma), (q_layout, k_layout, _) = self.loads(q, k, Q_STAGES)

        @cute.struct
        class Storage:
            k_pipeline: pipeline_storage(self.stages)
            q_pipeline: pipeline_storage(Q_STAGES)
            factors: cute.struct.MemRange[Float32, self.n * Q_STAGES if self.half else 0]
            q: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(k_layout)], 1024]

        self.storage = Storage
        self.kernel(
            *(q_atom, q_tma, k_atom, k_tma, k_scale, weights, starts, ends, out, fill_columns, chunk),
            *(self.mma(), q_layout, k_layout),
        ).launch(grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True)

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        mq: cute.Tensor,
        k_atom: cute.CopyAtom,
        mk: cute.Tensor,
        k_scale: cute.Tensor,
        weights: cute.Tensor,
        starts: cute.Tensor,
        ends: cute.Tensor,
        out: cute.Tensor,
        fill_columns: Int32,
        chunk: Int32,
        mma: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
    ):
        tid, warp, lane = thread_index()
        storage = SmemAllocator().allocate(self.storage)
        pipelines = Pipelines(
            k=Pipeline.of(storage.k_pipeline, self.stages), q=Pipeline.of(storage.q_pipeline, Q_STAGES)
        )
        sq = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        sk = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)

        self.initialize(q_atom, k_atom, pipelines, tid, warp)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        wait_for_prerequisite_grids()

        if warp >= self.consumer_warps:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp == self.consumer_warps + LOAD_WARP:
                self.load(q_atom, mq, k_atom, mk, starts, ends, out, chunk, sq, sk, pipelines, lane)
            elif const_expr(self.clean):
                thread = tid - (self.consumer_warps + FILL_WARP) * WARP
                self.fill(k_scale, starts, ends, out, fill_columns, chunk, thread, lane)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.consume(
                *(k_scale, weights, starts, ends, out, chunk, mma, sq, sk),
                *(Int32(storage.factors.data_ptr().toint()), pipelines, tid, warp, lane),
            )

    @cute.jit
    def work_tile(self, index, keys, chunk, out, starts, ends, lane):
        """-> (block, first, end, first key tile of the chunk) of work tile `index`. `block` is the index of the block
        of queries. [first, end) are the chunk's key tiles between the smallest start and the largest end of the block's
        queries.

        Blocks of later queries come first: in a causal batch, they see the most keys, and long work tiles at the end
        would leave SMs idle. Consecutive work tiles are different blocks with the same chunk. If they were different
        chunks of the same block, a CTA could get the same chunk of every block (for example with two chunks and an even
        number of CTAs). In a causal batch the chunks differ in work, so some CTAs would get more work than others.
        """
        blocks = cute.ceil_div(out.shape[0], self.block_q)
        block = blocks - 1 - index % blocks
        first_tile = (index // blocks) * chunk
        low, high = keys_of_block(block, self.block_q, out.shape[0], starts, ends, keys, lane)
        first = cutlass.max(low // TILE, first_tile)
        last = cutlass.min(cute.ceil_div(high, TILE), first_tile + chunk)
        return block, first, cutlass.max(last, first), first_tile

    @cute.jit
    def work_tiles(self, keys, chunk, out):
        return cute.ceil_div(out.shape[0], self.block_q) * cute.ceil_div(keys, chunk * TILE)

    @cute.jit
    def load(self, q_atom, mq, k_atom, mk, starts, ends, out, chunk, sq, sk, pipelines: Pipelines, lane):
        tqs, tqg = tile_partition(q_atom, sq, mq, (self.n, self.dim))
        tks, tkg = tile_partition(k_atom, sk, mk, (TILE, self.dim))
        keys = mk.shape[0]
        scheduler = static_persistent_scheduler()
        q_state, k_state, group = start(), start(), Int32(0)
        for index in cutlass.range(scheduler.first, self.work_tiles(keys, chunk, out), scheduler.step, unroll=1):
            block, first, last, _ = self.work_tile(index, keys, chunk, out, starts, ends, lane)
            if first < last:
                pipelines.q.producer_acquire(q_state, self.n * self.dim)
                q_full = pipelines.q.producer_barrier(q_state)
                cute.copy(q_atom, tqg[None, block], tqs[None, q_state.stage], tma_bar_ptr=q_full)
                q_state = pipelines.q.advance(q_state)
                for tile in cutlass.range(first, last, unroll=1):
                    ring = pipelines.k.ring(group, self.group_stages)
                    ring.producer_acquire(k_state, TILE * self.dim)
                    k_full = ring.producer_barrier(k_state)
                    cute.copy(k_atom, tkg[None, tile], tks[None, ring.index(k_state)], tma_bar_ptr=k_full)
                    group += 1
                    if group == self.groups:
                        group = Int32(0)
                        k_state = ring.advance(k_state)

    @cute.jit
    def fill(self, k_scale, starts, ends, out, fill_columns, chunk, thread, lane):
        """In each row, write -inf to those columns of [0, fill_columns) that the consumer warps do not write."""
        keys = k_scale.shape[0]
        scheduler = static_persistent_scheduler()
        width = 128 // self.out_dtype.width
        minus = cute.make_rmem_tensor((width,), self.out_dtype)
        minus.fill(-float("inf"))
        for index in cutlass.range(scheduler.first, self.work_tiles(keys, chunk, out), scheduler.step, unroll=1):
            block, first, last, chunk_tile = self.work_tile(index, keys, chunk, out, starts, ends, lane)
            low = chunk_tile * TILE
            high = cutlass.min((chunk_tile + chunk) * TILE, fill_columns)
            if (chunk_tile + chunk) * TILE >= keys:
                high = fill_columns
            for i in cutlass.range(self.block_q, unroll=1):
                t = block * self.block_q + i
                if t < out.shape[0]:
                    if const_expr(self.compressed):
                        # Column j of row t is the score of key starts[t] + j, so columns from `length` on are -inf.
                        _, length = key_range(starts, ends, t, keys)
                        for c in cutlass.range(cutlass.max(low, length) + thread, high, FILL_THREADS, unroll=1):
                            out[t, c] = minus[0]
                    else:
                        row = cute.local_tile(out[t, None], (width,), (None,))
                        for c in cutlass.range(low // width + thread, high // width, FILL_THREADS, unroll=1):
                            if c * width < first * TILE or c * width >= last * TILE:
                                cute.autovec_copy(minus, row[None, c])

    @cute.jit
    def consume(
        self, k_scale, weights, starts, ends, out, chunk, mma, sq, sk, factors, pipelines: Pipelines, tid, warp, lane
    ):
        scoring = self.scoring(mma, sq, sk, tid)
        keys = k_scale.shape[0]
        queries = out.shape[0]
        quad = lane % 4
        row_key = (warp % 4) * 16 + lane // 4
        scheduler = static_persistent_scheduler()
        ring = pipelines.k.ring(warp // 4, self.group_stages)
        q_state, k_state = start(), start()
        # This warpgroup's next key tile; between work tiles, relative to the first key tile of the next work tile. The
        # warpgroups take turns across work tiles, so their numbers of tiles differ by at most one.
        tile = warp // 4

        first_keys = cute.make_rmem_tensor((self.lane_q,), Int32)
        key_counts = cute.make_rmem_tensor((self.lane_q,), Int32)
        for index in cutlass.range(scheduler.first, self.work_tiles(keys, chunk, out), scheduler.step, unroll=1):
            block, first, last, _ = self.work_tile(index, keys, chunk, out, starts, ends, lane)
            if first < last:
                for i in cutlass.range_constexpr(self.lane_q):
                    t = block * self.block_q + quad + 4 * i
                    # A count below 0 marks a query past the end, which has no row in `out`.
                    first_keys[i], key_counts[i] = Int32(0), Int32(-1)
                    if t < queries:
                        first_keys[i], key_counts[i] = key_range(starts, ends, t, keys)
                        if const_expr(self.compressed):
                            key_counts[i] = cutlass.min(key_counts[i], out.shape[1])
                rows = [out[block * self.block_q + quad + 4 * i, None] for i in range(self.lane_q)]
                self.take_queries(scoring, sq, factors, weights, block, queries, pipelines.q, q_state, tid, quad)
                tile += first
                # The first iteration runs an epilogue although a previous tile does not exist. With NO_KEY this
                # epilogue stores nothing.
                key = Int32(NO_KEY)
                if tile < last:
                    ring.consumer_wait(k_state)
                while tile < last:
                    done = k_state
                    multiply(mma, scoring.acc, scoring.ra, scoring.rb, ring.index(done), q_state.stage)
                    # The wgmma overlaps with the previous tile's epilogue, the loads of this tile's scales, and the
                    # wait for the next tile's keys.
                    self.epilogue(scoring, first_keys, key_counts, rows, key, quad)
                    key = tile * TILE + row_key
                    self.take_scales(scoring, k_scale, key)
                    k_state = ring.advance(k_state)
                    tile += self.groups
                    if tile < last:
                        ring.consumer_wait(k_state)
                    self.finish_tile(scoring, ring, done)
                self.epilogue(scoring, first_keys, key_counts, rows, key, quad)
                tile -= last
                pipelines.q.consumer_release(q_state)
                q_state = pipelines.q.advance(q_state)

    @cute.jit
    def epilogue(self, scoring: Scoring, first_keys, key_counts, rows, key, quad):
        for i in cutlass.range_constexpr(self.lane_q):
            for half in cutlass.range_constexpr(2):
                value = self.score(scoring, i, half, quad)
                self.store(value, first_keys[i], key_counts[i], rows[i], key + 8 * half)

    @cute.jit
    def store(self, value, first_key, key_count, row, key):
        """Write the score of `key`, or -inf outside the query's range. With `compressed`, write nothing outside the
        range. Write nothing for a query without a row (key_count below 0), or before the first tile (key NO_KEY or
        NO_KEY + 8)."""
        column = key - first_key
        inside = Uint32(column) < Uint32(cutlass.max(key_count, 0))
        if const_expr(self.compressed):
            if inside:
                row[column] = value.to(self.out_dtype)
        else:
            result = value
            if not inside:
                result = -Float32(float("inf"))
            if key_count >= 0 and key < NO_KEY:
                row[key] = result.to(self.out_dtype)


@cached
def compile_fp8_mqa_logits(
    heads: int,
    dim: int,
    out_dtype: str,
    clean: bool,
    compressed: bool,
    half: bool,
    config: MqaLogitsConfig,
):
    """clean: write -inf to the columns in [0, fill_columns) that have no score. compressed: column j of row t is the
    score of key starts[t] + j. half: fp16 accumulation (fp16_accumulation.py).

    -> f(q [S * H, D] e4m3, k [Skv, D] e4m3, k_scale [Skv] fp32, weights [S, H] fp32, starts [S], ends [S] int32, out
    [S, columns] out_dtype, fill_columns, chunk, ctas); S, Skv > 0. chunk is the number of key tiles per work tile
    (`choose_chunk`). Rows of k and out start at multiples of 16 bytes. Unless compressed, out has at least 64 *
    ceil(Skv / 64) columns."""
    queries, out_type = cute.sym_int(), cute_dtype(out_dtype)
    scored = fake_scored(heads, dim, queries)
    out = fake(out_type, (queries, cute.sym_int()), (*strides(1, 128 // out_type.width), 1))
    return compile_sm90(
        Fp8MqaLogitsSm90(heads, dim, out_type, clean, compressed, half, config),
        *(*scored, out, Int32(0), Int32(1), Int32(1), fake_stream()),
    )


def choose_config(heads: int, dim: int, half: bool = False) -> MqaLogitsConfig:
    """Return the configuration that was fastest in measurements. With fewer than 64 heads, a tile of 256 columns has
    many queries, whose ranges and reductions need registers and time. So these shapes use 128 columns and, except with
    8 heads, a third consumer warpgroup (docs/explanation/kernels.md). fp16 accumulation differs only with 32 or 64
    heads of 128 channels, where it uses HALF_CONFIG."""
    if half and heads >= 32 and dim == 128:
        return HALF_CONFIG
    return tuned(MqaLogitsConfig, "fp8_mqa_logits", "sm_90", f"heads {heads}, dim {dim}")


def choose_chunk(queries: int, keys: int, block_q: int, sms: int) -> tuple[int, int]:
    """-> (key tiles per work tile, number of work tiles). A work tile has all key tiles if there are more blocks of
    queries than SMs. Otherwise the keys are divided into chunks of at least 8 tiles, to have about two work tiles per
    SM."""
    blocks = -(-queries // block_q)
    tiles = -(-keys // TILE)
    chunks = min(max(1, 2 * sms // blocks), max(1, tiles // 8))
    chunk = -(-tiles // chunks)
    return chunk, blocks * -(-tiles // chunk)


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Return a (compile function, arguments) pair for each variant that the op can ask for."""
    return [
        (compile_fp8_mqa_logits, (heads, dim, dtype, clean, compressed, half, choose_config(heads, dim, half)))
        for heads in HEADS
        for dim in HEAD_DIMS
        for dtype in LOGITS_DTYPES
        for clean in (True, False)
        for compressed in (True, False)
        for half in (True, False)
    ]
