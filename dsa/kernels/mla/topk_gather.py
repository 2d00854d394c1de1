"""The producer of sparse MLA attention over 16-bit keys: the load warpgroup, which gathers selected keys.

A query has one or two lists of keys. The query's tiles are the first list in steps of 64 keys, then the second list in
steps of 64 keys. The scheduler says which queries and tiles a CTA computes. For an invalid index the load warpgroup
writes zeros and clears the key's bit in the valid mask.

cp.async writes through the generic proxy, and wgmma reads through the async proxy. An mbarrier does not order
the two: PTX requires a fence.proxy.async between the write and the read. The score warpgroups execute the
fence: once per tile if the whole tile has arrived (`TopkGather.tile_is_loaded`), otherwise after the wait for
each chunk (`TopkGather.fence`). The output warpgroups read the same chunks and need no other fence. They wait for P of
the tile, and the score warpgroup executes a fence for P after it has waited for all chunks of the tile. That fence
covers the chunks, too.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr

from dsa.cute.copies import arrive_when_gathered, gather_16, prefetch_to_l2
from dsa.cute.pipeline import arrive, start
from dsa.cute.sm90 import WARPGROUP
from dsa.kernels.mla.limits import HEAD_DIM_V, TILE_N
from dsa.kernels.mla.mla_roles import WorkTileInfo
from dsa.kernels.mla.mla_tiles import (
    K_CHUNK,
    K_PER_V,
    ROPE_AFTER,
    ROPE_CHUNK,
    V_CHUNK_ORDER,
    KvPipeline,
    KvStages,
    KvState,
    KvTensors,
)
from dsa.kernels.mla.tile_scheduler import QueueScheduler, StreamKScheduler

WARP_KEYS = TILE_N // 4  # keys of a tile that a load warp gathers


@dataclass(frozen=True)
class Selection:
    """A list of keys for each of T queries; a sequence has s_q queries.

    cache       [pages, P, d]
    indices     [T, K] int32: page * P + offset in the page; an index that is negative or beyond the cache is invalid
    counts      [T / s_q] int32: a query of sequence b uses only the first counts[b] of the K indices
    has_counts  > 0: `counts` is used. Otherwise queries use all K indices
    page_size   P as a divisor
    """

    cache: cute.Tensor
    indices: cute.Tensor
    counts: cute.Tensor
    has_counts: Int32
    page_size: cute.FastDivmodDivisorV2

    @cute.jit
    def count(self, query: Int32, group: cute.FastDivmodDivisorV2):
        """Return the number of indices that the query uses, from 0 to K. group: s_q as a divisor."""
        count = self.indices.shape[1]
        if self.has_counts > 0:
            sequence, _ = divmod(query, group)
            count = cutlass.max(cutlass.min(self.counts[sequence], count), 0)
        return count


class TopkGather(KvStages):
    """Gather keys of `head_dim` channels, 576 or 512. Eight lanes copy a k chunk of a key, 16 bytes each."""

    def __init__(self, dtype: type[cutlass.Numeric], head_dim: int, v_stages: int, rope_stages: int):
        super().__init__(dtype, v_stages, rope_stages)
        self.head_dim, self.has_rope = head_dim, head_dim > HEAD_DIM_V
        # A k chunk is full when the copies of all lanes are complete: one arrival per lane. A rope stage also needs one
        # arrival per warp, after the warp has written its bits of the valid mask. If keys have no rope part, a rope
        # stage needs only the arrivals of the warps.
        self.v_producers, self.rope_producers = WARPGROUP, WARPGROUP + 4 if self.has_rope else 4

    @cute.jit
    def load(
        self,
        q,
        memory,
        pipeline,
        lists,
        group,
        scheduler: StreamKScheduler | QueueScheduler,
        first_row,
        warp,
        lane,
    ):
        """Run the load warpgroup over all work tiles of this CTA, then publish the end marker.

        memory, pipeline  the stages and their barriers
        lists             one or two Selections
        group             number of queries per sequence, s_q, as a divisor
        first_row         first head that this CTA computes
        """
        kv_state, work_state = pipeline.start(), start()
        work = scheduler.first()
        while work.is_valid:
            query, tile = scheduler.locate(work)
            counts = [selection.count(query, group) for selection in lists]
            ends = [(count + TILE_N - 1) // TILE_N for count in counts]
            query_tiles = ends[0] if const_expr(len(lists) == 1) else ends[0] + ends[1]
            # A query without keys gets one tile without keys, so that its work tile writes results.
            query_tiles = cutlass.max(query_tiles, 1)
            first, end, split_idx, work = scheduler.advance(work, query, tile, query_tiles)
            if work.is_valid and work.query < scheduler.queries:
                self.prefetch_q(q, work.query, first_row, warp, lane)
            info = WorkTileInfo(query, first, end - first, split_idx, Int32(0), Int32(0))
            if warp == 0:
                work_state = pipeline.work.publish(work_state, info)
            kv_state = self.load_work_tile(
                *(q, memory, pipeline, lists, counts, ends, info, first_row, warp, lane, kv_state),
            )
        if warp == 0:
            pipeline.work.publish(work_state, WorkTileInfo.last())

    @cute.jit
    def tile_is_loaded(self, pipeline: KvPipeline, last: KvState) -> Boolean:
        """Whether all v chunks of the tile have arrived. If so, also wait for the tile's rope stage, and fence the
        tile.

        last: the states of the tile's last v chunk and of the tile's rope part. The barrier of the last v chunk covers
        all v chunks of the tile: a lane arrives at it only after all the lane's earlier copies are complete. The
        barrier of the rope stage also covers the valid mask.
        """
        loaded = pipeline.v.is_full(last.v, K_PER_V - 1)
        if loaded:
            pipeline.rope.consumer_wait(last.rope)
            self.fence()
        return loaded

    @cute.jit
    def fence(self):
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def prefetch_q(self, q, query, first_row, warp, lane):
        """Prefetch the rows of Q of `query`, the next query, into the L2 cache."""
        address, valid = self.locate_row(q, query, first_row, warp, lane)
        if lane < WARP_KEYS and valid:
            prefetch_to_l2(address, Int32(2 * self.head_dim))

    @cute.jit
    def locate_row(self, q, query, first_row, warp, lane):
        """Return (address, whether the row exists) of row lane % 16 of the 16 rows of Q that this warp gathers."""
        row = first_row + warp * WARP_KEYS + lane % WARP_KEYS
        return q[query, 0, cutlass.min(row, q.shape[2] - 1), None].iterator.toint(), row < q.shape[2]

    @cute.jit
    def index_of(self, lists, counts, ends, query, tile, key):
        """Return the selected index of key `key` (0 to 63) in tile `tile` of a query, or -1 past the end of a list.

        counts: number of indices that the query uses in each list. ends: number of tiles of each list.
        """
        place = tile * TILE_N + key
        index = Int32(-1)
        if place < counts[0]:
            index = lists[0].indices[query, place]
        if const_expr(len(lists) == 2):
            if tile >= ends[0]:
                index = Int32(-1)
                if place - ends[0] * TILE_N < counts[1]:
                    index = lists[1].indices[query, place - ends[0] * TILE_N]
        return index

    @cute.jit
    def locate(self, lists, ends, tile, index):
        """Return (address of the key, address of the key's scales, whether the key is valid). index: the selected index
        of a key of tile `tile`."""
        address, scales, valid = self.find(lists[0], index)
        if const_expr(len(lists) == 2):
            if tile >= ends[0]:
                address, scales, valid = self.find(lists[1], index)
        return address, scales, valid

    @cute.jit
    def find(self, selection: Selection, index):
        """Return the same as `locate`, for a key of the list `selection`. For an invalid key, the addresses are
        dummies."""
        page, offset = divmod(cutlass.max(index, 0), selection.page_size)
        valid = index >= 0 and page < selection.cache.shape[0]
        address = Int64(selection.cache.iterator.toint())
        scales = address
        if valid:
            address, scales = self.addresses_of(selection, page, offset)
        return address, scales, valid

    @cute.jit
    def addresses_of(self, selection: Selection, page, offset):
        """Return (address of the key, address of the key's scales). A 16-bit key has no scales, so the second address
        is a dummy."""
        return Int64(selection.cache[page, offset, None].iterator.toint()), Int64(selection.cache.iterator.toint())

    @cute.jit
    def spread(self, address: Int64, mask: Uint32, lane):
        """Distribute the addresses of 16 keys among the lanes. Lane i < 16 passes the address of key i. Eight lanes
        share a key, and the addresses that they get are 16 bytes apart.

        A lane copies 16 bytes of each of four keys. Return two lists: the lane's address in each of these keys, and
        whether each of these keys is valid.
        """
        sources, valid = [], []
        low, high = Int32(address & 0xFFFFFFFF), Int32(address >> 32)
        for i in cutlass.range_constexpr(WARP_KEYS // 4):
            key = 4 * i + lane // 8
            own_low, own_high = cute.arch.shuffle_sync(low, key), cute.arch.shuffle_sync(high, key)
            sources.append((Int64(own_high) << 32) + Int64(Uint32(own_low)) + lane % 8 * 16)
            valid.append((mask >> key) & 1 != 0)
        return sources, valid

    @cute.jit
    def load_work_tile(
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
    ) -> KvState:
        """Load 64 rows of Q, beginning with row `first_row`, into the stages of one tile. Then load the work tile's
        keys. Return the state after the work tile.

        The loop's first iteration, with `tile` = `first` - 1, loads Q.
        """
        query, first = info.batch_idx, info.first_tile
        own = warp * WARP_KEYS + lane % WARP_KEYS
        index = self.index_of(lists, counts, ends, query, first, own)
        own_index = index
        address, valid = self.locate_row(q, query, first_row, warp, lane)
        for tile in cutlass.range(first - 1, first + info.tiles, unroll=1):
            if tile >= first:
                address, _, valid = self.locate(lists, ends, tile, index)
                own_index = index
                # Load the next tile's indices while this tile's keys are requested.
                index = self.index_of(lists, counts, ends, query, tile + 1, own)
            mask = Uint32(cute.arch.vote_ballot_sync(valid)) & 0xFFFF
            sources, keep = self.spread(address, mask, lane)
            selected = self.selected(mask, own_index, lane)
            for n, v_chunk in enumerate(V_CHUNK_ORDER):
                pipeline.v.producer_wait(state.v)
                for c in cutlass.range_constexpr(K_PER_V):
                    self.gather(memory.v, state.v.stage * K_PER_V + c, sources, keep, v_chunk * K_PER_V + c, warp, lane)
                    arrive_when_gathered(pipeline.v.producer_barrier(state.v, c))
                state = pipeline.advance_v(state)
                if const_expr(n == ROPE_AFTER - 1):
                    pipeline.rope.producer_wait(state.rope)
                    if const_expr(self.has_rope):
                        self.gather(memory.rope, state.rope.stage, sources, keep, ROPE_CHUNK, warp, lane)
                        arrive_when_gathered(pipeline.rope.producer_barrier(state.rope))
                    self.write_selected(pipeline, selected, warp, lane, state)
                    with cute.arch.elect_one():
                        arrive(pipeline.rope.producer_barrier(state.rope))
                    state = pipeline.advance_rope(state)
        return state

    @cute.jit
    def selected(self, mask: Uint32, index: Int32, lane):
        """Return what `write_selected` writes for this warp's 16 keys. Here this is `mask`, one bit per valid key.
        Gathers for query groups override both methods and use `index`, the selected index of the lane's key.
        """
        return mask

    @cute.jit
    def write_selected(self, pipeline: KvPipeline, selected: Uint32, warp, lane, state: KvState):
        with cute.arch.elect_one():
            pipeline.valid_mask[warp, state.rope.stage] = selected

    @cute.jit
    def gather(self, stages, place, sources, keep, k_chunk: cutlass.Constexpr, warp, lane):
        """Gather k chunk `k_chunk` of this warp's keys into the ring `stages`; `place` is the target's index among the
        k chunks of all stages."""
        target = Int32(stages.iterator.toint()) + 2 * K_CHUNK * (place * TILE_N + warp * WARP_KEYS + lane // 8)
        for i in cutlass.range_constexpr(WARP_KEYS // 4):
            row = 4 * (i % 2) + lane // 8  # index among 8 rows, the swizzle's period
            gather_16(
                target + 2 * (4 * i * K_CHUNK + (lane % 8 ^ row) * 8), sources[i] + 2 * K_CHUNK * k_chunk, keep[i]
            )
