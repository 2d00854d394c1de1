"""Lightning-indexer scores over a paged key cache.

out[b n + i, s] = kscale[b, s] * sum_h w[b n + i, h] * relu(q[b, i, h] . k[b, s])

Plan
- A wgmma tile has 64 keys as rows. Its columns are the N = next_n * H (query, head) pairs of one sequence. So the keys
  are read once for all queries, and the sum over heads stays in registers except for a shuffle over the quad.
- Scheduler: stream-K. A CTA has one row of the schedule: a run of 256-key splits, which may begin in one sequence and
  end in another. A work tile is the run's part of one sequence.
- Warp roles: the consumer warpgroups take a work tile's key tiles in turns. Each has its own producer warp in the last
  warpgroup: with a single producer, one full ring would delay the other warpgroups. The first producer also loads a
  work tile's queries by TMA and its weights by bulk copy, and writes its WorkTileInfo. After its loads, the last
  warpgroup writes -inf after the last tile of every row (clean_logits).
- Pipelines: queries, weights and WorkTileInfo have a ring of SEQUENCES stages. Keys and scales have a ring of STAGES
  stages per consumer warpgroup. Lengths and page numbers are read 32 at a time, which exposes their latency once per
  32. A page outside the cache is not read, and its keys score -inf. A stage's valid mask has a bit for each page
  inside.
- Mainloop: the consumers read a work tile's WorkTileInfo, and one without key tiles ends the loop. A tile's epilogue
  (quad reduction, scale, mask, store) runs during the next tile's wgmma.
- fp16 accumulation, for more than 128 columns: the consumer warpgroups first scale a work tile's queries into fp16's
  range, in shared memory, and adjust its weights (half_scores.py). They synchronize for that once per work tile. The
  producers continue meanwhile.
Shared memory: barriers, valid masks, WorkTileInfo, SEQUENCES x N x (D + 4, or D + 8 with fp16 accumulation) bytes,
GROUPS x STAGES x 64 x (D + 4).
Registers: N / 2 accumulators and N / 4 weights per consumer thread; half as many with fp16 accumulation.
Roofline: memory, 132 bytes per key at D = 128: about 450 cycles per tile and SM. The tensor cores take 2 N cycles. The
sums take about N + 60 more, which fp16 accumulation hides (docs/explanation/kernels.md). So memory is the limit up to
N = 128, and arithmetic beyond.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Uint32
from cutlass.memory import SmemAllocator

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake, fake_stream, strides
from dsa.cute.pipeline import Pipeline, arrive, expect_bytes, pipeline_storage, start
from dsa.cute.sm90 import WARP, WARPGROUP
from dsa.cute.work_tile import read_info, static_persistent_scheduler, write_info
from dsa.kernels.indexer.limits import HEAD_DIMS, HEADS, LOGITS_DTYPES, NEXT_N, PAGE_SIZES, SCHEDULE_SPLIT
from dsa.kernels.indexer.paged_mqa_logits_config import PagedMqaLogitsConfig, bound_by_arithmetic, choose_config
from dsa.kernels.indexer.paged_score_tiles import NO_KEY, PagedScoreTiles, Pipelines
from dsa.kernels.indexer.score_tile import TILE, score_mma
from dsa.runtime.compile_cache import cached, compile_sm90

FILL_BYTES = 8192  # of a row: work tile of the warps that write -inf


class WorkTileInfo(NamedTuple):
    """first_tile: the first of the sequence's key tiles. tiles: number of key tiles, 0 after the last work tile."""

    sequence: Int32
    first_tile: Int32
    tiles: Int32

    @staticmethod
    def last() -> "WorkTileInfo":
        """The WorkTileInfo after the last work tile."""
        return WorkTileInfo(Int32(0), Int32(0), Int32(0))


@dataclass(frozen=True)
class WorkTileMemory:
    """What the consumers need to know about a work tile, in the stage of its queries. info [fields, stages]: the fields
    of its WorkTileInfo. visible_keys [next_n, stages]: number of keys that each query of the sequence sees. A stage's
    numbers are contiguous."""

    info: cute.Tensor
    visible_keys: cute.Tensor

    @staticmethod
    def numbers(next_n: int) -> int:
        """Numbers per stage: a multiple of 16 bytes, so that vector instructions can access them."""
        return cute.round_up(len(WorkTileInfo._fields) + next_n, 4)

    @staticmethod
    def of(memory: cute.Pointer, next_n: int, stages: int) -> "WorkTileMemory":
        fields, stride = len(WorkTileInfo._fields), (1, WorkTileMemory.numbers(next_n))
        return WorkTileMemory(
            cute.make_tensor(memory, cute.make_layout((fields, stages), stride=stride)),
            cute.make_tensor(memory + fields, cute.make_layout((next_n, stages), stride=stride)),
        )


class Fp8PagedMqaLogitsSm90(PagedScoreTiles):
    def __init__(
        self,
        heads: int,
        dim: int,
        next_n: int,
        page_size: int,
        out_dtype: type[cutlass.Numeric],
        half: bool,
        cfg: PagedMqaLogitsConfig,
    ):
        super().__init__(heads, dim, next_n, page_size, out_dtype, half, cfg.groups, cfg.stages, cfg.sequences)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        cache: cute.Tensor,
        weights: cute.Tensor,
        lengths: cute.Tensor,
        block_table: cute.Tensor,
        schedule: cute.Tensor,
        out: cute.Tensor,
        capacity: Int32,
        fill_columns: Int32,
        stream,
    ):
        (q_atom, q_tma, k_atom, k_tma), (q_layout, k_layout, page_layout) = self.loads(q, cache)

        @cute.struct
        class Storage:
            k_pipeline: pipeline_storage(self.stages)
            q_pipeline: pipeline_storage(self.sequences)
            # Per key tile: one bit for each of its pages that is in the cache.
            valid_pages: cute.struct.MemRange[Uint32, self.stages]
            work_tiles: cute.struct.Align[
                cute.struct.MemRange[Int32, WorkTileMemory.numbers(self.next_n) * self.sequences], 16
            ]
            weights: cute.struct.Align[cute.struct.MemRange[Float32, self.n * self.sequences], 128]
            # With fp16 accumulation: the powers of two that the query rows were divided by.
            powers: cute.struct.MemRange[Float32, self.n * self.sequences if self.half else 0]
            scales: cute.struct.Align[cute.struct.MemRange[Float32, TILE * self.stages], 128]
            q: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(k_layout)], 1024]

        self.storage = Storage
        self.kernel(
            *(q_atom, q_tma, k_atom, k_tma, cache, weights, lengths, block_table, schedule, out),
            *(capacity, fill_columns, score_mma(self.n, self.accumulators), q_layout, k_layout, page_layout),
        ).launch(
            grid=(schedule.shape[0] - 1, 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        mq: cute.Tensor,
        k_atom: cute.CopyAtom,
        mk: cute.Tensor,
        cache: cute.Tensor,
        weights: cute.Tensor,
        lengths: cute.Tensor,
        block_table: cute.Tensor,
        schedule: cute.Tensor,
        out: cute.Tensor,
        capacity: Int32,
        fill_columns: Int32,
        mma: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        page_layout: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        storage = SmemAllocator().allocate(self.storage)
        pipelines = Pipelines(
            k=Pipeline.of(storage.k_pipeline, self.stages), q=Pipeline.of(storage.q_pipeline, self.sequences)
        )
        sq = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        sk = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        spages = storage.k.get_tensor(page_layout.outer, swizzle=page_layout.inner)
        valid_pages = storage.valid_pages.get_tensor(cute.make_layout(self.stages))
        work_tiles = WorkTileMemory.of(storage.work_tiles.data_ptr(), self.next_n, self.sequences)
        sweights = storage.weights.get_tensor(cute.make_layout((self.heads, self.next_n, self.sequences)))
        scales = storage.scales.get_tensor(cute.make_layout((self.page, self.pages_a_tile * self.stages)))

        if warp == self.consumer_warps:
            cute.nvgpu.cpasync.prefetch_descriptor(q_atom)
            cute.nvgpu.cpasync.prefetch_descriptor(k_atom)
        if tid == 0:
            pipelines.k.init(consumers=WARPGROUP // WARP)
            pipelines.q.init(consumers=self.consumer_warps)
        cute.arch.mbarrier_init_fence()
        wait_for_prerequisite_grids()
        first, last = (Int32(0), Int32(0)), (Int32(0), Int32(0))
        if warp >= self.consumer_warps:
            # A short call waits for the producers' chain of dependent loads: schedule, then lengths and page numbers,
            # then keys. So the schedule is loaded before the barrier, and the lengths are prefetched into L2.
            cta, _, _ = cute.arch.block_idx()
            first, last = (schedule[cta, 0], schedule[cta, 1]), (schedule[cta + 1, 0], schedule[cta + 1, 1])
            if warp == self.consumer_warps and lane * 32 < lengths.shape[0]:
                place = (lengths.iterator + lane * 32 * lengths.stride[0]).toint()
                cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[place])
        cute.arch.sync_threads()

        if warp >= self.consumer_warps:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp < self.consumer_warps + self.groups:
                self.load(
                    *(q_atom, mq, k_atom, mk, cache, weights, lengths, block_table, first, last, capacity),
                    *(
                        sq,
                        spages,
                        valid_pages,
                        work_tiles,
                        sweights,
                        scales,
                        pipelines,
                        lane,
                        warp - self.consumer_warps,
                    ),
                )
            self.fill(lengths, out, capacity, fill_columns, tid % WARPGROUP)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.consume(
                *(out, mma, sq, sk, valid_pages, work_tiles, sweights, scales),
                *(Int32(storage.powers.data_ptr().toint()), pipelines, tid, warp, lane),
            )

    @cute.jit
    def tile_of_split(self, split):
        """First key tile of a split of the schedule, clipped so that the product fits an int32."""
        return cutlass.max(cutlass.min(split, NO_KEY // SCHEDULE_SPLIT), 0) * (SCHEDULE_SPLIT // TILE)

    @cute.jit
    def load(
        self,
        q_atom,
        mq,
        k_atom,
        mk,
        cache,
        weights,
        lengths,
        block_table,
        begins,
        ends,
        capacity,
        sq,
        spages,
        valid_pages,
        work_tiles: WorkTileMemory,
        sweights,
        scales,
        pipelines: Pipelines,
        lane,
        group,
    ):
        """The producer warp of consumer warpgroup `group`."""
        tqs, tqg = self.query_copies(q_atom, mq, sq)
        weights_atom = self.weights_copy()
        copies = self.key_copies(k_atom, mk, cache, spages, valid_pages, scales, pipelines, group)
        batch = lengths.shape[0]
        # A schedule for other lengths, or an uninitialized one, must not lead outside the block table.
        first_seq, first_tile = cutlass.max(begins[0], 0), self.tile_of_split(begins[1])
        last_seq, end_tile = cutlass.max(cutlass.min(ends[0], batch), -1), self.tile_of_split(ends[1])
        stop = cutlass.min(last_seq + 1, batch)
        q_state, k_state = start(), start()
        tile = group
        # The first page numbers are loaded together with the first lengths.
        first_pages = Int32(-1)
        if first_seq < batch:
            first_pages = self.page_numbers(block_table, first_seq, first_tile + tile, lane)
        for base in cutlass.range(first_seq, stop, 32, unroll=1):
            begin, end = Int32(0), Int32(0)
            limits = [Int32(0) for _ in range(self.next_n)]
            if base + lane < stop:
                longest = Int32(0)
                for i in cutlass.range_constexpr(self.next_n):
                    limits[i] = self.visible_keys(lengths, base + lane, i, capacity)
                    longest = cutlass.max(longest, limits[i])
                end = cute.ceil_div(longest, TILE)
                if base + lane == first_seq:
                    begin = first_tile
                if base + lane == last_seq:
                    end = cutlass.min(end, end_tile)
            todo = cute.arch.vote_ballot_sync(begin < end)
            while todo != 0:
                source = cute.arch.popc((todo & -todo) - 1)
                todo = todo & (todo - 1)
                sequence = base + source
                first = cute.arch.shuffle_sync(begin, source)
                tiles = cute.arch.shuffle_sync(end, source) - first

                if group == 0:
                    pipelines.q.producer_wait(q_state)
                    visible_keys = [cute.arch.shuffle_sync(limits[i], source) for i in range(self.next_n)]
                    with cute.arch.elect_one():
                        write_info(work_tiles.info, q_state.stage, WorkTileInfo(sequence, first, tiles))
                        for i in cutlass.range_constexpr(self.next_n):
                            work_tiles.visible_keys[i, q_state.stage] = visible_keys[i]
                        expect_bytes(pipelines.q.producer_barrier(q_state), self.n * (self.dim + 4))
                    self.load_queries(
                        *(q_atom, tqg, tqs, weights_atom, weights, sweights),
                        *(sequence, q_state.stage, pipelines.q.producer_barrier(q_state)),
                    )
                    q_state = pipelines.q.advance(q_state)

                page_numbers = first_pages
                if sequence != first_seq:
                    page_numbers = self.page_numbers(block_table, sequence, first + tile, lane)
                tile, k_state = self.load_tiles(
                    copies, block_table, sequence, first, tiles, tile, page_numbers, k_state, lane
                )
        if group == 0:
            pipelines.q.producer_wait(q_state)
            with cute.arch.elect_one():
                write_info(work_tiles.info, q_state.stage, WorkTileInfo.last())
                arrive(pipelines.q.producer_barrier(q_state))

    @cute.jit
    def fill(self, lengths, out, capacity, fill_columns, thread):
        """Write -inf to the columns after the last tile of every row, up to fill_columns."""
        width = 128 // self.out_dtype.width
        chunk = FILL_BYTES * 8 // self.out_dtype.width
        minus = cute.make_rmem_tensor((width,), self.out_dtype)
        minus.fill(-float("inf"))
        scheduler = static_persistent_scheduler()
        chunks = cute.ceil_div(fill_columns, chunk)
        for index in cutlass.range(scheduler.first, lengths.shape[0] * chunks, scheduler.step, unroll=1):
            sequence, low = index // chunks, index % chunks * chunk
            longest = Int32(0)
            for i in cutlass.range_constexpr(self.next_n):
                longest = cutlass.max(longest, self.visible_keys(lengths, sequence, i, capacity))
            low = cutlass.max(low, cute.ceil_div(longest, TILE) * TILE)
            high = cutlass.min((index % chunks + 1) * chunk, fill_columns)
            for i in cutlass.range_constexpr(self.next_n):
                row = cute.local_tile(out[sequence * self.next_n + i, None], (width,), (None,))
                for c in cutlass.range(low // width + thread, cute.ceil_div(high, width), WARPGROUP, unroll=1):
                    cute.autovec_copy(minus, row[None, c])

    @cute.jit
    def consume(
        self, out, mma, sq, sk, valid_pages, work_tiles, sweights, scales, powers, pipelines: Pipelines, tid, warp, lane
    ):
        """The mainloop of a consumer warpgroup."""
        scoring = self.scoring(mma, sq, sk, valid_pages, scales, pipelines, tid, warp, lane)
        q_state, k_state = start(), start()
        # This warpgroup's next key tile, relative to the work tile's first. The warpgroups take the tiles in turns over
        # the CTA's whole life, so their counts differ by at most one.
        tile, tiles = warp // 4, Int32(1)
        while tiles > 0:
            pipelines.q.consumer_wait(q_state)
            sequence, first, tiles = read_info(WorkTileInfo, work_tiles.info, q_state.stage)
            if tiles > 0:
                self.take_weights(scoring, sq, sweights, powers, q_state.stage, tid)
                rows = []
                for i in cutlass.range_constexpr(self.lane_rows):
                    row = self.lane_row(i, scoring)
                    scoring.limits[i] = work_tiles.visible_keys[row, q_state.stage]
                    rows.append(out[sequence * self.next_n + row, None])
                tile, k_state = self.score_tiles(mma, scoring, rows, q_state.stage, first, tiles, tile, k_state)
                pipelines.q.consumer_release(q_state)
                q_state = pipelines.q.advance(q_state)


@cached
def compile_fp8_paged_mqa_logits(
    heads: int, dim: int, next_n: int, page_size: int, out_dtype: str, half: bool, config: PagedMqaLogitsConfig
):
    """half: fp16 accumulation (half_scores.py).

    -> f(q [B * next_n * H, D] e4m3, cache [pages, P * (D + 4)] uint8, weights [B * next_n, H], lengths [B, 1 or
    next_n], block_table [B, max_pages], schedule [CTAs + 1, 2], out [B * next_n, columns], capacity, fill_columns);
    B, pages, max_pages > 0. Pages, rows of weights and rows of out start at multiples of 16 bytes; rows of out hold
    64 * ceil(capacity / 64) columns."""
    out_type = cute_dtype(out_dtype)
    batch, rows = cute.sym_int(), cute.sym_int()
    q = fake(Float8E4M3FN, (cute.sym_int(), dim), (dim, 1))
    cache = fake(cutlass.Uint8, (cute.sym_int(), page_size * (dim + 4)), (*strides(1, 16), 1))
    weights = fake(Float32, (rows, heads), (*strides(1, 4), 1))
    lengths = fake(Int32, (batch, cute.sym_int()), (*strides(1), 1), 4)
    block_table = fake(Int32, (batch, cute.sym_int()), (*strides(1), 1), 4)
    schedule = fake(Int32, (cute.sym_int(), 2), (2, 1), 4)
    out = fake(out_type, (rows, cute.sym_int()), (*strides(1, 128 // out_type.width), 1))
    kernel = Fp8PagedMqaLogitsSm90(heads, dim, next_n, page_size, out_type, half, config)
    return compile_sm90(
        kernel, q, cache, weights, lengths, block_table, schedule, out, Int32(0), Int32(0), fake_stream()
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [
        (compile_fp8_paged_mqa_logits, (heads, dim, next_n, page_size, dtype, half, choose_config(heads, next_n, half)))
        for heads in HEADS
        for dim in HEAD_DIMS
        for next_n in NEXT_N
        for page_size in PAGE_SIZES
        for dtype in LOGITS_DTYPES
        for half in {False, bound_by_arithmetic(heads, next_n)}
    ]
