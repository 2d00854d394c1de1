"""Lightning-indexer scores over a paged key cache.

out[b n + i, s] = kscale[b, s] * sum_h w[b n + i, h] * relu(q[b, i, h] . k[b, s])

Plan
- A wgmma tile has 64 keys as rows and the N = next_n * H (query, head) pairs of one sequence as columns: the keys are
  read once for all its queries, and the sum over heads stays in registers but for a shuffle over the quad.
- Scheduler: stream-K. A CTA has one row of the schedule: a run of 256-key splits that begins in one sequence and ends
  in another. A work tile is the run's part of one sequence.
- Warp roles: the consumer warpgroups take the key tiles of a work tile in turns. Each has a producer warp of its own in
  the last warpgroup; with one for all, a ring that is full would hold up the others. The first producer also loads a
  work tile's queries by TMA and its weights by bulk copy, and writes its WorkTileInfo. The last warpgroup, done,
  writes -inf behind the last tile of every row (clean_logits).
- Pipelines: queries, weights and WorkTileInfo in a ring of SEQUENCES stages; keys and scales in a ring of STAGES stages
  for each consumer warpgroup. Lengths and page numbers are read 32 at a time, so that their latency shows once. A page
  outside the cache is not read, and its keys score -inf: the valid mask of a stage has a bit for each page that is.
- The consumers learn of a work tile from its WorkTileInfo; one without key tiles ends them. A tile's epilogue (quad
  reduction, scale, mask, store) runs under the next tile's wgmma.
- Half scores, of more than 128 columns: with fp16 accumulators the consumer warpgroups first bring a work tile's
  queries into fp16's range, in shared memory, and its weights with them (half_scores.py). They come together for that
  once a work tile; the producers go on meanwhile.
Shared memory: barriers, valid masks, WorkTileInfo, SEQUENCES x N x (D + 4 or, of half scores, 8) bytes, GROUPS x
STAGES x 64 x (D + 4).
Registers: N / 2 accumulators and N / 4 weights a consumer thread, half as many of half scores.
Roofline: memory, 132 bytes a key at D 128: about 450 clocks a tile and multiprocessor. Tensor cores 2 N clocks and
sums, which half scores hide, about N + 60 (docs/kernel-notes.md): memory up to N = 128, arithmetic beyond.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float16, Float32, Int32, Uint32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.copies import EVICT_FIRST, tile_load
from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake, fake_stream, strides
from dsa.cute.pipeline import Pipeline, arrive, expect_bytes, pipeline_storage, start
from dsa.cute.reductions import quad_reduce_scatter
from dsa.cute.shared_memory import load_8
from dsa.cute.sm90 import REGISTERS, WARP, WARPGROUP
from dsa.cute.wgmma import multiply
from dsa.cute.work_tile import read_info, static_persistent_scheduler, write_info
from dsa.kernels.indexer import half_scores
from dsa.kernels.indexer.limits import HEAD_DIMS, HEADS, LOGITS_DTYPES, NEXT_N, PAGE_SIZES, SCHEDULE_SPLIT
from dsa.kernels.indexer.paged_mqa_logits_config import PagedMqaLogitsConfig, bound_by_arithmetic, choose_config
from dsa.kernels.indexer.score_tile import TILE, head_sum, key_layout, quad_pair, query_layout, score_mma

FILL_BYTES = 8192  # of a row, a work tile of the warps that write -inf
NO_KEY = 2**30
RANGE_BARRIER = 1  # a work tile's queries are in fp16's range


class Pipelines(NamedTuple):
    """q: queries, weights and WorkTileInfo; k: keys and scales of all consumer warpgroups' rings, of which `k.ring`
    gives one."""

    q: Pipeline
    k: Pipeline


class WorkTileInfo(NamedTuple):
    """first_tile: of the sequence's key tiles; tiles: how many there are, 0 behind the last work tile."""

    sequence: Int32
    first_tile: Int32
    tiles: Int32

    @staticmethod
    def last() -> "WorkTileInfo":
        """Behind the last work tile."""
        return WorkTileInfo(Int32(0), Int32(0), Int32(0))


@dataclass(frozen=True)
class WorkTileMemory:
    """What the consumers know of a work tile, in the stage of its queries: info, the fields of its WorkTileInfo
    [fields, stages]; visible_keys, of each of the sequence's queries [next_n, stages]. A stage's lie together."""

    info: cute.Tensor
    visible_keys: cute.Tensor

    @staticmethod
    def numbers(next_n: int) -> int:
        """Of a stage: a multiple of 16 bytes, so that several go to and from registers at once."""
        return cute.round_up(len(WorkTileInfo._fields) + next_n, 4)

    @staticmethod
    def of(memory: cute.Pointer, next_n: int, stages: int) -> "WorkTileMemory":
        fields, stride = len(WorkTileInfo._fields), (1, WorkTileMemory.numbers(next_n))
        return WorkTileMemory(
            cute.make_tensor(memory, cute.make_layout((fields, stages), stride=stride)),
            cute.make_tensor(memory + fields, cute.make_layout((next_n, stages), stride=stride)),
        )


@dataclass(frozen=True)
class KeyCopies:
    """What a producer warp loads key tiles by, into its ring: the copies of a page's keys and of its scales, from and
    to; valid_pages of each stage."""

    k_atom: cute.CopyAtom
    tkg: cute.Tensor
    tks: cute.Tensor
    scales_atom: cute.CopyAtom
    gscales: cute.Tensor
    scales: cute.Tensor
    valid_pages: cute.Tensor
    ring: Pipeline


@dataclass(frozen=True)
class Scoring:
    """What a consumer thread scores key tiles by: the product's operands and accumulators, in registers weights and
    what the epilogue has of the last tile, in shared memory scales and valid_pages of each stage."""

    acc: cute.Tensor
    flat: cute.Tensor
    ra: cute.Tensor
    rb: cute.Tensor
    w: cute.Tensor
    sums: cute.Tensor
    unit: cute.Tensor  # what the scores of the lane's rows are counted in
    limits: cute.Tensor  # keys that each of the lane's rows sees
    scales: cute.Tensor
    valid_pages: cute.Tensor
    ring: Pipeline
    key_in_tile: Int32
    own_page: Int32
    quad: Int32


class Fp8PagedMqaLogitsSm90:
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
        self.half, self.accumulators = half, Float16 if half else Float32
        self.head_sum = half_scores.head_sum if half else head_sum
        self.heads, self.dim, self.next_n, self.page = heads, dim, next_n, page_size
        self.out_dtype = out_dtype
        self.group_stages, self.sequences, self.groups = cfg.stages, cfg.sequences, cfg.groups
        self.stages = cfg.groups * cfg.stages
        self.consumer_warps, self.threads = 4 * cfg.groups, cfg.threads
        self.consumer_registers, self.producer_registers = REGISTERS[cfg.groups]
        self.n = next_n * heads
        self.pages_a_tile = TILE // page_size
        self.lane_rows = (next_n + 1) // 2  # rows of the result that a lane stores to

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
            # Of a key tile: one bit for each of its pages that is in the cache.
            valid_pages: cute.struct.MemRange[Uint32, self.stages]
            work_tiles: cute.struct.Align[
                cute.struct.MemRange[Int32, WorkTileMemory.numbers(self.next_n) * self.sequences], 16
            ]
            weights: cute.struct.Align[cute.struct.MemRange[Float32, self.n * self.sequences], 128]
            # Of half scores: the powers of two that the rows of queries were divided by.
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

    def loads(self, q: cute.Tensor, cache: cute.Tensor):
        """TMA of queries and of pages' keys, and their shared memory's layouts: of queries, of tiles, of pages."""
        k_layout = key_layout(TILE, self.n, self.dim, self.stages)
        # The same bytes by pages.
        page_layout = key_layout(self.page, self.n, self.dim, self.stages * self.pages_a_tile)
        q_layout = query_layout(self.n, self.dim, self.sequences)
        pages, page_stride = cache.shape[0], cache.stride[0]
        keys = cute.make_tensor(
            cute.recast_ptr(cache.iterator, dtype=Float8E4M3FN),
            cute.make_layout((self.page, self.dim, pages), stride=(self.dim, 1, page_stride)),
        )
        k_atom, k_tma = tile_load(keys, page_layout, (self.page, self.dim))
        q_atom, q_tma = tile_load(q, q_layout, (self.n, self.dim))
        return (q_atom, q_tma, k_atom, k_tma), (q_layout, k_layout, page_layout)

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
            # The loaders' chain of dependent loads (schedule, lengths and page numbers, keys) is what a short call
            # waits for: its first link overlaps the barrier, and the lengths come to L2 meanwhile.
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
    def visible_keys(self, lengths, sequence, row: cutlass.Constexpr, capacity):
        """How many keys row `row` of a sequence sees. One length a sequence belongs to its last row."""
        columns = lengths.shape[1]
        # Not below 0 before the subtraction, which would make the lowest int32 a large number.
        length = cutlass.max(lengths[sequence, cutlass.min(row, columns - 1)], 0)
        if columns < self.next_n:
            length += row + 1 - self.next_n
        return cutlass.max(cutlass.min(length, capacity), 0)

    @cute.jit
    def tile_of_split(self, split):
        """The first tile of a split of the schedule, clipped so that the product is an int32."""
        return cutlass.max(cutlass.min(split, NO_KEY // SCHEDULE_SPLIT), 0) * (SCHEDULE_SPLIT // TILE)

    @cute.jit
    def page_numbers(self, block_table, sequence, tile, lane):
        """Of the pages of 32 / pages_a_tile tiles of a warpgroup, from `tile` on, one a lane."""
        index = (tile + lane // self.pages_a_tile * self.groups) * self.pages_a_tile + lane % self.pages_a_tile
        page = Int32(-1)
        if index < block_table.shape[1]:
            page = block_table[sequence, index]
        return page

    def query_copies(self, q_atom, mq, sq):
        """The queries of each stage, and in global memory those of each sequence."""
        gq = cute.local_tile(mq, (self.n, self.dim), (None, 0))
        one = cute.make_layout(1)
        return cute.nvgpu.cpasync.tma_partition(q_atom, 0, one, cute.group_modes(sq, 0, 2), cute.group_modes(gq, 0, 2))

    def weights_copy(self):
        bulk = cute.nvgpu.cpasync.CopyBulkG2SOp()
        return cute.make_copy_atom(bulk, Float32, num_bits_per_copy=self.heads * 32)

    def key_copies(self, k_atom, mk, cache, spages, valid_pages, scales, pipelines: Pipelines, group) -> KeyCopies:
        gk = cute.local_tile(mk, (self.page, self.dim), (0, 0, None))
        tks, tkg = cute.nvgpu.cpasync.tma_partition(
            k_atom, 0, cute.make_layout(1), cute.group_modes(spages, 0, 2), cute.group_modes(gk, 0, 2)
        )
        gscales = cute.make_tensor(
            cute.recast_ptr(cache.iterator + self.page * self.dim, dtype=Float32),
            cute.make_layout((self.page, cache.shape[0]), stride=(1, cache.stride[0] // 4)),
        )
        bulk = cute.nvgpu.cpasync.CopyBulkG2SOp()
        scales_atom = cute.make_copy_atom(bulk, Float32, num_bits_per_copy=self.page * 32)
        ring = pipelines.k.ring(group, self.group_stages)
        return KeyCopies(k_atom, tkg, tks, scales_atom, gscales, scales, valid_pages, ring)

    @cute.jit
    def load_queries(self, q_atom, tqg, tqs, weights_atom, weights, sweights, sequence, stage, barrier):
        """Of a sequence, to a stage: n (dim + 4) bytes."""
        cute.copy(q_atom, tqg[None, sequence], tqs[None, stage], tma_bar_ptr=barrier)
        with cute.arch.elect_one():  # a bulk copy, unlike TMA, runs once for every lane that reaches it
            for i in cutlass.range_constexpr(self.next_n):
                row = weights[sequence * self.next_n + i, None]
                cute.copy(weights_atom, row, sweights[None, i, stage], mbar_ptr=barrier)

    @cute.jit
    def load_tiles(self, copies: KeyCopies, block_table, sequence, first, tiles, tile, page_numbers, k_state, lane):
        """A warpgroup's key tiles tile, tile + groups and so on of a work tile of `tiles` from the sequence's tile
        `first` on. page_numbers: of the first of them. -> (its next tile, counted from behind this work tile, state)
        """
        ring, at, page_bytes = copies.ring, Int32(0), self.page * (self.dim + 4)
        pages = copies.gscales.shape[1]
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
                copies.valid_pages[stage] = bits
                expect_bytes(k_full, cute.arch.popc(bits) * page_bytes)
            for i in cutlass.range_constexpr(self.pages_a_tile):
                if bits & (1 << i) != 0:
                    place = stage * self.pages_a_tile + i
                    policy = cutlass.Int64(EVICT_FIRST)
                    cute.copy(
                        *(copies.k_atom, copies.tkg[None, page[i]], copies.tks[None, place]),
                        tma_bar_ptr=k_full,
                        cache_policy=policy,
                    )
                    with cute.arch.elect_one():
                        source, target = copies.gscales[None, page[i]], copies.scales[None, place]
                        cute.copy(copies.scales_atom, source, target, mbar_ptr=k_full)
            k_state = ring.advance(k_state)
            tile += self.groups
            at += self.pages_a_tile
        return tile - tiles, k_state

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
        # A schedule of other lengths, or no schedule at all, must not lead outside the block table.
        first_seq, first_tile = cutlass.max(begins[0], 0), self.tile_of_split(begins[1])
        last_seq, end_tile = cutlass.max(cutlass.min(ends[0], batch), -1), self.tile_of_split(ends[1])
        stop = cutlass.min(last_seq + 1, batch)
        q_state, k_state = start(), start()
        tile = group
        # The first page numbers are asked for together with the first lengths.
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
        """-inf in the columns [0, fill_columns) behind the last tile of every row."""
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
        # This warpgroup's next key tile, counted from the work tile's first. Tiles go to the warpgroups in turns over
        # the whole life of the CTA: none has two more than another.
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

    def scoring(self, mma, sq, sk, valid_pages, scales, pipelines: Pipelines, tid, warp, lane) -> Scoring:
        thr_mma = mma.get_slice(tid % WARPGROUP)
        ra, rb = mma.make_fragment_A(thr_mma.partition_A(sk)), mma.make_fragment_B(thr_mma.partition_B(sq))
        acc = cute.make_rmem_tensor(thr_mma.partition_shape_C((TILE, self.n)), self.accumulators)
        flat = cute.make_tensor(acc.iterator, cute.make_layout(self.n // 2))
        word, weights = Float32, self.n // 4
        if self.half:
            flat, word, weights = cute.recast_tensor(flat, Uint32), Uint32, self.n // 8
        w, sums = cute.make_rmem_tensor((weights,), word), cute.make_rmem_tensor((2 * self.next_n,), word)
        unit = cute.make_rmem_tensor((self.lane_rows,), Float32)
        limits = cute.make_rmem_tensor((self.lane_rows,), Int32)
        sums.fill(0)
        ss = cute.make_tensor(scales.iterator, cute.make_layout((TILE, self.stages)))
        quad = lane % 4
        # A lane stores one key of each of its rows: after the transposition lanes 2 and 3 of a quad have the upper half
        # of the keys, odd lanes the second query of a pair. Without a second query they have a copy of the first.
        key_in_tile = (warp % 4) * 16 + lane // 4 + 8 * (quad // 2)
        ring = pipelines.k.ring(warp // 4, self.group_stages)
        operands = acc, flat, ra, rb, w, sums, unit, limits, ss, valid_pages
        return Scoring(*operands, ring, key_in_tile, key_in_tile // self.page, quad)

    def lane_row(self, i: int, scoring: Scoring) -> Int32:
        """The i-th of the sequence's rows that the lane stores to."""
        return cutlass.min(2 * i + scoring.quad % 2, self.next_n - 1)

    @cute.jit
    def take_weights(self, scoring: Scoring, sq, sweights, powers, stage, tid):
        """A work tile's weights to registers."""
        sw = cute.make_tensor(sweights.iterator, cute.make_layout((self.n, self.sequences)))
        if const_expr(self.half):
            self.prepare(sq, sw, powers, stage, scoring.w, scoring.unit, tid, scoring.quad)
        else:
            for j in cutlass.range_constexpr(self.n // 8):
                for c in cutlass.range_constexpr(2):
                    scoring.w[2 * j + c] = sw[j * 8 + scoring.quad * 2 + c, stage] * 0.5

    @cute.jit
    def score_tiles(self, mma, scoring: Scoring, rows, q_stage, first, tiles, tile, k_state):
        """A warpgroup's key tiles tile, tile + groups and so on of a work tile of `tiles` from the sequence's tile
        `first` on. rows: where the scores of the lane's rows go. -> (its next tile, counted from behind this work tile,
        state)"""
        ring, sums, key_in_tile = scoring.ring, scoring.sums, scoring.key_in_tile
        # No tile is without its epilogue yet: a key that is stored nowhere.
        scale, masked_key, key = Float32(0.0), Int32(NO_KEY), Int32(NO_KEY)
        if tile < tiles:
            ring.consumer_wait(k_state)
        while tile < tiles:
            done, stage = k_state, ring.index(k_state)
            multiply(mma, scoring.acc, scoring.ra, scoring.rb, stage, q_stage)
            # While it runs: the last tile's epilogue, and what this one's needs.
            self.epilogue(scoring, scale, masked_key, rows, key)
            scale = scoring.scales[key_in_tile, stage]
            key = (first + tile) * TILE + key_in_tile
            # A key that no row sees is as if beyond every limit.
            valid = (scoring.valid_pages[stage] >> scoring.own_page) & 1 != 0
            masked_key = key if valid else Int32(NO_KEY)
            k_state = ring.advance(k_state)
            tile += self.groups
            cute.nvgpu.warpgroup.wait_group(0)
            ring.consumer_release(done)
            if tile < tiles:
                ring.consumer_wait(k_state)
            for i in cutlass.range_constexpr(self.next_n):
                sums[2 * i], sums[2 * i + 1] = self.head_sum(scoring.flat, scoring.w, i, self.heads)
        self.epilogue(scoring, scale, masked_key, rows, key)
        return tile - tiles, k_state

    @cute.jit
    def prepare(self, sq, sw, powers, stage, w, unit, tid, quad):
        """Of half scores: bring a work tile's queries into fp16's range, and the weights with them. All consumer
        warpgroups come together in it."""
        own = powers + stage * (self.n * 4)
        if tid < half_scores.THREADS:
            at = Int32(sq.iterator.toint()) + stage * (self.n * self.dim)
            half_scores.bring_into_range(at, own, self.n, self.dim, tid)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=RANGE_BARRIER, number_of_threads=self.groups * WARPGROUP)
        steps = self.heads // 8
        for i in cutlass.range_constexpr(self.next_n):
            scaled = []
            for j in cutlass.range_constexpr(i * steps, (i + 1) * steps):
                column = j * 8 + quad * 2
                factors = load_8(own + column * 4)
                scaled.extend(sw[column + c, stage] * factors[c].bitcast(Float32) for c in range(2))
            pairs, scale = half_scores.pack_weights(scaled)
            for j in cutlass.range_constexpr(steps):
                w[i * steps + j] = pairs[j]
            # The rows that `consume` gives to even and odd lanes; without a second query odd lanes have the first's.
            if const_expr(i % 2 == 0):
                unit[i // 2] = scale
            elif quad % 2 == 1:
                unit[i // 2] = scale

    @cute.jit
    def epilogue(self, scoring: Scoring, scale, masked_key, rows, key):
        """Add up the quads' sums over heads, give each lane a key of its rows, scale, mask, store; NO_KEY: no tile."""
        quad = scoring.quad
        upper, odd = (quad & 2) != 0, (quad & 1) != 0
        for i in cutlass.range_constexpr(self.lane_rows):
            own = [scoring.sums[at] for at in range(4 * i, min(4 * i + 4, 2 * self.next_n))]
            if const_expr(self.half):
                own = [half_scores.pair_sum(x) for x in own]
            if const_expr(2 * i + 1 < self.next_n):
                value = quad_reduce_scatter(own[0], own[2], own[1], own[3], upper, odd)
                stores = key < NO_KEY
            else:
                value = quad_pair(*own, upper)
                stores = key < NO_KEY and not odd
            if const_expr(self.half):
                value = value * scoring.unit[i]
            result = self.masked(value * scale, masked_key, key, scoring.limits[i])
            if stores:
                rows[i][key] = result.to(self.out_dtype)

    @cute.jit
    def masked(self, result, masked_key, key, limit):
        """A key's score, or what stands in its place."""
        if masked_key >= limit:
            result = -Float32(float("inf"))
        return result


@cached
def compile_fp8_paged_mqa_logits(
    heads: int, dim: int, next_n: int, page_size: int, out_dtype: str, half: bool, config: PagedMqaLogitsConfig
):
    """half: fp16 accumulators (half_scores).

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
