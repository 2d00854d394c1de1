"""Lightning-indexer scores over a paged key cache.

out[b n + i, s] = kscale[b, s] * sum_h w[b n + i, h] * relu(q[b, i, h] . k[b, s]), where n = next_n is the number of
query tokens per sequence. There are H heads of D channels.

Plan
- A wgmma tile has 64 keys as rows. Its columns are the N = next_n * H (query, head) pairs of one sequence. So the keys
  are read once for all queries of the sequence, and the sum over heads stays in registers except for shuffles over the
  quad.
- Scheduler: stream-K. CTA i processes consecutive splits of 256 keys. It begins with the split in row i of the schedule
  and ends before the split in row i + 1 (paged_mqa_logits_metadata_sm90.py). The two splits can belong to different
  sequences. A work tile is the part of the CTA's splits that belongs to one sequence.
- Warp roles: the consumer warpgroups process a work tile's key tiles in turns. Each has its own producer warp in the
  last warpgroup: with a single producer, one full ring would delay the other warpgroups. The first producer also loads
  a work tile's queries by TMA and its weights by bulk copy, and writes its WorkTileInfo. With clean_logits, the warps
  of the last warpgroup then write -inf to the columns after the last key tile of each sequence.
- Pipelines: queries, weights and WorkTileInfo have a ring of SEQUENCES stages. Keys and scales have a ring of STAGES
  stages per consumer warpgroup. A producer warp loads lengths and page numbers 32 at a time, so it waits for them once
  per 32. A page outside the cache is not loaded, and its keys score -inf. A stage's valid mask has a bit for each page
  of the tile that is in the cache.
- Mainloop: the consumers read a work tile's WorkTileInfo; one with 0 key tiles ends the loop. A tile's epilogue (quad
  reduction, scale, mask, store) runs during the next tile's wgmma.
- fp16 accumulation, if the caller asks for it and there are more than 128 columns: the consumer warpgroups first scale
  a work tile's queries into fp16's range, in shared memory, and the weights by the inverse factors
  (fp16_accumulation.py). For this the consumer warpgroups synchronize once per work tile. The producers continue
  meanwhile.
Shared memory: barriers, valid masks, WorkTileInfo, SEQUENCES x N x (D + 4, or D + 8 with fp16 accumulation) bytes of
queries with their weights and factors, GROUPS x STAGES x 64 x (D + 4) bytes of keys with their scales.
Registers: N / 2 for accumulators and N / 4 for weights per consumer thread; half as many with fp16 accumulation.
Roofline: bound by memory up to N = 128, and by arithmetic beyond. At D = 128, a key has 132 bytes, and an SM loads a
tile in about 450 cycles if all SMs load. The tensor cores take 2 N cycles per tile. The sums over heads take about N +
60 cycles more, which fp16 accumulation hides (docs/explanation/kernels.md).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Uint32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.copies import EVICT_FIRST
from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake, fake_stream, strides
from dsa.cute.pipeline import Pipeline, arrive, expect_bytes, pipeline_storage, start
from dsa.cute.reductions import quad_reduce_scatter
from dsa.cute.sm90 import SHARED_BYTES, WARPGROUP
from dsa.cute.tuning import choices, tuned
from dsa.cute.wgmma import multiply
from dsa.cute.work_tile import read_info, static_persistent_scheduler, write_info
from dsa.kernels.indexer import fp16_accumulation
from dsa.kernels.indexer.limits import HEAD_DIMS, HEADS, LOGITS_DTYPES, NEXT_N, PAGE_SIZES, SCHEDULE_SPLIT
from dsa.kernels.indexer.score_mainloop import (
    NO_KEY,
    TILE,
    Pipelines,
    ScoreMainloop,
    Scoring,
    registers_fit,
    thread_index,
    tile_partition,
)
from dsa.runtime.compile_cache import cached, compile_sm90

FILL_BYTES = 8192  # bytes per row in a work tile of the warps that write -inf
# Up to this many columns per tile (next_n * heads), fp16 accumulation is not faster than fp32, so it is not used. fp16
# accumulation also needs a multiple of 32 columns, so that whole warps scale the queries.
MEMORY_BOUND_COLUMNS = 128


class WorkTileInfo(NamedTuple):
    """first_tile: the work tile's first key tile, counted from the start of the sequence. tiles: number of key tiles, 0
    after the last work tile."""

    sequence: Int32
    first_tile: Int32
    tiles: Int32


FIELDS = len(WorkTileInfo._fields)


@dataclass(frozen=True)
class PagedMqaLogitsConfig:
    """stages: key tiles in flight per consumer warpgroup. sequences: work tiles whose queries are in flight. groups:
    number of consumer warpgroups."""

    stages: int = choices(2, 3, 4, 5, 8)
    sequences: int = choices(2, 4)
    groups: int = choices(2, 3, 4)

    def fits(self, columns: int, half: bool = False) -> bool:
        """Whether this configuration has enough registers (fp16 accumulation needs half as many), and enough shared
        memory for 128 channels."""
        factors = 4 * self.sequences * columns if half else 0
        shared = (self.sequences * columns + self.groups * self.stages * TILE) * 132 + factors + 3 * 1024
        return registers_fit(columns // 2 if half else columns, self.groups) and shared <= SHARED_BYTES


# For fp16 accumulation. The accumulators need half as many registers as in fp32, so three consumer warpgroups fit.
FP16_CONFIG = PagedMqaLogitsConfig(stages=4, sequences=2, groups=3)


class Fp8PagedMqaLogitsSm90(ScoreMainloop):
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
        super().__init__(heads, dim, next_n * heads, half, cfg.groups, cfg.stages)
        self.next_n, self.page, self.out_dtype = next_n, page_size, out_dtype
        self.sequences, self.pages_a_tile = cfg.sequences, TILE // page_size
        self.lane_q = (next_n + 1) // 2  # rows of the output that a lane stores to
        # Words of `info` per stage of queries: the fields of a WorkTileInfo, and for each query the number of keys that
        # it sees. A stage has a multiple of 16 bytes, so that vector instructions can access it.
        self.info_words = cute.round_up(FIELDS + next_n, 4)

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
        keys = cute.make_tensor(
            cute.recast_ptr(cache.iterator, dtype=Float8E4M3FN),
            cute.make_layout((self.page, self.dim, cache.shape[0]), stride=(self.dim, 1, cache.stride[0])),
        )
        atoms, (q_layout, k_layout, page_layout) = self.loads(q, keys, self.sequences, self.page)

        @cute.struct
        class Storage:
            k_pipeline: pipeline_storage(self.stages)
            q_pipeline: pipeline_storage(self.sequences)
            # Per stage of keys: bit i is set if page i of the tile is in the cache.
            valid_pages: cute.struct.MemRange[Uint32, self.stages]
            info: cute.struct.Align[cute.struct.MemRange[Int32, self.info_words * self.sequences], 16]
            weights: cute.struct.Align[cute.struct.MemRange[Float32, self.n * self.sequences], 128]
            # With fp16 accumulation: the powers of two that the query rows were divided by.
            powers: cute.struct.MemRange[Float32, self.n * self.sequences if self.half else 0]
            scales: cute.struct.Align[cute.struct.MemRange[Float32, TILE * self.stages], 128]
            q: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(k_layout)], 1024]

        self.storage = Storage
        self.kernel(
            *(*atoms, cache, weights, lengths, block_table, schedule, out),
            *(capacity, fill_columns, self.mma(), q_layout, k_layout, page_layout),
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
        tid, warp, lane = thread_index()
        storage = SmemAllocator().allocate(self.storage)
        pipelines = Pipelines(
            k=Pipeline.of(storage.k_pipeline, self.stages), q=Pipeline.of(storage.q_pipeline, self.sequences)
        )
        sq = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        sk = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        spages = storage.k.get_tensor(page_layout.outer, swizzle=page_layout.inner)
        valid_pages = storage.valid_pages.get_tensor(cute.make_layout(self.stages))
        info = storage.info.get_tensor(
            cute.make_layout((FIELDS + self.next_n, self.sequences), stride=(1, self.info_words))
        )
        sweights = storage.weights.get_tensor(cute.make_layout((self.heads, self.next_n, self.sequences)))
        scales = storage.scales.get_tensor(cute.make_layout((self.page, self.pages_a_tile * self.stages)))

        self.initialize(q_atom, k_atom, pipelines, tid, warp)
        cute.arch.mbarrier_init_fence()
        wait_for_prerequisite_grids()
        first, last = (Int32(0), Int32(0)), (Int32(0), Int32(0))
        if warp >= self.consumer_warps:
            # A call with few keys is bound by the producers' chain of dependent loads: schedule, then lengths and page
            # numbers, then keys. So load the schedule before the CTA's barrier, and prefetch the lengths to L2.
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
                    *(sq, spages, valid_pages, info, sweights, scales, pipelines, lane, warp - self.consumer_warps),
                )
            self.fill(lengths, out, capacity, fill_columns, tid % WARPGROUP)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.consume(
                *(out, mma, sq, sk, valid_pages, info, sweights, scales),
                *(Int32(storage.powers.data_ptr().toint()), pipelines, tid, warp, lane),
            )

    @cute.jit
    def tile_of_split(self, split):
        """Return the index of a split's first key tile, counted from the start of the sequence. The number `split` is
        clipped, because a wrong schedule can contain any number and the result must fit an int32."""
        return cutlass.max(cutlass.min(split, NO_KEY // SCHEDULE_SPLIT), 0) * (SCHEDULE_SPLIT // TILE)

    @cute.jit
    def visible_keys(self, lengths, sequence, row: cutlass.Constexpr, capacity):
        """Return the number of keys that row `row` of a sequence sees, at most `capacity`. With one length per
        sequence, this is the number of keys that the last row sees. Each earlier row sees one key fewer than the next
        row."""
        columns = lengths.shape[1]
        # Clip to 0 before the subtraction, which would overflow for the lowest int32.
        length = cutlass.max(lengths[sequence, cutlass.min(row, columns - 1)], 0)
        if columns < self.next_n:
            length += row + 1 - self.next_n
        return cutlass.max(cutlass.min(length, capacity), 0)

    @cute.jit
    def page_numbers(self, block_table, sequence, tile, lane):
        """Return the page numbers of a warpgroup's next 32 / pages_a_tile tiles: `tile`, `tile` + groups, and so on.
        Each lane gets one number, or -1 past the end of the block table."""
        index = (tile + lane // self.pages_a_tile * self.groups) * self.pages_a_tile + lane % self.pages_a_tile
        page = Int32(-1)
        if index < block_table.shape[1]:
            page = block_table[sequence, index]
        return page

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
        info,
        sweights,
        scales,
        pipelines: Pipelines,
        lane,
        group,
    ):
        """The mainloop of the producer warp of consumer warpgroup `group`. The warp of group 0 also loads queries and
        weights, and writes each WorkTileInfo. begins, ends: the rows (sequence, split) of the schedule at which this
        CTA begins and ends."""
        tqs, tqg = tile_partition(q_atom, sq, mq, (self.n, self.dim))
        tks, tkg = tile_partition(k_atom, spages, mk, (self.page, self.dim), (0, 0, None))
        bulk = cute.nvgpu.cpasync.CopyBulkG2SOp()
        weights_atom = cute.make_copy_atom(bulk, Float32, num_bits_per_copy=self.heads * 32)
        scales_atom = cute.make_copy_atom(bulk, Float32, num_bits_per_copy=self.page * 32)
        gscales = cute.make_tensor(
            cute.recast_ptr(cache.iterator + self.page * self.dim, dtype=Float32),
            cute.make_layout((self.page, cache.shape[0]), stride=(1, cache.stride[0] // 4)),
        )
        copies = (k_atom, tkg, tks), (scales_atom, gscales, scales)
        ring = pipelines.k.ring(group, self.group_stages)
        batch = lengths.shape[0]
        # Clip the sequences: a schedule for other lengths, or an uninitialized schedule, must not cause accesses
        # outside the block table.
        first_seq, first_tile = cutlass.max(begins[0], 0), self.tile_of_split(begins[1])
        last_seq, end_tile = cutlass.max(cutlass.min(ends[0], batch), -1), self.tile_of_split(ends[1])
        stop = cutlass.min(last_seq + 1, batch)
        q_state, k_state = start(), start()
        tile = group
        # Load the first page numbers together with the first lengths, so that the latencies overlap.
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
                        write_info(info, q_state.stage, (sequence, first, tiles, *visible_keys))
                        expect_bytes(pipelines.q.producer_barrier(q_state), self.n * (self.dim + 4))
                    q_full = pipelines.q.producer_barrier(q_state)
                    cute.copy(q_atom, tqg[None, sequence], tqs[None, q_state.stage], tma_bar_ptr=q_full)
                    with cute.arch.elect_one():  # unlike a TMA copy, a bulk copy runs once per lane that reaches it
                        for i in cutlass.range_constexpr(self.next_n):
                            row = weights[sequence * self.next_n + i, None]
                            cute.copy(weights_atom, row, sweights[None, i, q_state.stage], mbar_ptr=q_full)
                    q_state = pipelines.q.advance(q_state)

                page_numbers = first_pages
                if sequence != first_seq:
                    page_numbers = self.page_numbers(block_table, sequence, first + tile, lane)
                tile, k_state = self.load_tiles(
                    *(copies, valid_pages, block_table, sequence, first, tiles, tile),
                    *(page_numbers, ring, k_state, lane),
                )
        if group == 0:
            pipelines.q.producer_wait(q_state)
            with cute.arch.elect_one():
                write_info(info, q_state.stage, WorkTileInfo(Int32(0), Int32(0), Int32(0)))
                arrive(pipelines.q.producer_barrier(q_state))

    @cute.jit
    def load_tiles(
        self,
        copies,
        valid_pages,
        block_table,
        sequence,
        first,
        tiles,
        tile,
        page_numbers,
        ring: Pipeline,
        k_state,
        lane,
    ):
        """Load one warpgroup's key tiles of a work tile: `tile`, `tile` + groups, and so on, below `tiles`. The numbers
        count from the work tile's first key tile, which is the sequence's tile `first`. -> (`tile` for the call with
        the next work tile, k_state)

        copies        ((copy atom, source, target) for a page's keys, the same three for a page's scales)
        valid_pages   [stages] uint32: bit i is set if page i of the stage's tile is in the cache
        page_numbers  the result of the method `page_numbers` for the first tile: one page number per lane, enough for
                      32 / pages_a_tile tiles
        """
        (k_atom, tkg, tks), (scales_atom, gscales, scales) = copies
        at, pages = Int32(0), gscales.shape[1]
        while tile < tiles:
            if at == 32:
                at = Int32(0)
                page_numbers = self.page_numbers(block_table, sequence, first + tile, lane)
            page = [cute.arch.shuffle_sync(page_numbers, at + i) for i in range(self.pages_a_tile)]
            bits = Uint32(0)
            for i in cutlass.range_constexpr(self.pages_a_tile):
                if page[i] >= 0 and page[i] < pages:
                    bits |= 1 << i
            stage, k_full = ring.index(k_state), ring.producer_barrier(k_state)
            ring.producer_wait(k_state)
            with cute.arch.elect_one():
                valid_pages[stage] = bits
                expect_bytes(k_full, cute.arch.popc(bits) * (self.page * (self.dim + 4)))
            for i in cutlass.range_constexpr(self.pages_a_tile):
                if bits & (1 << i) != 0:
                    place = stage * self.pages_a_tile + i
                    cute.copy(
                        *(k_atom, tkg[None, page[i]], tks[None, place]),
                        tma_bar_ptr=k_full,
                        cache_policy=cutlass.Int64(EVICT_FIRST),
                    )
                    with cute.arch.elect_one():
                        cute.copy(scales_atom, gscales[None, page[i]], scales[None, place], mbar_ptr=k_full)
            k_state = ring.advance(k_state)
            tile += self.groups
            at += self.pages_a_tile
        return tile - tiles, k_state

    @cute.jit
    def fill(self, lengths, out, capacity, fill_columns, thread):
        """In every row, write -inf to the columns from the end of the sequence's last key tile up to fill_columns."""
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
        self, out, mma, sq, sk, valid_pages, info, sweights, scales, powers, pipelines: Pipelines, tid, warp, lane
    ):
        scoring = self.scoring(mma, sq, sk, tid)
        limits = cute.make_rmem_tensor((self.lane_q,), Int32)  # number of keys that each query row of the lane sees
        ss = cute.make_tensor(scales.iterator, cute.make_layout((TILE, self.stages)))
        sw = cute.make_tensor(sweights.iterator, cute.make_layout((self.n, self.sequences)))
        quad = lane % 4
        # Per tile, a lane stores one key's score to each of the lane's rows of the output. In the quad reduction, lanes
        # 2 and 3 of a quad get the upper 8 of the warp's 16 keys. Odd lanes get the second query of a pair. If a pair
        # has only one query, odd lanes get a copy of that query's score and do not store it.
        key_in_tile = (warp % 4) * 16 + lane // 4 + 8 * (quad // 2)
        ring = pipelines.k.ring(warp // 4, self.group_stages)
        own_page = key_in_tile // self.page
        q_state, k_state = start(), start()
        # This warpgroup's next key tile, relative to the work tile's first key tile. The warpgroups take key tiles in
        # turns, and the turns continue from one work tile to the next (`tile -= tiles` below). So the warpgroups' total
        # numbers of key tiles differ by at most one.
        tile, tiles = warp // 4, Int32(1)
        while tiles > 0:
            pipelines.q.consumer_wait(q_state)
            sequence, first, tiles = read_info(WorkTileInfo, info, q_state.stage)
            if tiles > 0:
                self.take_weights(scoring, sq, sw, powers, q_state.stage, tid, quad)
                rows = []
                for i in cutlass.range_constexpr(self.lane_q):
                    row = cutlass.min(2 * i + quad % 2, self.next_n - 1)
                    limits[i] = info[FIELDS + row, q_state.stage]
                    rows.append(out[sequence * self.next_n + row, None])
                # The first iteration runs an epilogue although a previous tile does not exist. With NO_KEY this
                # epilogue stores nothing.
                scale, masked_key, key = Float32(0.0), Int32(NO_KEY), Int32(NO_KEY)
                if tile < tiles:
                    ring.consumer_wait(k_state)
                while tile < tiles:
                    done, stage = k_state, ring.index(k_state)
                    multiply(mma, scoring.acc, scoring.ra, scoring.rb, stage, q_state.stage)
                    # The wgmma overlaps with the previous tile's epilogue and the loads for this tile's epilogue.
                    self.epilogue(scoring, scale, masked_key, limits, rows, key, quad)
                    scale = ss[key_in_tile, stage]
                    key = (first + tile) * TILE + key_in_tile
                    # A key on an invalid page counts as NO_KEY, which is above all `limits`, so its score becomes -inf.
                    valid = (valid_pages[stage] >> own_page) & 1 != 0
                    masked_key = key if valid else Int32(NO_KEY)
                    k_state = ring.advance(k_state)
                    tile += self.groups
                    cute.nvgpu.warpgroup.wait_group(0)
                    ring.consumer_release(done)
                    if tile < tiles:
                        ring.consumer_wait(k_state)
                    self.add_heads(scoring)
                self.epilogue(scoring, scale, masked_key, limits, rows, key, quad)
                tile -= tiles
                pipelines.q.consumer_release(q_state)
                q_state = pipelines.q.advance(q_state)

    @cute.jit
    def take_weights(self, scoring: Scoring, sq, sw, powers, stage, tid, quad):
        """Load the weights of this lane's columns into registers, halved for the fp32 `head_sum`. With fp16
        accumulation, scale the weights and the work tile's queries instead (`bring_into_range`)."""
        if const_expr(self.half):
            self.bring_into_range(
                *(scoring, sq, powers, stage), lambda j, column, c: sw[column + c, stage], *(tid, quad)
            )
        else:
            for j in cutlass.range_constexpr(self.n // 8):
                for c in cutlass.range_constexpr(2):
                    scoring.w[2 * j + c] = sw[j * 8 + quad * 2 + c, stage] * 0.5

    @cute.jit
    def keep_unit(self, scoring: Scoring, i: cutlass.Constexpr, unit, quad):
        """Keep query i's unit in the lanes that store this query's scores: even lanes for the first query of a pair,
        odd lanes for the second."""
        if const_expr(i % 2 == 0):
            scoring.unit[i // 2] = unit
        elif quad % 2 == 1:
            scoring.unit[i // 2] = unit

    @cute.jit
    def epilogue(self, scoring: Scoring, scale, masked_key, limits, rows, key, quad):
        """Add up the quad's sums over heads: each lane gets the score of one key for every row of the lane. Scale, mask
        and store the scores.

        key         NO_KEY before the first tile, when there is nothing to store
        masked_key  `key`, or NO_KEY if the key's page is not in the cache
        limits      number of keys that each of the lane's rows sees"""
        upper, odd = (quad & 2) != 0, (quad & 1) != 0
        for i in cutlass.range_constexpr(self.lane_q):
            own = [scoring.sums[at] for at in range(4 * i, min(4 * i + 4, 2 * self.next_n))]
            if const_expr(self.half):
                own = [fp16_accumulation.pair_sum(x) for x in own]
            if const_expr(2 * i + 1 < self.next_n):
                value = quad_reduce_scatter(own[0], own[2], own[1], own[3], upper, odd)
                stores = key < NO_KEY
            else:
                value = quad_pair(*own, upper)
                stores = key < NO_KEY and not odd
            if const_expr(self.half):
                value = value * scoring.unit[i]
            result = value * scale
            if masked_key >= limits[i]:
                result = -Float32(float("inf"))
            if stores:
                rows[i][key] = result.to(self.out_dtype)


@cute.jit
def quad_pair(a, b, upper):
    """Sum a and b over a quad of lanes, with two shuffles. Lanes 0 and 1 return the sum of a, lanes 2 and 3 that of b.
    The additions are in the same order as in `quad_reduce_scatter`."""
    keep = b if upper else a
    send = a if upper else b
    value = keep + cute.arch.shuffle_sync_bfly(send, offset=2)
    return value + cute.arch.shuffle_sync_bfly(value, offset=1)


@cached
def compile_fp8_paged_mqa_logits(
    heads: int, dim: int, next_n: int, page_size: int, out_dtype: str, half: bool, config: PagedMqaLogitsConfig
):
    """half: fp16 accumulation (fp16_accumulation.py).

    -> f(q [B * next_n * H, D] e4m3, cache [pages, P * (D + 4)] uint8, weights [B * next_n, H] fp32, lengths [B, 1 or
    next_n] int32, block_table [B, max_pages] int32, schedule [CTAs + 1, 2] int32, out [B * next_n, columns] out_dtype,
    capacity, fill_columns); P = page_size, and B, pages, max_pages > 0. A query sees at most `capacity` keys. Columns
    before fill_columns that have no score get -inf. Pages, rows of weights and rows of out start at multiples of 16
    bytes. Rows of out have at least 64 * ceil(capacity / 64) columns."""
    out_type = cute_dtype(out_dtype)
    batch, rows = cute.sym_int(), cute.sym_int()
    q = fake(Float8E4M3FN, (cute.sym_int(), dim), (dim, 1))
    cache = fake(cutlass.Uint8, (cute.sym_int(), page_size * (dim + 4)), (*strides(1, 16), 1))
    weights = fake(Float32, (rows, heads), (*strides(1, 4), 1))
    lengths = fake(Int32, (batch, cute.sym_int()), (*strides(1), 1), 4)
    block_table = fake(Int32, (batch, cute.sym_int()), (*strides(1), 1), 4)
    schedule = fake(Int32, (cute.sym_int(), 2), (2, 1), 4)
    out = fake(out_type, (rows, cute.sym_int()), (*strides(1, 128 // out_type.width), 1))
    return compile_sm90(
        Fp8PagedMqaLogitsSm90(heads, dim, next_n, page_size, out_type, half, config),
        *(q, cache, weights, lengths, block_table, schedule, out, Int32(0), Int32(0), fake_stream()),
    )


def bound_by_arithmetic(heads: int, next_n: int) -> bool:
    """Whether fp16 accumulation is faster than fp32. Otherwise loading the keys takes longer than the arithmetic."""
    return heads * next_n > MEMORY_BOUND_COLUMNS


def choose_config(heads: int, next_n: int, half: bool = False) -> PagedMqaLogitsConfig:
    """Return the configuration that was fastest in measurements. With fp16 accumulation all shapes have the same
    one."""
    if half:
        return FP16_CONFIG
    return tuned(PagedMqaLogitsConfig, "fp8_paged_mqa_logits", "sm_90", f"columns {heads * next_n}")


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Return a (compile function, arguments) pair for each variant that the op can ask for."""
    return [
        (compile_fp8_paged_mqa_logits, (heads, dim, next_n, page_size, dtype, half, choose_config(heads, next_n, half)))
        for heads in HEADS
        for dim in HEAD_DIMS
        for next_n in NEXT_N
        for page_size in PAGE_SIZES
        for dtype in LOGITS_DTYPES
        for half in {False, bound_by_arithmetic(heads, next_n)}
    ]
