"""Lightning-indexer scores over contiguous keys and the selection of each query's k largest scores, in one kernel.

The indices are those of topk_indices(fp8_mqa_logits(...)), and the values have the same bits, except that a zero is
always 0.0. Ties (equal scores) go to the lowest keys. The scores do not go through global memory.

For fewer than MAX_KEYS keys, the op first uses lists of candidates (candidate_lists.py), and the kernel computes only
the queries whose list does not determine the result. For the other queries candidate_select_sm90.py has written an
`ends` of NOTHING_LEFT, so they see no keys. For a query that sees no keys the kernel writes nothing, because
candidate_select_sm90.py or the op has written the row. A work tile that has only such queries ends at once.

Plan
- Producer, wgmma, sums over heads and work tiles are those of fp8_mqa_logits_sm90. A work tile is a block of four
  queries by all key tiles from the smallest start to the largest end of the queries' key ranges.
- Warp roles: two consumer warpgroups multiply, and write a key tile's scores to shared memory. In the last warpgroup,
  one warp is the producer, and two other warps each select for two queries (SelectionList). A selecting warp appends
  keys with scores above a bound to the query's list. When a list is full, the warp cuts it to the k largest scores,
  which raises the bound. Soon most keys are below the bound: of 128K keys in random order, about 12 thousand are
  appended for k = 2048, and a list is cut ten times. If scores ascend with the keys, all keys are appended, which is
  slower but correct.
- Pipelines: queries have one stage, because a block of queries lasts for hundreds of key tiles. Each consumer warpgroup
  has a ring of `stages` key tiles and a ring of `score_stages` tiles of scores. The ring of scores lets the consumers
  continue while lists are cut. The consumer warpgroups process the key tiles in turns. The selecting warps read the
  tiles in ascending order, so that among ties the lowest key is first in every list.
- Mainloop: as in fp8_mqa_logits_sm90; the epilogue is a store to shared memory.
- Scheduler: static persistent; later queries come first.
- Output: the selecting warps write it from the lists, which are sorted by key.
Shared memory: barriers; N x D bytes of queries, GROUPS x stages x 64 x D bytes of keys, GROUPS x score_stages x 4 x 72
scores, four lists of CAPACITY (order, key) pairs, 1 KiB of counts per selecting warp; together at most 208 KiB.
Registers: those of fp8_mqa_logits_sm90 with two consumer warpgroups.
Constraints: k is at most CAPACITY - 1024 = 2048, so that a list that was cut has room for at least 960 new keys.
Roofline: with 64 heads, bound like fp8_mqa_logits_sm90. A selecting warp takes some 300 cycles per key tile for its two
queries and about 6 us per cut. The consumers multiply meanwhile, 830 cycles per tile with fp32 accumulation. With fewer
heads, the four queries of a tile have fewer columns than a tile of fp8_mqa_logits_sm90, and the selection takes as long
as the scores.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Uint32
from cutlass.memory import SmemAllocator

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake_stream
from dsa.cute.pipeline import Pipeline, pipeline_storage, start
from dsa.cute.reductions import warp_inclusive_scan
from dsa.cute.sm90 import SHARED_BYTES, WARP, WARPGROUP
from dsa.cute.wgmma import multiply
from dsa.cute.work_tile import static_persistent_scheduler
from dsa.kernels.indexer.fp8_mqa_logits_sm90 import LOAD_WARP, Fp8MqaLogitsSm90, MqaLogitsConfig
from dsa.kernels.indexer.limits import HEAD_DIMS, HEADS, MAX_SELECTED, PAGED, VALUES
from dsa.kernels.indexer.radix_select import HIGHEST, LOWEST, number_of, order_of
from dsa.kernels.indexer.score_mainloop import (
    TILE,
    Pipelines,
    Scoring,
    fake_scored,
    key_range,
    registers_fit,
    thread_index,
)
from dsa.kernels.indexer.selected_slots import Paging, fake_selection
from dsa.runtime.compile_cache import cached, compile_sm90

BLOCK_Q = 4  # queries per work tile
GROUPS = 2  # consumer warpgroups
SELECT_WARP, SELECTING_WARPS = 1, 2  # first selecting warp in the last warpgroup; number of selecting warps
OWN_QUERIES = BLOCK_Q // SELECTING_WARPS  # queries per selecting warp
CAPACITY = MAX_SELECTED + 1024  # entries per list
HALVES = TILE // WARP  # per query, a lane of a selecting warp has one score of each half of a key tile
DIGIT_BITS = 8  # a cut divides a range of orders into up to 1 << DIGIT_BITS digits
DIGITS = 1 << DIGIT_BITS
AHEAD = 4  # list entries that a lane loads before it uses the first
SLACK = 64  # a cut of a full list keeps up to this many entries beyond k, which saves passes over the list
SCORE_ROW = TILE + 8  # stride between two queries' scores, so that a warp's stores have no bank conflicts


@dataclass(frozen=True)
class SelectConfig:
    """stages: key tiles in flight per consumer warpgroup. score_stages: tiles of scores in flight per consumer
    warpgroup."""

    stages: int = 3
    score_stages: int = 12

    def fits(self, heads: int, dim: int) -> bool:
        """Whether this configuration fits: a consumer thread must have enough registers for fp32 accumulation, and a
        CTA enough shared memory, with room for alignment."""
        scores = GROUPS * self.score_stages * BLOCK_Q * SCORE_ROW * 4
        lists = BLOCK_Q * CAPACITY * 8 + SELECTING_WARPS * (DIGITS + 4) * 4
        shared = (BLOCK_Q * heads + GROUPS * self.stages * TILE) * dim + scores + lists + 3 * 1024
        return registers_fit(BLOCK_Q * heads, GROUPS) and shared <= SHARED_BYTES


CONFIG = SelectConfig()


@dataclass(frozen=True)
class SelectionList:
    """List of a query's best keys so far, those with the largest scores, in shared memory. One warp fills the list, and
    cuts it to the k best (and at most SLACK more) when it is full.

    For each score the list contains its order, an integer that sorts like the score. Keys are appended from the lowest
    to the highest, and stay sorted in a cut. So of several ties the first in the list has the lowest key, and a cut
    keeps the first ones. After the last cut, which keeps exactly k, the list has the k largest scores, sorted by key.

    A cut finds the k-th largest order digit by digit. First it divides the range from the least to the largest order
    into up to 256 digits of equal width. Then it divides the digit that contains the k-th largest order in the same
    way, and so on. The cut ends when few enough entries share the digit to keep all of them, or when all entries of the
    digit are ties.

    orders, keys  [CAPACITY] int32
    counts        [DIGITS + 4] int32, common to the warp's lists; element DIGITS counts entries without a digit and is
                  not read
    """

    orders: cute.Tensor
    keys: cute.Tensor
    counts: cute.Tensor

    @cute.jit
    def append(self, order: Int32, key: Int32, taken, count: Int32, lane: Int32) -> Int32:
        """Append the keys of the lanes whose `taken` is true, in lane order. -> the list's new length."""
        mask = cute.arch.vote_ballot_sync(taken)
        if taken:
            at = count + cute.arch.popc(mask & ((1 << lane) - 1))
            self.orders[at] = order
            self.keys[at] = key
        return count + cute.arch.popc(mask)

    @cute.jit
    def cut(self, count: Int32, k: Int32, slack: Int32, lane: Int32):
        """Keep the k best of `count` > k entries, ties by lowest key, and up to `slack` more. -> (number of entries,
        the order that a later key must exceed to be one of the k best)."""
        cute.arch.sync_warp()
        low, high = self.bounds(count, lane)
        shift = cutlass.max(32 - DIGIT_BITS - Int32(cute.arch.clz(Uint32(high) - Uint32(low))), 0)
        # Invariant: the k-th best entry is the `rank`-th best of those with orders in [low, low + (digits << shift)).
        rank, digits, excess = k, Int32(DIGITS), slack + 1
        while excess > slack and digits > 0:
            self.count_digits(count, low, shift, digits, lane)
            digit, above, inside = self.find(rank, lane)
            low += digit << shift
            rank -= above
            excess = inside - rank
            narrower = cutlass.max(shift - DIGIT_BITS, 0)
            digits = Int32(1) << (shift - narrower) if shift > 0 else Int32(0)
            if excess > slack:
                shift = narrower
        # If the entries of the last digit are ties, the first `rank` of them stay, which have the lowest keys.
        # Otherwise all entries of the digit stay.
        equal = digits == 0
        count = self.keep(count, low, rank if equal else Int32(HIGHEST), lane)
        return count, low if equal else low - 1

    @cute.jit
    def bounds(self, count: Int32, lane: Int32):
        least, largest = Int32(HIGHEST), Int32(LOWEST)
        for first in cutlass.range(0, count, WARP * AHEAD, unroll=1):
            for i in cutlass.range_constexpr(AHEAD):
                order = self.orders[cutlass.min(first + WARP * i + lane, count - 1)]
                least, largest = cutlass.min(least, order), cutlass.max(largest, order)
        return cute.arch.warp_redux_sync(least, "min"), cute.arch.warp_redux_sync(largest, "max")

    @cute.jit
    def count_digits(self, count: Int32, low: Int32, shift: Int32, digits: Int32, lane: Int32):
        """For all d < digits, set counts[d] to the number of entries whose digit, (order - low) >> shift, is d."""
        zero = cute.make_rmem_tensor((4,), Int32)
        zero.fill(0)
        for i in cutlass.range_constexpr(DIGITS // 4 // WARP):
            cute.autovec_copy(zero, cute.local_tile(self.counts, (4,), (lane + WARP * i,)))
        cute.arch.sync_warp()
        order = cute.make_rmem_tensor((AHEAD,), Int32)
        for first in cutlass.range(0, count, WARP * AHEAD, unroll=1):
            # All loads come before the first atomic, because the compiler moves no load across an atomic.
            for i in cutlass.range_constexpr(AHEAD):
                order[i] = self.orders[cutlass.min(first + WARP * i + lane, count - 1)]
            for i in cutlass.range_constexpr(AHEAD):
                at = first + WARP * i + lane
                above = (Uint32(order[i]) - Uint32(low)) >> Uint32(shift)
                # Orders without a digit and missing entries go to bin DIGITS, which is cheaper than a branch.
                digit = Int32(above) if at < count and above < Uint32(digits) else Int32(DIGITS)
                cute.arch.inline_ptx(
                    "red.shared::cta.add.u32 [{$r0}], 1;",
                    read_only_args=[Int32(self.counts.iterator.toint()) + 4 * digit],
                )
        cute.arch.sync_warp()

    @cute.jit
    def find(self, rank: Int32, lane: Int32):
        """Search `counts`. -> (digit of the `rank`-th best of the counted entries, number of them with higher digits,
        number of them with this digit)"""
        own = DIGITS // WARP
        mine = cute.make_rmem_tensor((own,), Int32)
        cute.autovec_copy(cute.local_tile(self.counts, (own,), (lane,)), mine)
        total = Int32(0)
        for i in cutlass.range_constexpr(own):
            total += mine[i]
        up_to = warp_inclusive_scan(total, lane)
        above = cute.arch.shuffle_sync(up_to, WARP - 1) - up_to
        digit, higher, inside = Int32(-1), Int32(-1), Int32(-1)
        for j in cutlass.range_constexpr(own):
            i = own - 1 - j
            if above < rank and rank <= above + mine[i]:
                digit, higher, inside = lane * own + i, above, mine[i]
            above += mine[i]
        return tuple(cute.arch.warp_redux_sync(x, "max") for x in (digit, higher, inside))

    @cute.jit
    def keep(self, count: Int32, low: Int32, equals: Int32, lane: Int32) -> Int32:
        """Keep the entries with orders above `low`, and the first `equals` of the entries with order `low`. The kept
        entries stay sorted by key. -> number of entries kept.

        The list is compacted in place. All lanes read a round of entries before any lane writes, and no entry moves to
        a higher index. So every entry is read before it is overwritten."""
        kept, same = Int32(0), Int32(0)
        order, key = cute.make_rmem_tensor((AHEAD,), Int32), cute.make_rmem_tensor((AHEAD,), Int32)
        for first in cutlass.range(0, count, WARP * AHEAD, unroll=1):
            for i in cutlass.range_constexpr(AHEAD):
                at = cutlass.min(first + WARP * i + lane, count - 1)
                order[i], key[i] = self.orders[at], self.keys[at]
            cute.arch.sync_warp()
            for i in cutlass.range_constexpr(AHEAD):
                there = first + WARP * i + lane < count
                level = there and order[i] == low
                levels = cute.arch.vote_ballot_sync(level)
                earlier = same + cute.arch.popc(levels & ((1 << lane) - 1))
                stays = (there and order[i] > low) or (level and earlier < equals)
                kept = self.append(order[i], key[i], stays, kept, lane)
                same += cute.arch.popc(levels)
        cute.arch.sync_warp()
        return kept


class IndexerSelectSm90(Fp8MqaLogitsSm90):
    def __init__(self, heads: int, dim: int, half: bool, cfg: SelectConfig):
        super().__init__(heads, dim, Float32, False, False, half, MqaLogitsConfig(BLOCK_Q * heads, cfg.stages, GROUPS))
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
        (q_atom, q_tma, k_atom, k_tma), (q_layout, k_layout, _) = self.loads(q, k, 1)
        score_stages = GROUPS * self.score_stages

        @cute.struct
        class Storage:
            k_pipeline: pipeline_storage(self.stages)
            q_pipeline: pipeline_storage(1)
            score_pipeline: pipeline_storage(score_stages)
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
            *(divisor, page_size, options, self.mma(), q_layout, k_layout),
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
        tid, warp, lane = thread_index()
        storage = SmemAllocator().allocate(self.storage)
        pipelines = Pipelines(k=Pipeline.of(storage.k_pipeline, self.stages), q=Pipeline.of(storage.q_pipeline, 1))
        score_pipeline = Pipeline.of(storage.score_pipeline, GROUPS * self.score_stages)
        sq = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        sk = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        scores = storage.scores.get_tensor(
            cute.make_layout((TILE, BLOCK_Q, GROUPS * self.score_stages), stride=(1, SCORE_ROW, BLOCK_Q * SCORE_ROW))
        )

        self.initialize(q_atom, k_atom, pipelines, tid, warp)
        if tid == 0:
            score_pipeline.init(consumers=SELECTING_WARPS, producers=WARPGROUP // WARP)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        wait_for_prerequisite_grids()

        # One chunk has all keys, because one list selects from all keys of a query.
        chunk = cute.ceil_div(k_scale.shape[0], TILE)
        if warp >= self.consumer_warps:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            own = warp - self.consumer_warps
            if own == LOAD_WARP:
                self.load(q_atom, mq, k_atom, mk, starts, ends, indices, chunk, sq, sk, pipelines, lane)
            if own >= SELECT_WARP and own < SELECT_WARP + SELECTING_WARPS:
                number = own - SELECT_WARP
                of_lists = cute.make_layout((CAPACITY, BLOCK_Q))
                orders, keys = storage.orders.get_tensor(of_lists), storage.keys.get_tensor(of_lists)
                counts = storage.counts.get_tensor(cute.make_layout((DIGITS + 4, SELECTING_WARPS)))[None, number]
                first = number * OWN_QUERIES
                lists = [
                    SelectionList(orders[None, first + i], keys[None, first + i], counts) for i in range(OWN_QUERIES)
                ]
                self.select(
                    *(k_scale.shape[0], starts, ends, indices, values),
                    *(Paging(block_table, row_to_seq, divisor, page_size), options, chunk),
                    *(scores, lists, score_pipeline, number, lane),
                )
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.compute_scores(
                *(k_scale, weights, starts, ends, indices, chunk, mma, sq, sk, scores),
                *(Int32(storage.factors.data_ptr().toint()), pipelines, score_pipeline, tid, warp, lane),
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
        score_pipeline: Pipeline,
        tid,
        warp,
        lane,
    ):
        scoring = self.scoring(mma, sq, sk, tid)
        keys, queries = k_scale.shape[0], indices.shape[0]
        quad = lane % 4
        row_key = (warp % 4) * 16 + lane // 4
        scheduler = static_persistent_scheduler()
        ring = pipelines.k.ring(warp // 4, self.group_stages)
        score_ring = score_pipeline.ring(warp // 4, self.score_stages)
        q_state, k_state, s_state = start(), start(), start()
        # This warpgroup's next key tile; between work tiles, relative to the first key tile of the next work tile. The
        # warpgroups take turns across work tiles: the next work tile begins with the warpgroup whose turn it is, as the
        # selecting warps expect.
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
                    # The wgmma overlaps with the previous tile's epilogue, the loads of this tile's scales, and the
                    # wait for the next tile's keys.
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
        """Store this warp's scores of a tile (16 keys, 4 queries) in shared memory, for the selecting warps. Each lane
        stores the scores of one query for two keys."""
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
        paging: Paging,
        options,
        chunk,
        scores,
        lists,
        pipeline: Pipeline,
        number,
        lane,
    ):
        """The mainloop of selecting warp `number`, which fills the lists of OWN_QUERIES queries per work tile and
        writes the results."""
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
                ring = pipeline.ring(group, self.score_stages)
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
    def store(self, found: SelectionList, count, query, first_key, indices, values, paging: Paging, options, lane):
        """Write a query's row of indices and, with VALUES, the query's row of scores. Indices are relative to the
        query's first key. With PAGED they are cache slots instead. A key without a slot (`Paging.slot`) gets the index
        -1 and the score -inf. So do the elements from `count` on."""
        known = Int32(0)
        if options & PAGED:
            sequence = paging.sequence(query, options)
            known = Int32(paging.exists(sequence))
            if known > 0:
                for i in cutlass.range(lane, count, WARP, unroll=4):
                    found.keys[i] = paging.slot(sequence, found.keys[i] - first_key)
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


@cached
def compile_indexer_select(heads: int, dim: int, half: bool, config: SelectConfig):
    """half: fp16 accumulation (fp16_accumulation.py).

    -> f(q [S * H, D] e4m3, k [Skv, D] e4m3, k_scale [Skv] fp32, weights [S, H] fp32, starts, ends [S], block_table [B,
    pages], row_to_seq [S], indices [S, k] (all int32), values [S, k] fp32, page_size, options, ctas); S, Skv > 0, 0 < k
    <= MAX_SELECTED. The bits of `options` say which of block_table, row_to_seq and values are used; the others may have
    any size."""
    queries = cute.sym_int()
    return compile_sm90(
        IndexerSelectSm90(heads, dim, half, config),
        *(*fake_scored(heads, dim, queries), *fake_selection(queries)),
        *(Int32(1), Int32(0), Int32(1), fake_stream()),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Return a (compile function, arguments) pair for each variant that the op can ask for."""
    return [
        (compile_indexer_select, (heads, dim, half, CONFIG))
        for heads in HEADS
        for dim in HEAD_DIMS
        for half in (True, False)
    ]
