"""Lightning-indexer scores over contiguous keys and the selection of each query's k largest, in one kernel.

The result is bitwise that of topk_indices(fp8_mqa_logits(...)) except for the sign of a zero. The scores do not go
through global memory. The kernel serves the queries whose list of candidates does not determine the result
(candidate_select_sm90.py), and all queries if there are too many keys for such lists. For a query without keys it
writes nothing, and a work tile of such queries ends at once.

Plan
- Producer, wgmma, sums over heads and work tiles are those of fp8_mqa_logits_sm90. A work tile is a block of four
  queries by all keys that one of them sees.
- Warp roles: two consumer warpgroups multiply, and pass a key tile's scores on through shared memory. In the last
  warpgroup, one warp is the producer, and two others each select for two queries (selection_list.py). A selecting warp
  appends keys with scores above a bound to the query's list. When the list is full, the warp cuts it, which raises the
  bound. Soon most keys are below the bound: of 128K keys in random order, about 12 thousand are appended for k = 2048,
  and a list is cut ten times. Ascending scores are all appended, which is slower but correct.
- Pipelines: queries have one stage, because a block of queries lasts for hundreds of key tiles. Each consumer warpgroup
  has a ring of `stages` key tiles and a ring of `score_stages` tiles of scores. The latter lets the consumers continue
  while lists are cut. The consumer warpgroups take the key tiles in turns. The selecting warps read the tiles in
  ascending order, so that among equal scores the lowest key is first in every list.
- Mainloop: as in fp8_mqa_logits_sm90; the epilogue is a store to shared memory.
- Scheduler: static persistent; later queries come first.
- Output: written from the lists, which are sorted by key.
Shared memory: barriers; N x D bytes of queries, GROUPS x stages x 64 x D of keys, GROUPS x score_stages x 4 x 72
scores, four lists of `capacity` (order, key), 1 KiB of counts per selecting warp; at most 215 KiB.
Registers: as fp8_mqa_logits_sm90 with two consumer warpgroups.
Constraints: k up to capacity - 1024, so that a cut list has room for nearly half as many keys as it keeps.
Roofline: that of the scores with 64 heads. A selecting warp takes some 300 cycles per key tile for its two queries and
about 6 us per cut. Meanwhile, the other warps multiply, 830 cycles per tile. With fewer heads, a tile has fewer columns
than in fp8_mqa_logits_sm90, and the selection takes as long as the scores.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from dsa.cute.copies import tile_load
from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake, fake_stream, strides
from dsa.cute.limits import MAX_SLOTS
from dsa.cute.pipeline import Pipeline, pipeline_storage, start
from dsa.cute.sm90 import SHARED_BYTES, WARP, WARPGROUP
from dsa.cute.wgmma import multiply
from dsa.cute.work_tile import static_persistent_scheduler
from dsa.kernels.indexer.candidate_tiles import key_range
from dsa.kernels.indexer.fp8_mqa_logits_sm90 import Fp8MqaLogitsSm90, MqaLogitsConfig
from dsa.kernels.indexer.limits import HEAD_DIMS, HEADS, PAGED, ROW_TO_SEQ, VALUES
from dsa.kernels.indexer.score_mainloop import Scoring
from dsa.kernels.indexer.score_tile import TILE, key_layout, query_layout, registers_fit, score_mma
from dsa.kernels.indexer.select_limits import MAX_SELECTED
from dsa.kernels.indexer.selection_list import DIGITS, LOWEST, SelectionList, number_of, order_of
from dsa.runtime.compile_cache import cached, compile_sm90

BLOCK_Q = 4  # queries per work tile
GROUPS = 2  # consumer warpgroups
SELECTING_WARPS = 2
OWN_QUERIES = BLOCK_Q // SELECTING_WARPS
CAPACITY = MAX_SELECTED + 1024
HALVES = TILE // WARP  # of a tile: a lane has one score of each
SLACK = 64  # entries beyond k that a cut may keep
SCORE_ROW = TILE + 8  # numbers between two queries' scores, so that a warp's stores have no bank conflicts


class ProducerWarp(IntEnum):
    """Warps of the last warpgroup. LOAD is the producer; the warps from SELECT on select."""

    LOAD = 0
    SELECT = 1


class Pipelines(NamedTuple):
    """q: blocks of queries. k: key tiles in all consumer warpgroups' rings. scores: the tiles' scores, in rings by the
    same turns."""

    q: Pipeline
    k: Pipeline
    scores: Pipeline


@dataclass(frozen=True)
class SelectConfig:
    """stages: key tiles in flight per consumer warpgroup. score_stages: tiles of scores in flight per consumer
    warpgroup."""

    stages: int = 3
    score_stages: int = 12

    def shared_bytes(self, heads: int, dim: int) -> int:
        """Shared memory of a CTA, with room for alignment."""
        scores = GROUPS * self.score_stages * BLOCK_Q * SCORE_ROW * 4
        lists = BLOCK_Q * CAPACITY * 8 + SELECTING_WARPS * (DIGITS + 4) * 4
        return (BLOCK_Q * heads + GROUPS * self.stages * TILE) * dim + scores + lists + 3 * 1024

    def fits(self, heads: int, dim: int) -> bool:
        """Whether the hardware can run this."""
        return registers_fit(BLOCK_Q * heads, GROUPS) and self.shared_bytes(heads, dim) <= SHARED_BYTES


CONFIG = SelectConfig()


class IndexerSelectSm90(Fp8MqaLogitsSm90):
    def __init__(self, heads: int, dim: int, half: bool, cfg: SelectConfig):
        config = MqaLogitsConfig(BLOCK_Q * heads, cfg.stages, GROUPS)
        super().__init__(heads, dim, Float32, False, False, half, config)
        self.score_stages = cfg.score_stages

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        k_scale: cute.Tensor,
        weights: cute.Tensor,
        starts: cute.Tensor,
        ends: cute.Tensor,
        block_table: cute.Tensor,
        row_to_seq: cute.Tensor,
        indices: cute.Tensor,
        values: cute.Tensor,
        page_size: Int32,
        options: Int32,
        ctas: Int32,
        stream,
    ):
        k_layout = key_layout(TILE, self.n, self.dim, self.stages)
        q_layout = query_layout(self.n, self.dim, 1)
        k_atom, k_tma = tile_load(k, k_layout, (TILE, self.dim))
        q_atom, q_tma = tile_load(q, q_layout, (self.n, self.dim))
        score_stages = GROUPS * self.score_stages

        @cute.struct
        class Storage:
            k_pipeline: pipeline_storage(self.stages)
            q_pipeline: pipeline_storage(1)
            score_pipeline: pipeline_storage(score_stages)
            # With fp16 accumulation: the powers of two that the query rows were divided by.
            factors: cute.struct.MemRange[Float32, self.n if self.half else 0]
            q: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(k_layout)], 1024]
            scores: cute.struct.Align[cute.struct.MemRange[Float32, score_stages * BLOCK_Q * SCORE_ROW], 128]
            orders: cute.struct.Align[cute.struct.MemRange[Int32, BLOCK_Q * CAPACITY], 128]
            keys: cute.struct.Align[cute.struct.MemRange[Int32, BLOCK_Q * CAPACITY], 128]
            counts: cute.struct.Align[cute.struct.MemRange[Int32, SELECTING_WARPS * (DIGITS + 4)], 128]

        self.storage = Storage
        divisor = cute.fast_divmod_create_divisor_v2(page_size)
        self.kernel(
            *(q_atom, q_tma, k_atom, k_tma, k_scale, weights, starts, ends, block_table, row_to_seq, indices, values),
            *(divisor, page_size, options, score_mma(self.n, self.accumulators), q_layout, k_layout),
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
        block_table: cute.Tensor,
        row_to_seq: cute.Tensor,
        indices: cute.Tensor,
        values: cute.Tensor,
        divisor: cute.FastDivmodDivisorV2,
        page_size: Int32,
        options: Int32,
        mma: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        storage = SmemAllocator().allocate(self.storage)
        pipelines = Pipelines(
            k=Pipeline.of(storage.k_pipeline, self.stages),
            q=Pipeline.of(storage.q_pipeline, 1),
            scores=Pipeline.of(storage.score_pipeline, GROUPS * self.score_stages),
        )
        sq = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        sk = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        scores = storage.scores.get_tensor(
            cute.make_layout((TILE, BLOCK_Q, GROUPS * self.score_stages), stride=(1, SCORE_ROW, BLOCK_Q * SCORE_ROW))
        )

        if warp == self.consumer_warps:
            cute.nvgpu.cpasync.prefetch_descriptor(q_atom)
            cute.nvgpu.cpasync.prefetch_descriptor(k_atom)
        if tid == 0:
            pipelines.k.init(consumers=WARPGROUP // WARP)
            pipelines.q.init(consumers=self.consumer_warps)
            pipelines.scores.init(consumers=SELECTING_WARPS, producers=WARPGROUP // WARP)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        wait_for_prerequisite_grids()

        # All keys are one chunk.
        chunk = cute.ceil_div(k_scale.shape[0], TILE)
        if warp >= self.consumer_warps:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            own = warp - self.consumer_warps
            if own == ProducerWarp.LOAD:
                self.load(q_atom, mq, k_atom, mk, starts, ends, indices, chunk, sq, sk, pipelines, lane)
            if own >= ProducerWarp.SELECT and own < ProducerWarp.SELECT + SELECTING_WARPS:
                number = own - ProducerWarp.SELECT
                lists = []
                for i in cutlass.range_constexpr(OWN_QUERIES):
                    at = (number * OWN_QUERIES + i) * CAPACITY
                    of_list = cute.make_layout(CAPACITY)
                    counts = cute.make_tensor(
                        storage.counts.data_ptr() + number * (DIGITS + 4), cute.make_layout(DIGITS + 4)
                    )
                    lists.append(
                        SelectionList(
                            cute.make_tensor(storage.orders.data_ptr() + at, of_list),
                            cute.make_tensor(storage.keys.data_ptr() + at, of_list),
                            counts,
                        )
                    )
                paging = block_table, row_to_seq, divisor, page_size
                self.select(
                    k_scale.shape[0],
                    starts,
                    ends,
                    indices,
                    values,
                    paging,
                    options,
                    chunk,
                    scores,
                    lists,
                    pipelines,
                    number,
                    lane,
                )
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.compute_scores(
                *(k_scale, weights, starts, ends, indices, chunk, mma, sq, sk, scores),
                *(Int32(storage.factors.data_ptr().toint()), pipelines, tid, warp, lane),
            )

    @cute.jit
    def compute_scores(
        self,
        k_scale,
        weights,
        starts,
        ends,
        indices,
        chunk,
        mma,
        sq,
        sk,
        scores,
        factors,
        pipelines: Pipelines,
        tid,
        warp,
        lane,
    ):
        """The mainloop of a consumer warpgroup."""
        scoring = self.scoring(mma, sq, sk, tid)
        keys, queries = k_scale.shape[0], indices.shape[0]
        quad = lane % 4
        row_key = (warp % 4) * 16 + lane // 4
        scheduler = static_persistent_scheduler()
        ring = pipelines.k.ring(warp // 4, self.group_stages)
        score_ring = pipelines.scores.ring(warp // 4, self.score_stages)
        q_state, k_state, s_state = start(), start(), start()
        # This warpgroup's next key tile, relative to the work tile's first. The warpgroups take the tiles in turns over
        # the CTA's whole life.
        tile = warp // 4
        for index in cutlass.range(scheduler.first, self.work_tiles(keys, chunk, indices), scheduler.step, unroll=1):
            block, first, last, _ = self.work_tile(index, keys, chunk, indices, starts, ends, lane)
            if first < last:
                self.take_queries(scoring, sq, factors, weights, block, queries, pipelines.q, q_state, tid, quad)
                tile += first
                pending = Int32(0)  # whether a tile waits for its epilogue
                if tile < last:
                    ring.consumer_wait(k_state)
                while tile < last:
                    done = k_state
                    multiply(mma, scoring.acc, scoring.ra, scoring.rb, ring.index(done), q_state.stage)
                    # During the wgmma: the previous tile's epilogue, this tile's scales, the wait for the next
                    # tile's keys.
                    if pending > 0:
                        self.pass_on(scoring, scores, score_ring, s_state, row_key, quad)
                        s_state = score_ring.advance(s_state)
                    pending = Int32(1)
                    self.take_scales(scoring, k_scale, tile * TILE + row_key)
                    k_state = ring.advance(k_state)
                    tile += GROUPS
                    if tile < last:
                        ring.consumer_wait(k_state)
                    self.finish_tile(scoring, ring, done)
                if pending > 0:
                    self.pass_on(scoring, scores, score_ring, s_state, row_key, quad)
                    s_state = score_ring.advance(s_state)
                tile -= last
                pipelines.q.consumer_release(q_state)
                q_state = pipelines.q.advance(q_state)

    @cute.jit
    def pass_on(self, scoring: Scoring, scores, ring: Pipeline, state, row_key, quad):
        """Store a warp's part of a tile's scores in shared memory, each lane those of its query."""
        ring.producer_wait(state)
        for half in cutlass.range_constexpr(2):
            scores[row_key + 8 * half, quad, ring.index(state)] = self.score(scoring, 0, half, quad)
        cute.arch.sync_warp()
        ring.producer_commit(state)

    @cute.jit
    def select(
        self,
        keys,
        starts,
        ends,
        indices,
        values,
        paging,
        options,
        chunk,
        scores,
        lists,
        pipelines: Pipelines,
        number,
        lane,
    ):
        """The mainloop of a selecting warp, which fills the lists of its queries."""
        first_keys, key_counts, counts, floors = (cute.make_rmem_tensor((OWN_QUERIES,), Int32) for _ in range(4))
        own = cute.make_rmem_tensor((HALVES, OWN_QUERIES), Float32)
        k = indices.shape[1]
        scheduler = static_persistent_scheduler()
        state, group = start(), Int32(0)
        for index in cutlass.range(scheduler.first, self.work_tiles(keys, chunk, indices), scheduler.step, unroll=1):
            block, first, last, _ = self.work_tile(index, keys, chunk, indices, starts, ends, lane)
            query = block * BLOCK_Q + number * OWN_QUERIES
            for i in cutlass.range_constexpr(OWN_QUERIES):
                first_keys[i], key_counts[i], counts[i], floors[i] = Int32(0), Int32(0), Int32(0), Int32(LOWEST)
                if query + i < indices.shape[0]:
                    first_keys[i], key_counts[i] = key_range(starts, ends, query + i, keys)
            for tile in cutlass.range(first, last, unroll=1):
                ring = pipelines.scores.ring(group, self.score_stages)
                ring.consumer_wait(state)
                # All loads come before the first append, because the compiler moves no load across a store.
                for i in cutlass.range_constexpr(OWN_QUERIES):
                    for half in cutlass.range_constexpr(HALVES):
                        own[half, i] = scores[lane + WARP * half, number * OWN_QUERIES + i, ring.index(state)]
                cute.arch.sync_warp()
                ring.consumer_release(state)
                group += 1
                if group == GROUPS:
                    group = Int32(0)
                    state = ring.advance(state)
                for i in cutlass.range_constexpr(OWN_QUERIES):
                    for half in cutlass.range_constexpr(HALVES):
                        order, key = order_of(own[half, i]), tile * TILE + WARP * half + lane
                        inside = Uint32(key - first_keys[i]) < Uint32(key_counts[i])
                        taken = inside and order > floors[i]
                        counts[i] = lists[i].append(order, key, taken, counts[i], lane)
                for i in cutlass.range_constexpr(OWN_QUERIES):
                    if counts[i] > CAPACITY - TILE:
                        counts[i], floors[i] = lists[i].cut(counts[i], k, Int32(SLACK), lane)
            for i in cutlass.range_constexpr(OWN_QUERIES):
                if key_counts[i] > 0:
                    if counts[i] > k:
                        counts[i], floors[i] = lists[i].cut(counts[i], k, Int32(0), lane)
                    cute.arch.sync_warp()
                    self.store(lists[i], counts[i], query + i, first_keys[i], indices, values, paging, options, lane)
                    cute.arch.sync_warp()

    @cute.jit
    def store(self, found: SelectionList, count, query, first_key, indices, values, paging, options, lane):
        """Write a query's results: key positions relative to its first key, or cache slots, and the scores."""
        known = Int32(0)
        if options & PAGED:
            known = self.to_slots(found, count, query, first_key, paging, options, lane)
            cute.arch.sync_warp()
            first_key = Int32(0)
        for i in cutlass.range(lane, indices.shape[1], WARP, unroll=1):
            index, value = Int32(-1), -Float32(float("inf"))
            if i < count:
                index, value = found.keys[i] - first_key, number_of(found.orders[i])
            if options & PAGED:
                index = index if known > 0 else Int32(-1)
                value = value if index >= 0 else -Float32(float("inf"))
            indices[query, i] = index
            if options & VALUES:
                values[query, i] = value

    @cute.jit
    def to_slots(self, found: SelectionList, count, query, first_key, paging, options, lane) -> Int32:
        """Replace the list's keys by cache slots of the query's sequence, or -1 where the block table has none. -> 1,
        or 0 if the sequence does not exist; the keys then stay as they were."""
        block_table, row_to_seq, divisor, page_size = paging
        sequence, last = query, block_table.shape[1] - 1
        if options & ROW_TO_SEQ:
            sequence = row_to_seq[query]
        known = Int32(sequence >= 0 and sequence < block_table.shape[0] and last >= 0)
        if known > 0:
            for i in cutlass.range(lane, count, WARP, unroll=4):
                # No branch around the load, so that several loads overlap.
                index = found.keys[i] - first_key
                page, offset = divmod(index, divisor)
                physical = block_table[sequence, cutlass.min(page, last)]
                slot = Int64(physical) * page_size + offset
                exists = page <= last and physical >= 0 and slot < Int64(MAX_SLOTS)
                found.keys[i] = Int32(slot) if exists else Int32(-1)
        return known


@cached
def compile_indexer_select(heads: int, dim: int, half: bool, config: SelectConfig):
    """half: fp16 accumulation (half_scores.py).

    -> f(q [S * H, D] e4m3, k [Skv, D] e4m3, k_scale [Skv], weights [S, H], starts [S], ends [S],
    block_table [B, pages], row_to_seq [S], indices [S, k] int32, values [S, k] fp32, page_size, options, ctas); S, Skv
    > 0, 0 < k <= MAX_SELECTED. The bits of `options` say which tensors are given; the others may have any
    size."""
    queries, keys, k = (cute.sym_int() for _ in range(3))
    q = fake(Float8E4M3FN, (cute.sym_int(), dim), (dim, 1))
    of_keys = fake(Float8E4M3FN, (keys, dim), (*strides(1, 16), 1))
    k_scale = fake(Float32, (keys,), (1,), 4)
    weights = fake(Float32, (queries, heads), (*strides(1), 1), 4)
    starts, ends = (fake(Int32, (queries,), (1,), 4) for _ in range(2))
    block_table = fake(Int32, (cute.sym_int(), cute.sym_int()), (*strides(1), 1), 4)
    row_to_seq = fake(Int32, (cute.sym_int(),), strides(1), 4)
    indices = fake(Int32, (queries, k), (*strides(1), 1), 4)
    values = fake(Float32, (cute.sym_int(), cute.sym_int()), (*strides(1), 1), 4)
    return compile_sm90(
        IndexerSelectSm90(heads, dim, half, config),
        *(q, of_keys, k_scale, weights, starts, ends, block_table, row_to_seq, indices, values),
        *(Int32(1), Int32(0), Int32(1), fake_stream()),
    )


def work_tiles(queries: int) -> int:
    """Number of blocks of queries."""
    return -(-queries // BLOCK_Q)


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [
        (compile_indexer_select, (heads, dim, half, CONFIG))
        for heads in HEADS
        for dim in HEAD_DIMS
        for half in (True, False)
    ]
