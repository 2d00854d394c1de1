"""How the top-k gather of sparse MLA in 16 bits treats the L2 cache: compile-time choices, and the producer with them.

The defaults are the choices of topk_gather.py. An order other than "blocks" changes the order of a query's sums, by its
own indices alone; the other choices leave every bit of a result as it is.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr

from dsa.cute.copies import arrive_when_gathered, prefetch_to_l2
from dsa.cute.pipeline import Pipeline, arrive, pipeline_storage, start
from dsa.cute.sm90 import WARPGROUP
from dsa.kernels.mla.limits import TILE_N
from dsa.kernels.mla.mla_epilogue import Epilogue
from dsa.kernels.mla.mla_tiles import (
    K_CHUNK,
    K_PER_V,
    MASK_WORDS,
    ROPE_AFTER,
    ROPE_CHUNK,
    V_CHUNK_ORDER,
    KvPipeline,
    KvState,
    KvTensors,
)
from dsa.kernels.mla.tile_scheduler import WorkTileInfo
from dsa.kernels.mla.topk_gather import WARP_KEYS, TopkGather

LINE = 128  # bytes
DRAWN_BARRIER = 3
STAGGERED = 32  # workers
EVICT_FIRST, EVICT_LAST = 0x12F00000, 0x14F00000  # the upper halves of L2 policies, whose lower halves are 0
ORDERS = ("blocks", "strided", "rotated")


@dataclass(frozen=True)
class GatherOptions:
    """l2_bytes  0, 64, 128 or 256: the L2 cache reads at least so much around 16 bytes that it does not have

    kept_mib  -1: keys stay in the L2 cache before all else, and queries leave it first. Above 0: so many MiB of the
              keys stay, and the others leave it first, too. 0: no policy
    ahead     so many tiles before its gather a tile's rows are asked for; 0: when its own gather begins; -1: never
    by_line   a line a lane is asked for, and not a row an instruction
    order     which keys of a query's list tile t of n has: "blocks", those from 64 t on; "strided", t, t + n, t + 2 n
              and so on; "rotated", the blocks in turn from one on that the query's own indices say. Of one list
    streamed  results leave the L2 cache first
    dynamic   CTAs draw their queries as they become free; lse_partial is a counter for each tile of heads, int32, 0
              before a launch, which has no splits
    stagger   workers begin so many nanoseconds after each other, 32 of them, then again from the first's time on
    """

    l2_bytes: int = 256
    kept_mib: int = 0
    ahead: int = -1
    by_line: bool = False
    order: str = "blocks"
    streamed: bool = False
    dynamic: bool = False
    stagger: int = 0


@dataclass(frozen=True)
class DrawingScheduler:
    """Whole queries: number `worker` of `workers` first, then what `counter` [1] says beyond `workers`."""

    worker: Int32
    workers: Int32
    queries: Int32
    counter: cute.Tensor

    @cute.jit
    def draw(self, warp, lane) -> Int32:
        """A number that no other CTA gets; the first warp's first lane alone has it, and waits for it where it is
        used."""
        number = Int32(0)
        if warp == 0 and lane == 0:
            number = cute.arch.atomic_add(self.counter.iterator, Int32(1), sem="relaxed", scope="gpu")
        return number


@dataclass(frozen=True)
class DrawingPipeline(KvPipeline):
    """drawn [2]: what the load warpgroup's first warp has drawn, by turns."""

    drawn: cute.Tensor


@cute.jit
def _gather(target: Int32, source: Int64, valid: Boolean, l2_bytes: cutlass.Constexpr):
    """Copy 16 bytes from the address `source`; where `valid` is False, write zeros and read nothing."""
    size = Int32(16) if valid else Int32(0)
    least = f".L2::{l2_bytes}B" if l2_bytes else ""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global" + least + " [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[target, source, size]
    )


@cute.jit
def _gather_as(target: Int32, source: Int64, valid: Boolean, policy: Int64, l2_bytes: cutlass.Constexpr):
    """The same with an L2 policy."""
    size = Int32(16) if valid else Int32(0)
    least = f".L2::{l2_bytes}B" if l2_bytes else ""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global.L2::cache_hint" + least + " [{$r0}], [{$r1}], 16, {$r2}, {$r3};",
        read_only_args=[target, source, size, policy],
    )


@cute.jit
def _share_policy(share: Float32) -> Int64:
    """This share of what is read stays in the L2 cache before all else, the rest leaves it first."""
    return cute.arch.inline_ptx(
        "createpolicy.fractional.L2::evict_last.L2::evict_first.b64 {$w0}, {$r0};",
        write_only_types=[Int64],
        read_only_args=[share],
    )


@cute.jit
def _prefetch_line(source: Int64, valid: Boolean):
    """Ask for the line at `source`; where `valid` is False, for nothing."""
    if valid:
        cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[source])


class StreamedEpilogue(Epilogue):
    """Results leave the L2 cache first."""

    @cute.jit
    def write(self, vector, target):
        words = cute.make_tensor(cute.recast_ptr(vector.iterator, dtype=Uint32), cute.make_layout(4))
        cute.arch.inline_ptx(
            "st.global.cs.v4.b32 [{$r0}], {" + "{$r1}, {$r2}, {$r3}, {$r4}" + "};",
            read_only_args=[Int64(target.iterator.toint()), *(words[i] for i in range(4))],
        )


class TopkGatherAs(TopkGather):
    """A TopkGather with options."""

    def __init__(
        self, dtype: type[cutlass.Numeric], head_dim: int, v_stages: int, rope_stages: int, options: GatherOptions
    ):
        super().__init__(dtype, head_dim, v_stages, rope_stages)
        self.options = options

    def storage(self) -> type:
        @cute.struct
        class DrawingStorage:
            v: pipeline_storage(self.v_stages, parts=K_PER_V)
            rope: pipeline_storage(self.rope_stages)
            work: self.work_tile_storage()
            valid_mask: cute.struct.Align[cute.struct.MemRange[Uint32, MASK_WORDS * self.rope_stages], 16]
            drawn: cute.struct.MemRange[Int32, 2]

        return DrawingStorage if self.options.dynamic else super().storage()

    def pipeline(self, storage) -> KvPipeline:
        if not self.options.dynamic:
            return super().pipeline(storage)
        return DrawingPipeline(
            v=Pipeline.of(storage.v, self.v_stages, parts=K_PER_V),
            rope=Pipeline.of(storage.rope, self.rope_stages),
            valid_mask=storage.valid_mask.get_tensor(cute.make_layout((MASK_WORDS, self.rope_stages))),
            work=self.work_tile_pipeline(storage.work),
            drawn=storage.drawn.get_tensor(cute.make_layout(2)),
        )

    def scheduler(self, scheduler, results, head_tile):
        if not self.options.dynamic:
            return scheduler
        counters = cute.recast_ptr(results.lse_partial.iterator, dtype=Int32)
        counter = cute.make_tensor(counters + head_tile, cute.make_layout(1))
        return DrawingScheduler(scheduler.worker, scheduler.workers, scheduler.queries, counter)

    @cute.jit
    def load(self, q, memory, pipeline, lists, group, scheduler, first_row, warp, lane):
        kv_state, work_state = pipeline.start(), start()
        if const_expr(self.options.stagger > 0):
            cute.arch.inline_ptx(
                "nanosleep.u32 {$r0};", read_only_args=[Uint32(scheduler.worker % STAGGERED * self.options.stagger)]
            )
        if const_expr(self.options.dynamic):
            query, turn = scheduler.worker, Int32(0)
            while query < scheduler.queries:
                counts, ends = self.lengths(lists, group, query)
                info = WorkTileInfo(query, Int32(0), cutlass.max(sum(ends), 1), Int32(-1), Int32(0), Int32(0))
                block = self.first_block(self.sample(lists, counts, query, lane), ends)
                if warp == 0:
                    work_state = pipeline.work.publish(work_state, info)
                kv_state, query = self.load_tiles(
                    *(q, memory, pipeline, lists, counts, ends, info, first_row, warp, lane, kv_state, block),
                    *(scheduler, turn),
                )
                turn ^= 1
        else:
            work, sample = scheduler.first(), Uint32(0)
            if const_expr(self.options.order == "rotated"):
                if work.is_valid:
                    query, _ = scheduler.locate(work)
                    counts, _ = self.lengths(lists, group, query)
                    sample = self.sample(lists, counts, query, lane)
            while work.is_valid:
                query, tile = scheduler.locate(work)
                counts, ends = self.lengths(lists, group, query)
                first, end, split_idx, work = scheduler.advance(work, query, tile, cutlass.max(sum(ends), 1))
                block = self.first_block(sample, ends)
                if work.is_valid and work.query < scheduler.queries:
                    self.prefetch_q(q, work.query, first_row, warp, lane)
                    if const_expr(self.options.order == "rotated"):
                        next_counts, _ = self.lengths(lists, group, work.query)
                        sample = self.sample(lists, next_counts, work.query, lane)
                info = WorkTileInfo(query, first, end - first, split_idx, Int32(0), Int32(0))
                if warp == 0:
                    work_state = pipeline.work.publish(work_state, info)
                kv_state, _ = self.load_tiles(
                    *(q, memory, pipeline, lists, counts, ends, info, first_row, warp, lane, kv_state, block),
                    *(None, Int32(0)),
                )
        if warp == 0:
            pipeline.work.publish(work_state, WorkTileInfo.last())

    @cute.jit
    def lengths(self, lists, group, query):
        """(keys, tiles) of each of a query's lists."""
        counts = [selection.count(query, group) for selection in lists]
        return counts, [(count + TILE_N - 1) // TILE_N for count in counts]

    @cute.jit
    def next_query(self, pipeline, scheduler, drawn, turn, q, first_row, warp, lane):
        """What was drawn, for all warps; its rows will be in the L2 cache."""
        if warp == 0 and lane == 0:
            pipeline.drawn[turn] = scheduler.workers + drawn
        cute.arch.barrier(barrier_id=DRAWN_BARRIER, number_of_threads=WARPGROUP)
        query = cute.arch.make_warp_uniform(pipeline.drawn[turn])
        if query < scheduler.queries:
            self.prefetch_q(q, query, first_row, warp, lane)
        return query

    @cute.jit
    def sample(self, lists, counts, query, lane) -> Uint32:
        """One of 32 of the query's indices, for `first_block`."""
        index = Uint32(0)
        if const_expr(self.options.order == "rotated"):
            place = lane * counts[0] // 32
            if place < counts[0]:
                index = Uint32(lists[0].indices[query, place])
        return index

    @cute.jit
    def first_block(self, sample: Uint32, ends) -> Int32:
        """The block of keys that comes first in the rotated order: queries that share most of their keys begin at
        different ones."""
        block = Int32(0)
        if const_expr(self.options.order == "rotated"):
            total = Uint32(cute.arch.warp_redux_sync(Int32(sample), "add"))
            block = Int32((total * Uint32(2654435769) >> 16) % Uint32(cutlass.max(ends[0], 1)))
        return block

    @cute.jit
    def index_at(self, lists, counts, ends, query, tile, key, block):
        """The index of key `key` of tile `tile` in the order of the options; -1: there is none."""
        if const_expr(self.options.order == "blocks" or len(lists) > 1):
            return self.index_of(lists, counts, ends, query, tile, key)
        else:
            place = tile + key * ends[0]
            if const_expr(self.options.order == "rotated"):
                turned = tile + block
                if turned >= ends[0]:
                    turned -= ends[0]
                place = turned * TILE_N + key
            index = Int32(-1)
            if tile < ends[0] and place < counts[0]:
                index = lists[0].indices[query, place]
            return index

    @cute.jit
    def ask(self, address: Int64, valid: Boolean, lane):
        """Ask for the rows that lanes 0 to 15 have the addresses of, where there are any."""
        if const_expr(self.options.by_line):
            mask = Uint32(cute.arch.vote_ballot_sync(valid)) & 0xFFFF
            low, high = Int32(address & 0xFFFFFFFF), Int32(address >> 32)
            for i in cutlass.range_constexpr(WARP_KEYS // 4):
                key = 4 * i + lane // 8
                own_low, own_high = cute.arch.shuffle_sync(low, key), cute.arch.shuffle_sync(high, key)
                line = (Int64(own_high) << 32) + Int64(Uint32(own_low)) + lane % 8 * LINE
                _prefetch_line(line, (mask >> key) & 1 != 0)
            if const_expr(self.has_rope):
                _prefetch_line(address + 8 * LINE, lane < WARP_KEYS and valid)
        else:
            if lane < WARP_KEYS and valid:
                prefetch_to_l2(address, Int32(2 * self.head_dim))

    @cute.jit
    def policy(self, lists) -> Int64:
        """The L2 policy of keys."""
        if const_expr(self.options.kept_mib > 0):
            cache = lists[0].cache
            size = Float32(cache.shape[0]) * Float32(cache.shape[1]) * Float32(2.0 * self.head_dim)
            return _share_policy(cutlass.min(Float32(float(self.options.kept_mib << 20)) / size, Float32(1.0)))
        else:
            return Int64(EVICT_LAST << 32)

    @cute.jit
    def load_tiles(
        self,
        q,
        memory: KvTensors,
        pipeline: KvPipeline,
        lists,
        counts,
        ends,
        info: WorkTileInfo,
        first_row,
        warp,
        lane,
        state: KvState,
        block,
        scheduler: DrawingScheduler | None,
        turn,
    ):
        """As `load_work_tile`; block: which is first in the rotated order. -> the state behind the tiles, and the next
        query, if there is a scheduler that draws it."""
        query, first = info.batch_idx, info.first_tile
        drawn = following = Int32(0)
        if const_expr(scheduler is not None):
            drawn = scheduler.draw(warp, lane)
        ahead = self.options.ahead
        own = warp * WARP_KEYS + lane % WARP_KEYS
        of_list = lists, counts, ends, query
        index = self.index_at(*of_list, first, own, block)
        far = index
        if const_expr(ahead > 1):
            far = self.index_at(*of_list, first + ahead - 1, own, block)
        address, valid = self.locate_row(q, query, first_row, warp, lane)
        of_keys = policy = Int64(EVICT_FIRST << 32)
        if const_expr(self.options.kept_mib != 0):
            of_keys = self.policy(lists)
        for tile in cutlass.range(first - 1, first + info.tiles, unroll=1):
            if tile >= first:
                address, _, valid = self.locate(lists, ends, tile, index)
                index = self.index_at(*of_list, tile + 1, own, block)
                policy = of_keys
                if const_expr(ahead == 0):
                    self.ask(address, valid, lane)
            if const_expr(scheduler is not None):
                if tile == first + info.tiles - 2:
                    following = self.next_query(pipeline, scheduler, drawn, turn, q, first_row, warp, lane)
            mask = Uint32(cute.arch.vote_ballot_sync(valid)) & 0xFFFF
            sources, keep = self.spread(address, mask, lane)
            for n, v_chunk in enumerate(V_CHUNK_ORDER):
                pipeline.v.producer_wait(state.v)
                for c in cutlass.range_constexpr(K_PER_V):
                    place, k_chunk = state.v.stage * K_PER_V + c, v_chunk * K_PER_V + c
                    self.gather_as(memory.v, place, sources, keep, k_chunk, policy, warp, lane)
                    arrive_when_gathered(pipeline.v.producer_barrier(state.v, c))
                state = pipeline.advance_v(state)
                if const_expr(n == ROPE_AFTER - 1):
                    pipeline.rope.producer_wait(state.rope)
                    if const_expr(self.has_rope):
                        self.gather_as(memory.rope, state.rope.stage, sources, keep, ROPE_CHUNK, policy, warp, lane)
                        arrive_when_gathered(pipeline.rope.producer_barrier(state.rope))
                    self.write_selected(pipeline, mask, warp, lane, state)
                    with cute.arch.elect_one():
                        arrive(pipeline.rope.producer_barrier(state.rope))
                    state = pipeline.advance_rope(state)
                    if const_expr(ahead == 1):
                        # The next tile's indices were asked for half a tile ago.
                        far_address, _, far_valid = self.locate(lists, ends, tile + 1, index)
                        self.ask(far_address, far_valid, lane)
                    if const_expr(ahead > 1):
                        far_address, _, far_valid = self.locate(lists, ends, tile + ahead, far)
                        far = self.index_at(*of_list, tile + ahead + 1, own, block)
                        self.ask(far_address, far_valid, lane)
        return state, following

    @cute.jit
    def gather_as(self, stages, place, sources, keep, k_chunk: cutlass.Constexpr, policy: Int64, warp, lane):
        """A k chunk of this warp's keys, to k chunk number `place` of a ring."""
        target = Int32(stages.iterator.toint()) + 2 * K_CHUNK * (place * TILE_N + warp * WARP_KEYS + lane // 8)
        for i in cutlass.range_constexpr(WARP_KEYS // 4):
            row = 4 * (i % 2) + lane // 8  # of 8
            here, there = sources[i] + 2 * K_CHUNK * k_chunk, target + 2 * (4 * i * K_CHUNK + (lane % 8 ^ row) * 8)
            if const_expr(self.options.kept_mib != 0):
                _gather_as(there, here, keep[i], policy, self.options.l2_bytes)
            else:
                _gather(there, here, keep[i], self.options.l2_bytes)
