"""Lightning-indexer scores of a part of the key tiles, of which a query's candidates are kept: what is not below its
bound. Scores have the bits of fp8_mqa_logits_sm90, whose wgmma, sums over heads and roles these are.

Plan
- A pass has the key tiles (candidate_tiles.py) that are multiples of `stride` and not of `stride` << `log_period`, of
  every block of queries. The first pass keeps all its scores as a sample, the others append candidates to lists.
- Warp roles: consumer warpgroups as in fp8_mqa_logits_sm90, and a producer warp for each of them, so that their
  instructions, more than one producer's there, are not all issued by the first quarter of a multiprocessor. A key tile
  is loaded by four copies of 16 keys.
- Mainloop: as there; the epilogue of a candidate pass multiplies by the key's scale and compares with the bound of the
  lane's query. One vote for both keys of a lane decides whether the warp has anything to append; only then it looks at
  ranges.
- Lists: a query's keys of a pass belong to one CTA, or to two, of which one appends from the front of the list and the
  other from its end. So places are handed out by a counter in shared memory, 100 clocks instead of the 700 of a global
  one, in the shadow of the next tile's wgmma. Their order is any; what a list holds is not, unless it overflows.
- Scheduler: static persistent over blocks of queries, later ones first, all but the last one to two blocks a CTA, which
  all CTAs share evenly: of B blocks each CTA computes B / CTAs.
Shared memory: barriers, the queries and keys of fp8_mqa_logits_sm90, a counter a query.
Registers: as fp8_mqa_logits_sm90.
Roofline: that of the scores. With 64 heads a key tile has 4 instructions more than in fp8_mqa_logits_sm90, and 25 for a
warp that appends, which is 2 of 3 tiles at 128K keys and k = 2048, and 1 of 4 at 512K.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.copies import tile_load
from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake, fake_stream, strides
from dsa.cute.pipeline import Pipeline, pipeline_storage, start
from dsa.cute.reductions import quad_reduce_scatter
from dsa.cute.sm90 import WARP, WARPGROUP, opaque
from dsa.cute.wgmma import multiply
from dsa.kernels.indexer import half_scores
from dsa.kernels.indexer.candidate_entries import fake_lists
from dsa.kernels.indexer.candidate_lists import CAPACITY, GROUP, LOG_GROUP, PARTS
from dsa.kernels.indexer.candidate_tiles import NO_KEY, frame_of, key_range, tiles_of_pass
from dsa.kernels.indexer.fp8_mqa_logits_sm90 import (
    Q_STAGES,
    Fp8MqaLogitsSm90,
    MqaLogitsConfig,
    Pipelines,
    choose_config,
)
from dsa.kernels.indexer.limits import HEAD_DIMS, HEADS
from dsa.kernels.indexer.score_tile import TILE, head_sum, key_layout, query_layout, score_mma

LIST_BARRIER = 2  # a block's counters are set, or read
QUIET_NAN = float("nan")


class Ranges(NamedTuple):
    """What all roles know of the keys: the queries' ranges, how many keys, and which tiles are the pass's."""

    starts: cute.Tensor
    ends: cute.Tensor
    keys: Int32
    log_stride: Int32
    log_period: Int32


class Lists(NamedTuple):
    """entries [queries, CAPACITY] of (score, key); counts [queries, 2] from either end; bounds [queries]."""

    entries: cute.Tensor
    counts: cute.Tensor
    bounds: cute.Tensor


class Shares(NamedTuple):
    """A CTA's work tiles: `whole` blocks of queries, then pieces of the last `line` blocks, from number `piece` on. All
    CTAs have as much of these blocks: [begin, end) in CTAs-ths of a block."""

    whole: Int32
    piece: Int32
    begin: Int32
    end: Int32
    count: Int32


class WorkTileInfo(NamedTuple):
    """block: of queries; base, tiles: its Frame; first, end: which of the pass's tiles; back: whether the CTA appends
    from the lists' end."""

    block: Int32
    base: Int32
    tiles: Int32
    first: Int32
    end: Int32
    back: Int32


@dataclass(frozen=True)
class OwnLists:
    """Of a lane's queries: bounds, ranges of keys, and the address of the list's entry where the CTA begins."""

    bounds: cute.Tensor
    first_keys: cute.Tensor
    counts: cute.Tensor
    pointers: cute.Tensor

    @staticmethod
    def of(queries: int) -> "OwnLists":
        return OwnLists(*(cute.make_rmem_tensor((queries,), dtype) for dtype in (Float32, Int32, Int32, Int64)))


class CandidateScoresSm90(Fp8MqaLogitsSm90):
    def __init__(self, heads: int, dim: int, sample: bool, half: bool, cfg: MqaLogitsConfig):
        super().__init__(heads, dim, Float32, False, False, half, cfg)
        self.sample = sample

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
        k_layout = key_layout(TILE, self.n, self.dim, self.stages)
        # The same bytes by groups.
        group_layout = key_layout(GROUP, self.n, self.dim, self.stages * PARTS)
        q_layout = query_layout(self.n, self.dim, Q_STAGES)
        k_atom, k_tma = tile_load(k, group_layout, (GROUP, self.dim))
        q_atom, q_tma = tile_load(q, q_layout, (self.n, self.dim))

        @cute.struct
        class Storage:
            k_pipeline: pipeline_storage(self.stages)
            q_pipeline: pipeline_storage(Q_STAGES)
            counters: cute.struct.MemRange[Int32, 0 if self.sample else self.block_q]
            # Of half scores: what the rows of queries were divided by.
            factors: cute.struct.MemRange[Float32, self.n * Q_STAGES if self.half else 0]
            q: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(k_layout)], 1024]

        self.storage = Storage
        self.kernel(
            *(q_atom, q_tma, k_atom, k_tma, k_scale, weights, starts, ends, entries, counts, bounds),
            *(log_stride, log_period, score_mma(self.n, self.accumulators), q_layout, k_layout, group_layout),
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
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        storage = SmemAllocator().allocate(self.storage)
        pipelines = Pipelines(
            k=Pipeline.of(storage.k_pipeline, self.stages), q=Pipeline.of(storage.q_pipeline, Q_STAGES)
        )
        sq = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        sk = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        sgroups = storage.k.get_tensor(group_layout.outer, swizzle=group_layout.inner)

        if warp == self.consumer_warps:
            cute.nvgpu.cpasync.prefetch_descriptor(q_atom)
            cute.nvgpu.cpasync.prefetch_descriptor(k_atom)
        if tid == 0:
            pipelines.k.init(consumers=WARPGROUP // WARP)
            pipelines.q.init(consumers=self.consumer_warps)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        wait_for_prerequisite_grids()

        ranges = Ranges(starts, ends, k_scale.shape[0], log_stride, log_period)
        if warp >= self.consumer_warps:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            group = warp - self.consumer_warps
            if group < self.groups:
                self.load_tiles(q_atom, mq, k_atom, mk, ranges, bounds, sq, sgroups, pipelines, group, lane)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            lists = Lists(entries, counts, bounds)
            counters = None
            if const_expr(not self.sample):
                counters = cute.make_tensor(storage.counters.data_ptr(), cute.make_layout(self.block_q))
            factors = Int32(storage.factors.data_ptr().toint())
            self.keep_scores(
                k_scale, weights, ranges, lists, counters, factors, mma, sq, sk, pipelines, tid, warp, lane
            )

    @cute.jit
    def shares(self, ranges: Ranges) -> Shares:
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        blocks = cute.ceil_div(ranges.starts.shape[0], self.block_q)
        whole = cutlass.max(blocks // ctas - 1, 0)
        line = blocks - whole * ctas
        begin, end = cta * line, (cta + 1) * line
        piece = begin // ctas
        return Shares(whole, piece, begin, end, whole + cute.ceil_div(end, ctas) - piece)

    @cute.jit
    def work_tile_of(self, number, shares: Shares, ranges: Ranges, bounds: cute.Tensor, lane) -> WorkTileInfo:
        """The CTA's work tile `number`. Later queries come first: in a causal batch they have the longest ranges."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        blocks = cute.ceil_div(ranges.starts.shape[0], self.block_q)
        place, low, high = number * ctas + cta, Int32(0), ctas
        if number >= shares.whole:
            piece = shares.piece + number - shares.whole
            place = shares.whole * ctas + piece
            low, high = cutlass.max(shares.begin - piece * ctas, 0), cutlass.min(shares.end - piece * ctas, ctas)
        block = blocks - 1 - place
        frame = frame_of(block, self.block_q, ranges.starts, ranges.ends, ranges.keys, lane)
        tiles = tiles_of_pass(frame, ranges.log_stride)
        periods = (tiles + (Int32(1) << ranges.log_period) - 1) >> ranges.log_period
        first = (periods * low // ctas) << ranges.log_period
        end = cutlass.min((periods * high // ctas) << ranges.log_period, tiles)
        if const_expr(not self.sample):
            # A block whose lists have all overflowed has no work: nothing reaches bounds of NaN.
            query, waits = block * self.block_q + lane, False
            if lane < self.block_q and query < bounds.shape[0]:
                waits = bounds[query] == bounds[query]
            if not cute.arch.vote_any_sync(waits):
                end = first
        return WorkTileInfo(block, frame.base, frame.tiles, first, end, Int32(low > 0))

    @cute.jit
    def load_tiles(
        self, q_atom, mq, k_atom, mk, ranges: Ranges, bounds, sq, sgroups, pipelines: Pipelines, group, lane
    ):
        """The producer of a consumer warpgroup's key tiles; the first one also loads the queries."""
        gq = cute.local_tile(mq, (self.n, self.dim), (None, 0))
        gk = cute.local_tile(mk, (GROUP, self.dim), (None, 0))
        one = cute.make_layout(1)
        tqs, tqg = cute.nvgpu.cpasync.tma_partition(
            q_atom, 0, one, cute.group_modes(sq, 0, 2), cute.group_modes(gq, 0, 2)
        )
        tks, tkg = cute.nvgpu.cpasync.tma_partition(
            k_atom, 0, one, cute.group_modes(sgroups, 0, 2), cute.group_modes(gk, 0, 2)
        )
        shares = self.shares(ranges)
        period = Int32(1) << ranges.log_period
        ring = pipelines.k.ring(group, self.group_stages)
        q_state, k_state, turn = start(), start(), Int32(group)
        for number in cutlass.range(shares.count, unroll=1):
            tile = self.work_tile_of(number, shares, ranges, bounds, lane)
            if tile.first < tile.end:
                if group == 0:
                    pipelines.q.producer_acquire(q_state, self.n * self.dim)
                    q_full = pipelines.q.producer_barrier(q_state)
                    cute.copy(q_atom, tqg[None, tile.block], tqs[None, q_state.stage], tma_bar_ptr=q_full)
                    q_state = pipelines.q.advance(q_state)
                v, turn = self.first_tile(tile, turn, ranges.log_period)
                while v < tile.end:
                    ring.producer_acquire(k_state, TILE * self.dim)
                    k_full = ring.producer_barrier(k_state)
                    from_group = tile.base + (v << ranges.log_stride)
                    for part in cutlass.range_constexpr(PARTS):
                        to = ring.index(k_state) * PARTS + part
                        cute.copy(k_atom, tkg[None, from_group], tks[None, to], tma_bar_ptr=k_full)
                        from_group += tile.tiles
                    k_state = ring.advance(k_state)
                    v = self.next_tile(v, period - 1, period - self.groups)

    @cute.jit
    def first_tile(self, tile: WorkTileInfo, turn, log_period):
        """(which of the pass's tiles is the work tile's first of the warpgroup whose turn is `turn`, its turn in the
        next work tile): the warpgroups take turns over the whole life of the CTA, and none has two more than
        another."""
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
        """The pass's tile `groups` behind v: multiples of the period are left out. A period is longer than that."""
        following = v + self.groups
        if const_expr(not self.sample):
            if (v & period_mask) >= late:
                following += 1
        return following

    @cute.jit
    def keep_scores(
        self,
        k_scale,
        weights,
        ranges: Ranges,
        lists: Lists,
        counters,
        factors,
        mma,
        sq,
        sk,
        pipelines: Pipelines,
        tid,
        warp,
        lane,
    ):
        """The mainloop of a consumer warpgroup."""
        thr_mma = mma.get_slice(tid % WARPGROUP)
        ra, rb = mma.make_fragment_A(thr_mma.partition_A(sk)), mma.make_fragment_B(thr_mma.partition_B(sq))
        acc = cute.make_rmem_tensor(thr_mma.partition_shape_C((TILE, self.n)), self.accumulators)
        flat = cute.make_tensor(acc.iterator, cute.make_layout(self.n // 2))
        sums, scales = cute.make_rmem_tensor((2 * self.block_q,), Float32), cute.make_rmem_tensor((2,), Float32)
        w = cute.make_rmem_tensor((self.n // 4,), Float32)
        unit = cute.make_rmem_tensor((self.lane_q,), Float32)  # what the scores of the lane's queries are counted in
        if const_expr(self.half):
            flat = cute.recast_tensor(flat, Uint32)
            sums = cute.make_rmem_tensor((2 * self.block_q,), Uint32)
            w = cute.make_rmem_tensor((self.n // 8,), Uint32)
        sums.fill(0)
        keys, queries = ranges.keys, ranges.starts.shape[0]
        quad = lane % 4
        place = (warp % 4) * 16 + lane // 4  # of the first of the lane's two keys in a key tile
        counter = Int32(0)  # the address of the first of the lane's queries'
        if const_expr(not self.sample):
            counter = opaque(Int32(counters.iterator.toint()) + 4 * quad)
        shares = self.shares(ranges)
        # In registers of every lane: the compiler would compute them anew for every tile.
        period = Int32(1) << ranges.log_period
        period_mask, late = opaque(period - 1), opaque(period - self.groups)
        step_keys = opaque(Int32(GROUP) << ranges.log_stride)
        ring = pipelines.k.ring(warp // 4, self.group_stages)
        q_state, k_state = start(), start()
        turn = warp // 4

        own = OwnLists.of(self.lane_q)
        for number in cutlass.range(shares.count, unroll=1):
            tile = self.work_tile_of(number, shares, ranges, lists.bounds, lane)
            if tile.first < tile.end:
                for i in cutlass.range_constexpr(self.lane_q):
                    query = tile.block * self.block_q + quad + 4 * i
                    # Of a query past the end, which has a count below 0 and a bound that nothing reaches.
                    own.bounds[i], own.first_keys[i], own.counts[i] = Float32(QUIET_NAN), Int32(0), Int32(-1)
                    if query < queries:
                        own.first_keys[i], own.counts[i] = key_range(ranges.starts, ranges.ends, query, keys)
                        if const_expr(not self.sample):
                            own.bounds[i] = lists.bounds[query]
                    first_entry = lists.entries[query, None].iterator
                    if const_expr(not self.sample):
                        first_entry += tile.back * (CAPACITY - 1)
                    # Through a shuffle, or the compiler would compute it anew for every entry.
                    pointer = Int64(first_entry.toint())
                    low, high = (cute.arch.shuffle_sync(Int32(x), lane) for x in (pointer & 0xFFFFFFFF, pointer >> 32))
                    own.pointers[i] = (Int64(high) << 32) | Int64(Uint32(low))
                if const_expr(not self.sample):
                    self.open_lists(lists, counters, tile, tid)
                if const_expr(self.half):
                    self.prepare(sq, factors, weights, tile.block, queries, pipelines.q, q_state, w, unit, tid, quad)
                else:
                    for j in cutlass.range_constexpr(self.n // 8):
                        query = cutlass.min(tile.block * self.block_q + j * 8 // self.heads, queries - 1)
                        for c in cutlass.range_constexpr(2):
                            w[2 * j + c] = weights[query, j * 8 % self.heads + quad * 2 + c] * 0.5
                    pipelines.q.consumer_wait(q_state)
                base_key = ((tile.base + place // GROUP * tile.tiles) << LOG_GROUP) + place % GROUP
                entry_step = opaque(8 - 16 * tile.back)
                v, turn = self.first_tile(tile, turn, ranges.log_period)
                v = opaque(v)
                # No tile is without its epilogue yet: NaN is no candidate, and NO_KEY no key.
                scales.fill(QUIET_NAN)
                key, pending = Int32(NO_KEY), Int32(0)
                if v < tile.end:
                    ring.consumer_wait(k_state)
                while v < tile.end:
                    done = k_state
                    multiply(mma, acc, ra, rb, ring.index(done), q_state.stage)
                    # While it runs: the last tile's epilogue, this one's scales, and the next one's keys.
                    self.finish(sums, scales, unit, own, counter, entry_step, key, pending, place, quad)
                    key = base_key + v * step_keys
                    pending = v
                    for half in cutlass.range_constexpr(2):
                        scales[half] = k_scale[cutlass.min(key + 8 * half, keys - 1)]
                    k_state = ring.advance(k_state)
                    v = self.next_tile(v, period_mask, late)
                    if v < tile.end:
                        ring.consumer_wait(k_state)
                    cute.nvgpu.warpgroup.wait_group(0)
                    ring.consumer_release(done)
                    for t in cutlass.range_constexpr(self.block_q):
                        if const_expr(self.half):
                            sums[2 * t], sums[2 * t + 1] = half_scores.head_sum(flat, w, t, self.heads)
                        else:
                            sums[2 * t], sums[2 * t + 1] = head_sum(flat, w, t, self.heads)
                self.finish(sums, scales, unit, own, counter, entry_step, key, pending, place, quad)
                pipelines.q.consumer_release(q_state)
                q_state = pipelines.q.advance(q_state)
                if const_expr(not self.sample):
                    self.close_lists(lists, counters, tile, tid)

    @cute.jit
    def open_lists(self, lists: Lists, counters, tile: WorkTileInfo, tid):
        """Where the CTA goes on in the block's lists."""
        if tid < self.block_q:
            query = tile.block * self.block_q + tid
            counters[tid] = Int32(0)
            if query < lists.bounds.shape[0] and tile.back == 0:
                counters[tid] = lists.counts[query, 0]
        cute.arch.barrier(barrier_id=LIST_BARRIER, number_of_threads=self.groups * WARPGROUP)

    @cute.jit
    def close_lists(self, lists: Lists, counters, tile: WorkTileInfo, tid):
        """How many there are behind the work tile. The same threads open the next block's."""
        cute.arch.barrier(barrier_id=LIST_BARRIER, number_of_threads=self.groups * WARPGROUP)
        if tid < self.block_q:
            query = tile.block * self.block_q + tid
            if query < lists.bounds.shape[0]:
                lists.counts[query, tile.back] = counters[tid]

    @cute.jit
    def finish(self, sums, scales, unit, own: OwnLists, counter, entry_step, key, v, place, quad):
        """Add up the quads' sums over heads, give each lane its queries, scale, and keep the scores of `key` and
        `key` + 8, which are of the pass's tile v."""
        upper, odd = (quad & 2) != 0, (quad & 1) != 0
        for i in cutlass.range_constexpr(self.lane_q):
            values = []
            for half in cutlass.range_constexpr(2):
                of_quad = [sums[2 * (4 * i + j) + half] for j in range(4)]
                if const_expr(self.half):
                    value = quad_reduce_scatter(*(half_scores.pair_sum(x) for x in of_quad), upper, odd) * unit[i]
                else:
                    value = quad_reduce_scatter(*of_quad, upper, odd)
                values.append(value * scales[half])
            if const_expr(self.sample):
                # NaN where the query does not see the key. A query past the end has no room for it.
                if key < NO_KEY and own.counts[i] >= 0:
                    for half in cutlass.range_constexpr(2):
                        inside = Uint32(key + 8 * half - own.first_keys[i]) < Uint32(own.counts[i])
                        kept = values[half] if inside else Float32(QUIET_NAN)
                        cute.arch.inline_ptx(
                            "st.global.f32 [{$r0}], {$r1};",
                            read_only_args=[own.pointers[i] + (v * TILE + place + 8 * half) * 4, kept],
                        )
            else:
                if cute.arch.vote_any_sync(values[0] >= own.bounds[i] or values[1] >= own.bounds[i]):
                    taken = []
                    for half in cutlass.range_constexpr(2):
                        inside = Uint32(key + 8 * half - own.first_keys[i]) < Uint32(own.counts[i])
                        taken.append(Int32(1) if values[half] >= own.bounds[i] and inside else Int32(0))
                    self.append(values, taken, key, counter + 16 * i, own.pointers[i], entry_step)

    @cute.jit
    def append(self, values, taken, key, counter: Int32, pointer: Int64, entry_step):
        """A lane's scores of `key` and `key` + 8, as far as they are taken, to its query's list, if there is room.
        Counted together: an atomic's latency is most of what appending takes."""
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
    """sample: the first pass, which keeps all scores; half: fp16 accumulators (half_scores).

    -> f(q [S * H, D] e4m3, k [Skv, D] e4m3, k_scale [Skv], weights [S, H], starts [S], ends [S],
    entries [S, CAPACITY] int64, counts [S, 2] int32, bounds [S], log_stride, log_period, ctas); 0 < Skv < MAX_KEYS, and
    ctas of choose_ctas. A period has more tiles than there are consumer warpgroups; a sample's log_period is 0, and it
    leaves counts and bounds alone."""
    queries, keys = cute.sym_int(), cute.sym_int()
    q = fake(Float8E4M3FN, (cute.sym_int(), dim), (dim, 1))
    k = fake(Float8E4M3FN, (keys, dim), (*strides(1, 16), 1))
    k_scale = fake(Float32, (keys,), (1,), 4)
    weights = fake(Float32, (queries, heads), (*strides(1), 1), 4)
    starts, ends = fake(Int32, (queries,), (1,), 4), fake(Int32, (queries,), (1,), 4)
    lists = fake_lists(queries)
    kernel = CandidateScoresSm90(heads, dim, sample, half, config)
    return compile_sm90(
        kernel, q, k, k_scale, weights, starts, ends, *lists, Int32(0), Int32(0), Int32(1), fake_stream()
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [
        (compile_candidate_scores, (heads, dim, sample, half, choose_config(heads, dim, half)))
        for heads in HEADS
        for dim in HEAD_DIMS
        for sample in (True, False)
        for half in (True, False)
    ]
