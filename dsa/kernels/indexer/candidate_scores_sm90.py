"""Lightning-indexer scores of some of the key tiles. For each query the kernel stores candidates: the scores that are
not below the query's bound, ties with the bound included. The first pass has no bounds and stores all scores.

The scores are bitwise those of fp8_mqa_logits_sm90, because the wgmma and the sums over heads are the same.

Plan
- For every block of queries, a pass scores the key tiles (candidate_passes.py) whose indices are multiples of
  1 << log_stride. The first pass stores all its scores as a sample. The later passes skip the multiples of
  1 << (log_stride + log_period), which earlier passes have scored, and append candidates to lists.
- Warp roles: two or three consumer warpgroups as in fp8_mqa_logits_sm90 (score_mainloop.py), and four producer warps.
  One producer warp per consumer warpgroup loads the warpgroup's key tiles, each by four TMA copies of 16 keys. The last
  producer warp loads a block's queries and computes their key ranges. The producers execute more instructions than the
  single producer of fp8_mqa_logits_sm90. With several producer warps, these instructions are spread over the quarters
  of an SM.
- Prologue: while the consumers score a block, each of the four producer warps prepares a quarter of the next block's
  columns in shared memory, so that the consumers need not wait for the preparation. With fp16 accumulation, the warp
  scales the queries into fp16's range. With either accumulation, it packs the weights in the layout of the consumers'
  lanes. Shared memory then contains everything that a consumer needs to know about the block.
- Mainloop: as in fp8_mqa_logits_sm90. After the first pass, the epilogue multiplies each sum over heads by the key's
  scale, and compares the score with the bound. A lane has several queries. For each of them, one vote over both keys of
  every lane decides whether the warp has anything to append. Only then does the warp check the key ranges.
- Lists: in a pass, at most two CTAs process the keys of a query. One CTA appends from the front of the list, and the
  other CTA appends from the end. So each CTA can assign entries by a counter in shared memory. An atomic on this
  counter takes 100 cycles, which the next tile's wgmma hides; on a counter in global memory it would take 700. The
  order of the entries is unspecified. The set of entries is deterministic unless the list overflows.
- Scheduler: static persistent over blocks of queries, later blocks first. A CTA first computes whole blocks. The last
  one to two blocks per CTA are then divided evenly among all CTAs, so with B blocks each CTA computes B / CTAs blocks.
  In a causal batch, later blocks have more keys. So the order in which CTAs get whole blocks reverses in every round:
  the CTA with the most keys in one round has the fewest in the next.
Shared memory: barriers, queries and keys as in fp8_mqa_logits_sm90, and for each of two blocks the weights, key ranges,
bounds and counters of the queries.
Registers: a consumer thread has 8 registers fewer than in fp8_mqa_logits_sm90. So a producer thread has 16 more with
two consumer warpgroups, and 24 more with three.
Roofline: bound like fp8_mqa_logits_sm90. With 64 heads and fp16 accumulation, a consumer warp executes 2 instructions
per key tile fewer than in fp8_mqa_logits_sm90; with 64 heads and fp32 accumulation, it executes 12 more. In a tile with
candidates, it executes another 24 to append them. For k = 2048, a warp appends in 2 of 3 tiles at 128K keys, and in 1
of 4 at 512K.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake_stream
from dsa.cute.pipeline import Mbarriers, Pipeline, pipeline_storage, start
from dsa.cute.shared_memory import load_8, load_16, store_4
from dsa.cute.sm90 import WARP, opaque
from dsa.cute.wgmma import multiply
from dsa.cute.work_tile import read_info, static_persistent_scheduler, write_info
from dsa.kernels.indexer import fp16_accumulation
from dsa.kernels.indexer.candidate_lists import CAPACITY, GROUP, LOG_GROUP, PARTS
from dsa.kernels.indexer.candidate_passes import fake_lists, frame_of, tiles_of_pass
from dsa.kernels.indexer.fp8_mqa_logits_sm90 import Q_STAGES, Fp8MqaLogitsSm90, MqaLogitsConfig, choose_config
from dsa.kernels.indexer.limits import HEAD_DIMS, HEADS
from dsa.kernels.indexer.score_mainloop import (
    NO_KEY,
    TILE,
    Pipelines,
    Scoring,
    fake_scored,
    key_range,
    thread_index,
    tile_partition,
)
from dsa.runtime.compile_cache import cached, compile_sm90

# {consumer warpgroups: (registers per consumer thread, per producer thread)}. The producers do more here than in other
# kernels, so they need more registers than dsa.cute.sm90's table gives them.
REGISTERS = {2: (224, 56), 3: (152, 56)}
PRODUCER_WARPS = 4
QUERY_WARP = PRODUCER_WARPS - 1  # the producer warp that loads queries: the last one
PADDING = 4  # words after the weights of each lane of a quad, so that the four lanes access different banks
NO_BLOCK = -1
QUIET_NAN = float("nan")


class Pass(NamedTuple):
    """The arguments of a pass. starts, ends [queries] int32: the queries' key ranges. counts [queries, 2] int32:
    numbers of entries at the front and at the back of the lists. bounds [queries] fp32: the least score of a candidate.
    keys: number of keys. log_stride, log_period: the pass scores the key tiles whose indices are multiples of 1 <<
    log_stride but not of 1 << (log_stride + log_period). For the sample log_period is 0, and the pass scores all
    multiples of 1 << log_stride."""

    starts: cute.Tensor
    ends: cute.Tensor
    counts: cute.Tensor
    bounds: cute.Tensor
    keys: Int32
    log_stride: Int32
    log_period: Int32


class WorkTileInfo(NamedTuple):
    """block: the block of queries, or NO_BLOCK after the last work tile. base, tiles: the block's first key group and
    number of key tiles (`frame_of`). first, end: the work tile has the block's key tiles v << log_stride for first <= v
    < end. Except in a sample, it skips those whose v is a multiple of 1 << log_period. back: whether the CTA appends
    from the lists' end."""

    block: Int32
    base: Int32
    tiles: Int32
    first: Int32
    end: Int32
    back: Int32


@dataclass(frozen=True)
class Blocks:
    """Shared memory of the blocks in flight, indexed by the stage of the queries.

    info                the fields of a WorkTileInfo
    bounds              bound of each query
    first_keys, counts  key range of each query: first key and number of keys. A query past the end has a count below 0
    counters            per query, the number of entries at that end of the list where the CTA appends
    units               with fp16 accumulation, per query: the power of two that the scores are multiplied by
    factors             with fp16 accumulation: address of the powers of two that the query rows were divided by
    weights             address of the packed weights, one row per lane of a quad and stage
    ready               barriers. The full barrier of the queries makes info, bounds, first_keys, counts and counters
                        valid; `ready` makes all fields valid
    """

    info: cute.Tensor
    bounds: cute.Tensor
    first_keys: cute.Tensor
    counts: cute.Tensor
    counters: cute.Tensor
    units: cute.Tensor
    factors: Int32
    weights: Int32
    ready: Mbarriers


class CandidateScoresSm90(Fp8MqaLogitsSm90):
    def __init__(self, heads: int, dim: int, sample: bool, half: bool, cfg: MqaLogitsConfig):
        super().__init__(heads, dim, Float32, False, False, half, cfg)
        self.sample = sample
        self.consumer_registers, self.producer_registers = REGISTERS[cfg.groups]
        # Words of packed weights per lane of a quad: a word is a pair of fp16 weights (fp16 accumulation) or an fp32
        # weight.
        self.weight_row = (self.n // 8 if half else self.n // 4) + PADDING
        self.stage_q = self.block_q * Q_STAGES

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        k_scale: cute.Tensor,
        weights: cute.Tensor,
        starts: cute.Tensor,
        ends: cute.Tensor,
        entries: cute.Tensor,
        counts: cute.Tensor,
        bounds: cute.Tensor,
        log_stride: Int32,
        log_period: Int32,
        ctas: Int32,
        stream,
    ):
        (q_atom, q_tma, k_atom, k_tma), (q_layout, k_layout, group_layout) = self.loads(q, k, Q_STAGES, GROUP)

        @cute.struct
        class Storage:
            k_pipeline: pipeline_storage(self.stages)
            q_pipeline: pipeline_storage(Q_STAGES)
            ready: cute.struct.MemRange[Int64, Q_STAGES]
            info: cute.struct.MemRange[Int32, 8 * Q_STAGES]
            bounds: cute.struct.MemRange[Float32, self.stage_q]
            first_keys: cute.struct.MemRange[Int32, self.stage_q]
            counts: cute.struct.MemRange[Int32, self.stage_q]
            counters: cute.struct.MemRange[Int32, self.stage_q]
            units: cute.struct.MemRange[Float32, self.stage_q]
            weights: cute.struct.Align[cute.struct.MemRange[Uint32, 4 * self.weight_row * Q_STAGES], 16]
            factors: cute.struct.MemRange[Float32, self.n * Q_STAGES if self.half else 0]
            q: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(k_layout)], 1024]

        self.storage = Storage
        self.kernel(
            *(q_atom, q_tma, k_atom, k_tma, k_scale, weights, starts, ends, entries, counts, bounds),
            *(log_stride, log_period, self.mma(), q_layout, k_layout, group_layout),
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
        entries: cute.Tensor,
        counts: cute.Tensor,
        bounds: cute.Tensor,
        log_stride: Int32,
        log_period: Int32,
        mma: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        group_layout: cute.ComposedLayout,
    ):
        tid, warp, lane = thread_index()
        storage = SmemAllocator().allocate(self.storage)
        pipelines = Pipelines(
            k=Pipeline.of(storage.k_pipeline, self.stages), q=Pipeline.of(storage.q_pipeline, Q_STAGES)
        )
        sq = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        sk = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        sgroups = storage.k.get_tensor(group_layout.outer, swizzle=group_layout.inner)
        of_queries = cute.make_layout((self.block_q, Q_STAGES))
        blocks = Blocks(
            storage.info.get_tensor(cute.make_layout((len(WorkTileInfo._fields), Q_STAGES), stride=(1, 8))),
            *(x.get_tensor(of_queries) for x in (storage.bounds, storage.first_keys, storage.counts)),
            *(x.get_tensor(of_queries) for x in (storage.counters, storage.units)),
            *(Int32(x.data_ptr().toint()) for x in (storage.factors, storage.weights)),
            Mbarriers(storage.ready.data_ptr(), Q_STAGES),
        )

        self.initialize(q_atom, k_atom, pipelines, tid, warp)
        if tid == 0:
            blocks.ready.init(PRODUCER_WARPS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        wait_for_prerequisite_grids()

        given = Pass(starts, ends, counts, bounds, k_scale.shape[0], log_stride, log_period)
        if warp >= self.consumer_warps:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            part = warp - self.consumer_warps
            if part == QUERY_WARP:
                self.load_queries(q_atom, mq, weights, given, sq, blocks, pipelines, lane)
            else:
                self.load_keys(k_atom, mk, weights, given, sq, sgroups, blocks, pipelines, part, lane)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.keep_scores(k_scale, entries, given, mma, sq, sk, blocks, pipelines, tid, warp, lane)

    @cute.jit
    def work_tiles_of_cta(self, queries):
        """-> (number of this CTA's work tiles, (whole, piece, begin, end)). Each CTA first computes `whole` blocks of
        queries. Each remaining block is divided into `ctas` units. This CTA computes the units [begin, end), counted
        over the remaining blocks. `piece` is the remaining block that contains unit `begin`."""
        cta, ctas = static_persistent_scheduler()
        blocks = cute.ceil_div(queries, self.block_q)
        whole = cutlass.max(blocks // ctas - 1, 0)
        line = blocks - whole * ctas
        begin, end = cta * line, (cta + 1) * line
        piece = begin // ctas
        return whole + cute.ceil_div(end, ctas) - piece, (whole, piece, begin, end)

    @cute.jit
    def work_tile_of(self, number, share, given: Pass, lane) -> WorkTileInfo:
        """Return the CTA's work tile `number`. `share` is the second result of `work_tiles_of_cta`. Blocks of later
        queries come first: in a causal batch, they see the most keys."""
        cta, ctas = static_persistent_scheduler()
        whole, first_piece, begin, end = share
        blocks = cute.ceil_div(given.starts.shape[0], self.block_q)
        place, low, high = number * ctas + cta, Int32(0), ctas
        if (whole - number) & 1 != 0:
            place = number * ctas + ctas - 1 - cta
        if number >= whole:
            piece = first_piece + number - whole
            place = whole * ctas + piece
            low, high = cutlass.max(begin - piece * ctas, 0), cutlass.min(end - piece * ctas, ctas)
        block = blocks - 1 - place
        base, frame_tiles = frame_of(block, self.block_q, given.starts, given.ends, given.keys, lane)
        tiles = tiles_of_pass(frame_tiles, given.log_stride)
        periods = (tiles + (Int32(1) << given.log_period) - 1) >> given.log_period
        first = (periods * low // ctas) << given.log_period
        end = cutlass.min((periods * high // ctas) << given.log_period, tiles)
        if const_expr(not self.sample):
            # A block whose lists have all overflowed has no work: no score reaches a bound of NaN.
            query, waits = block * self.block_q + lane, False
            if lane < self.block_q and query < given.bounds.shape[0]:
                waits = given.bounds[query] == given.bounds[query]
            if not cute.arch.vote_any_sync(waits):
                end = first
        return WorkTileInfo(block, base, frame_tiles, first, end, Int32(low > 0))

    @cute.jit
    def load_queries(self, q_atom, mq, weights, given: Pass, sq, blocks: Blocks, pipelines: Pipelines, lane):
        """The role of the query producer, producer warp QUERY_WARP. It computes the CTA's work tiles and loads their
        queries. It loads and stores the lengths of the queries' lists. It also prepares a quarter of each block."""
        tqs, tqg = tile_partition(q_atom, sq, mq, (self.n, self.dim))
        count, share = self.work_tiles_of_cta(given.starts.shape[0])
        if lane < Q_STAGES:
            blocks.info[0, lane] = Int32(NO_BLOCK)
        cute.arch.sync_warp()
        q_state = start()
        for number in cutlass.range(count, unroll=1):
            tile = self.work_tile_of(number, share, given, lane)
            if tile.first < tile.end:
                pipelines.q.producer_wait(q_state)
                self.close_lists(given, blocks, q_state.stage, lane)
                self.open_block(tile, given, blocks, q_state.stage, lane)
                pipelines.q.producer_expect(q_state, self.n * self.dim)
                q_full = pipelines.q.producer_barrier(q_state)
                cute.copy(q_atom, tqg[None, tile.block], tqs[None, q_state.stage], tma_bar_ptr=q_full)
                pipelines.q.consumer_wait(q_state)
                self.prepare_part(tile.block, weights, sq, blocks, q_state.stage, QUERY_WARP, lane)
                q_state = pipelines.q.advance(q_state)
        pipelines.q.producer_wait(q_state)
        self.close_lists(given, blocks, q_state.stage, lane)
        with cute.arch.elect_one():
            write_info(blocks.info, q_state.stage, WorkTileInfo(*[Int32(NO_BLOCK)] * 6))
        cute.arch.sync_warp()
        pipelines.q.producer_commit(q_state)
        if const_expr(not self.sample):
            q_state = pipelines.q.advance(q_state)
            pipelines.q.producer_wait(q_state)
            self.close_lists(given, blocks, q_state.stage, lane)

    @cute.jit
    def open_block(self, tile: WorkTileInfo, given: Pass, blocks: Blocks, stage: Int32, lane):
        """Write a work tile to `blocks`: info, and per query the bound, the key range and the counter. If the CTA
        appends from the front, the counter begins at the current number of entries there."""
        if lane < self.block_q:
            query = tile.block * self.block_q + lane
            # A query past the end gets the bound NaN, which no score reaches.
            bound, first_key, keys, listed = Float32(QUIET_NAN), Int32(0), Int32(-1), Int32(0)
            if query < given.starts.shape[0]:
                first_key, keys = key_range(given.starts, given.ends, query, given.keys)
                if const_expr(not self.sample):
                    bound = given.bounds[query]
                    if tile.back == 0:
                        listed = given.counts[query, 0]
            blocks.bounds[lane, stage], blocks.counters[lane, stage] = bound, listed
            blocks.first_keys[lane, stage], blocks.counts[lane, stage] = first_key, keys
        with cute.arch.elect_one():
            write_info(blocks.info, stage, tile)
        cute.arch.sync_warp()

    @cute.jit
    def close_lists(self, given: Pass, blocks: Blocks, stage: Int32, lane):
        """Except in a sample: write the list lengths of this stage's previous work tile, if there was one, to global
        memory."""
        if const_expr(not self.sample):
            block, back = blocks.info[0, stage], blocks.info[5, stage]
            query = block * self.block_q + lane
            if block != NO_BLOCK and lane < self.block_q and query < given.bounds.shape[0]:
                given.counts[query, back] = blocks.counters[lane, stage]
            cute.arch.sync_warp()  # all lanes have read the stage before it is overwritten

    @cute.jit
    def prepare_part(
        self, block: Int32, weights: cute.Tensor, sq: cute.Tensor, blocks: Blocks, stage: Int32, part: Int32, lane
    ):
        """Prepare quarter `part` of a block's columns. The block's queries must have arrived. With fp16 accumulation,
        scale the queries into fp16's range. With either accumulation, pack the weights. Then arrive at the stage's
        barrier `ready`."""
        rows = self.n // PRODUCER_WARPS
        factors = blocks.factors + (stage * self.n + part * rows) * 4
        # Each lane has a pair of adjacent heads. If the quarter has fewer pairs than lanes, several lanes have the same
        # pair.
        own = lane % (rows // 2)
        pair = part * (rows // 2) + own
        query, head = 2 * pair // self.heads, 2 * pair % self.heads
        row = cutlass.min(block * self.block_q + query, weights.shape[0] - 1)
        a, b = weights[row, head], weights[row, head + 1]
        if const_expr(self.half):
            queries = Int32(sq.iterator.toint()) + (stage * self.n + part * rows) * self.dim
            for step in cutlass.range(fp16_accumulation.THREADS // WARP, unroll=1):
                fp16_accumulation.bring_into_range(queries, factors, rows, self.dim, step * WARP + lane)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
        to = blocks.weights + ((stage * 4 + pair % 4) * self.weight_row) * 4
        if const_expr(self.half):
            powers = load_8(factors + own * 8)
            a, b = a * powers[0].bitcast(Float32), b * powers[1].bitcast(Float32)
            most = cute.arch.fmax(cute.math.absf(a), cute.math.absf(b))
            for log in cutlass.range_constexpr((self.heads // 2).bit_length() - 1):
                most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, offset=1 << log))
            # Pass the query's largest |weight|, too, so that the weights of all heads are divided by one power of two.
            pairs, unit = fp16_accumulation.pack_weights([a, b, most, most])
            store_4(to + pair // 4 * 4, pairs[0])
            blocks.units[query, stage] = unit
        else:
            store_4(to + pair // 4 * 8, (a * 0.5).bitcast(Uint32))
            store_4(to + pair // 4 * 8 + 4, (b * 0.5).bitcast(Uint32))
        cute.arch.sync_warp()
        blocks.ready.arrive(stage)

    @cute.jit
    def wait_for_block(self, blocks: Blocks, pipelines: Pipelines, q_state) -> WorkTileInfo:
        pipelines.q.consumer_wait(q_state)
        return read_info(WorkTileInfo, blocks.info, q_state.stage)

    @cute.jit
    def load_keys(
        self, k_atom, mk, weights, given: Pass, sq, sgroups, blocks: Blocks, pipelines: Pipelines, part, lane
    ):
        """The role of producer warp `part`. It loads the key tiles of consumer warpgroup `part`, and prepares a quarter
        of each block. With two consumer warpgroups, the warp with `part` = 2 loads no tiles."""
        tks, tkg = tile_partition(k_atom, sgroups, mk, (GROUP, self.dim))
        period = Int32(1) << given.log_period
        ring = pipelines.k.ring(part, self.group_stages)
        q_state, k_state, turn = start(), start(), Int32(part)
        tile = self.wait_for_block(blocks, pipelines, q_state)
        while tile.block != NO_BLOCK:
            self.prepare_part(tile.block, weights, sq, blocks, q_state.stage, part, lane)
            v, turn = self.first_tile(tile, turn, given.log_period)
            if const_expr(self.groups < QUERY_WARP):
                v = v if part < self.groups else tile.end
            while v < tile.end:
                ring.producer_acquire(k_state, TILE * self.dim)
                k_full = ring.producer_barrier(k_state)
                from_group = tile.base + (v << given.log_stride)
                for i in cutlass.range_constexpr(PARTS):
                    to = ring.index(k_state) * PARTS + i
                    cute.copy(k_atom, tkg[None, from_group], tks[None, to], tma_bar_ptr=k_full)
                    from_group += tile.tiles
                k_state = ring.advance(k_state)
                v = self.next_tile(v, period - 1, period - self.groups)
            q_state = pipelines.q.advance(q_state)
            tile = self.wait_for_block(blocks, pipelines, q_state)

    @cute.jit
    def first_tile(self, tile: WorkTileInfo, turn, log_period):
        """-> (v, the warpgroup's turn in the next work tile). Tile v of the pass is the first tile that the warpgroup
        processes in this work tile. The warpgroup with `turn` 0 takes the first tile, the one with `turn` 1 the second
        tile, and so on. The turns continue across work tiles, so the warpgroups' numbers of tiles differ by at most
        one."""
        v, count = tile.first + turn, tile.end - tile.first
        if const_expr(not self.sample):
            v += 1
            count -= (count + (Int32(1) << log_period) - 1) >> log_period
        turn -= count % self.groups
        if turn < 0:
            turn += self.groups
        return v, turn

    @cute.jit
    def next_tile(self, v, period_mask, late):
        """Return the index of the pass's tile that comes `groups` tiles after v. Except in a sample, multiples of the
        period (1 << log_period) are skipped; the period is longer than `groups`.

        period_mask  period - 1
        late         period - `groups`
        """
        following = v + self.groups
        if const_expr(not self.sample):
            if (v & period_mask) >= late:
                following += 1
        return following

    @cute.jit
    def keep_scores(
        self, k_scale, entries, given: Pass, mma, sq, sk, blocks: Blocks, pipelines: Pipelines, tid, warp, lane
    ):
        scoring = self.scoring(mma, sq, sk, tid)
        quad = lane % 4
        place = (warp % 4) * 16 + lane // 4  # index of the lane's first key in a key tile
        # `opaque` hides how these numbers were computed. Otherwise, the compiler would recompute them for every tile.
        period = Int32(1) << given.log_period
        period_mask, late = opaque(period - 1), opaque(period - self.groups)
        step_keys = opaque(Int32(GROUP) << given.log_stride)
        ring = pipelines.k.ring(warp // 4, self.group_stages)
        q_state, k_state = start(), start()
        turn = warp // 4

        # Per query of the lane: bound, first key, number of keys, and the address of the entry at the CTA's end of the
        # list.
        own = [cute.make_rmem_tensor((self.lane_q,), dtype) for dtype in (Float32, Int32, Int32, Int64)]
        bounds, first_keys, counts, pointers = own
        tile = self.wait_for_block(blocks, pipelines, q_state)
        while tile.block != NO_BLOCK:
            stage = q_state.stage
            blocks.ready.wait(q_state.phase, stage)
            for i in cutlass.range_constexpr(self.lane_q):
                mine = quad + 4 * i
                bounds[i] = blocks.bounds[mine, stage]
                first_keys[i], counts[i] = blocks.first_keys[mine, stage], blocks.counts[mine, stage]
                first_entry = entries[tile.block * self.block_q + mine, None].iterator
                if const_expr(not self.sample):
                    first_entry += tile.back * (CAPACITY - 1)
                # The shuffle keeps the compiler from recomputing the address for every entry.
                pointer = Int64(first_entry.toint())
                low, high = (cute.arch.shuffle_sync(Int32(x), lane) for x in (pointer & 0xFFFFFFFF, pointer >> 32))
                pointers[i] = (Int64(high) << 32) | Int64(Uint32(low))
                if const_expr(self.half):
                    scoring.unit[i] = blocks.units[mine, stage]
            at = blocks.weights + (stage * 4 + quad) * (self.weight_row * 4)
            for j in cutlass.range_constexpr(cute.size(scoring.w) // 4):
                for c, word in enumerate(load_16(at + j * 16)):
                    scoring.w[4 * j + c] = word if const_expr(self.half) else word.bitcast(Float32)
            counter = opaque(Int32(blocks.counters.iterator.toint()) + (stage * self.block_q + quad) * 4)
            base_key = ((tile.base + place // GROUP * tile.tiles) << LOG_GROUP) + place % GROUP
            entry_step = opaque(8 - 16 * tile.back)
            v, turn = self.first_tile(tile, turn, given.log_period)
            v = opaque(v)
            # The first iteration runs an epilogue although a previous tile does not exist. In a sample, it stores
            # nothing for NO_KEY. In other passes, scales of NaN give scores that are never candidates.
            scoring.scales.fill(QUIET_NAN)
            key, pending = Int32(NO_KEY), Int32(0)
            if v < tile.end:
                ring.consumer_wait(k_state)
            while v < tile.end:
                done = k_state
                multiply(mma, scoring.acc, scoring.ra, scoring.rb, ring.index(done), q_state.stage)
                # The wgmma overlaps with the previous tile's epilogue, the loads of this tile's scales, and the wait
                # for the next tile's keys.
                self.finish(scoring, own, counter, entry_step, key, pending, place, quad)
                key = base_key + v * step_keys
                pending = v
                self.take_scales(scoring, k_scale, key)
                k_state = ring.advance(k_state)
                v = self.next_tile(v, period_mask, late)
                if v < tile.end:
                    ring.consumer_wait(k_state)
                self.finish_tile(scoring, ring, done)
            self.finish(scoring, own, counter, entry_step, key, pending, place, quad)
            cute.arch.sync_warp()  # all lanes have appended before the stage is released
            pipelines.q.consumer_release(q_state)
            q_state = pipelines.q.advance(q_state)
            tile = self.wait_for_block(blocks, pipelines, q_state)

    @cute.jit
    def finish(self, scoring: Scoring, own, counter, entry_step, key, v, place, quad):
        """Store the lane's scores of `key` and `key` + 8, which belong to the pass's tile v. In a sample, store all of
        them, with NaN for keys that the query does not see. In other passes, append only candidates to the lists."""
        bounds, first_keys, counts, pointers = own
        for i in cutlass.range_constexpr(self.lane_q):
            values = [self.score(scoring, i, half, quad) for half in range(2)]
            if const_expr(self.sample):
                # A query past the end (a count below 0) does not have a row of entries.
                if key < NO_KEY and counts[i] >= 0:
                    for half in cutlass.range_constexpr(2):
                        inside = Uint32(key + 8 * half - first_keys[i]) < Uint32(counts[i])
                        kept = values[half] if inside else Float32(QUIET_NAN)
                        cute.arch.inline_ptx(
                            "st.global.f32 [{$r0}], {$r1};",
                            read_only_args=[pointers[i] + (v * TILE + place + 8 * half) * 4, kept],
                        )
            else:
                if cute.arch.vote_any_sync(values[0] >= bounds[i] or values[1] >= bounds[i]):
                    taken = []
                    for half in cutlass.range_constexpr(2):
                        inside = Uint32(key + 8 * half - first_keys[i]) < Uint32(counts[i])
                        taken.append(Int32(1) if values[half] >= bounds[i] and inside else Int32(0))
                    self.append(values, taken, key, counter + 16 * i, pointers[i], entry_step)

    @cute.jit
    def append(self, values, taken, key, counter: Int32, pointer: Int64, entry_step):
        """Append to the query's list those of the lane's scores of `key` and `key` + 8 for which `taken` is 1. Entries
        past the end of the list are dropped. One atomic assigns the entries of both scores, because the atomic's
        latency is most of the cost of an append."""
        if taken[0] + taken[1] > 0:
            at = cute.arch.inline_ptx(
                "atom.relaxed.cta.shared::cta.add.u32 {$w0}, [{$r0}], {$r1};",
                write_only_types=[Int32],
                read_only_args=[counter, taken[0] + taken[1]],
            )
            for half in cutlass.range_constexpr(2):
                if taken[half] > 0 and at < CAPACITY:
                    cute.arch.inline_ptx(
                        "{{ .reg .b64 a; mad.wide.s32 a, {$r0}, {$r1}, {$r2}; "
                        "st.global.v2.b32 [a], {" + "{$r3}, {$r4}" + "}; }}",
                        read_only_args=[at, entry_step, pointer, values[half], key + 8 * half],
                    )
                at += taken[half]


@cached
def compile_candidate_scores(heads: int, dim: int, sample: bool, half: bool, config: MqaLogitsConfig):
    """sample: the first pass, which stores all scores; otherwise a later pass. half: fp16 accumulation
    (fp16_accumulation.py).

    -> f(q [S * H, D] e4m3, k [Skv, D] e4m3, k_scale [Skv] fp32, weights [S, H] fp32, starts, ends [S] int32, entries
    [S, CAPACITY] int64, counts [S, 2] int32, bounds [S] fp32, log_stride, log_period, ctas); 0 < Skv < MAX_KEYS. ctas
    comes from `choose_ctas`, log_stride and log_period from `pass_strides` (see `Pass`). For a sample, `log_period` is
    0, and `counts` and `bounds` are not used. In the other passes, 1 << log_period exceeds the number of consumer
    warpgroups."""
    queries = cute.sym_int()
    return compile_sm90(
        CandidateScoresSm90(heads, dim, sample, half, config),
        *(*fake_scored(heads, dim, queries), *fake_lists(queries)),
        *(Int32(0), Int32(0), Int32(1), fake_stream()),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Return a (compile function, arguments) pair for each variant that the op can ask for."""
    return [
        (compile_candidate_scores, (heads, dim, sample, half, choose_config(heads, dim, half)))
        for heads in HEADS
        for dim in HEAD_DIMS
        for sample in (True, False)
        for half in (True, False)
    ]
