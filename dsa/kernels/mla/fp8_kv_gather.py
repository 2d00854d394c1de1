"""The producer of sparse MLA attention over an FP8 cache: the load warpgroup (top-k gather).

The warpgroup gathers selected keys as FP8 bytes into a ring of stages, one whole tile per stage. One bulk copy loads a
key. For keys of d = 512 channels, the scales are elsewhere in the page, and cp.async loads them. It takes a warp 30
cycles to issue a bulk copy, so the four warps divide the keys of a tile, 16 keys each. For an invalid index the warp
writes zeros in place of the key and its scales, and clears the key's bit in the valid mask.

Layout of a key in the cache
- d = 576: a key has 512 e4m3 | 4 fp32 scales, one per 128 channels | 64 bf16; 656 bytes.
- d = 512: a page has P x (448 e4m3 | 64 bf16), then P x 8 bytes: 7 ue8m0 scales, one per 64 channels, and a pad byte.
A stage of shared memory has the same order, with the tile's 64 keys instead of a page's P keys.
Bank conflicts: keys are `pitch` bytes apart in a stage, an odd multiple of 16. Keys two apart begin 8 banks apart, and
keys four apart begin 16 banks apart. So the channels that a warp reads together are in different banks.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, Uint32, const_expr

from dsa.cute.copies import arrive_when_gathered_too, bulk_gather, gather_8, prefetch_to_l2
from dsa.cute.pipeline import Pipeline, PipelineState, expect_bytes, pipeline_storage, start
from dsa.cute.shared_memory import store_16
from dsa.cute.work_tile import WorkTilePipeline
from dsa.kernels.mla.limits import FP8_KV_BYTES, HEAD_DIM, TILE_N
from dsa.kernels.mla.mla_roles import WorkTileInfo
from dsa.kernels.mla.topk_gather import WARP_KEYS, Selection, TopkGather

V32_BYTES, V4_ROW = FP8_KV_BYTES[HEAD_DIM], 576  # bytes of a key: d = 576 with the scales, d = 512 without scales


@dataclass(frozen=True)
class Fp8KvPipeline:
    """The barriers of the ring of tiles, and the valid masks and work tiles that the load warps write.

    kv          ring of tiles
    valid_mask  [4, stages] uint32: which keys of the tile are valid. The lower 16 bits of word i have one bit for each
                key that load warp i gathers
    work        pipeline of work tiles
    """

    kv: Pipeline
    valid_mask: cute.Tensor
    work: WorkTilePipeline

    def start(self) -> PipelineState:
        return start()


class Fp8TopkGather(TopkGather):
    """Gather keys of `head_dim` channels, 576 or 512, into a ring of `stages` tiles.

    head_tile         heads of a query that the CTA computes
    score_warpgroups  number of score warpgroups, which take the tiles in turns; both output warpgroups read
                      all tiles
    """

    def __init__(self, head_dim: int, head_tile: int, stages: int, score_warpgroups: int):
        super().__init__(BFloat16, head_dim, stages, stages)
        self.head_tile, self.stages, self.score_warpgroups = head_tile, stages, score_warpgroups
        # The load warps put a query's Q into one or two stages of the ring, before the query's keys.
        self.q_rows = min(head_tile, TILE_N // 2)  # rows of Q per stage
        self.q_stages = head_tile // self.q_rows
        self.q_pitch = 2 * head_dim + 16  # in bytes; padded, so that rows that a warp reads together differ in banks
        self.row_bytes, self.pitch = (V32_BYTES, V32_BYTES) if self.has_rope else (V4_ROW, V4_ROW + 16)
        self.scales = TILE_N * self.pitch
        self.stage_bytes = self.scales + (0 if self.has_rope else TILE_N * 8)

    def storage(self) -> type:
        @cute.struct
        class PipelineStorage:
            kv: pipeline_storage(self.stages)
            work: self.work_tile_storage()
            valid_mask: cute.struct.MemRange[Uint32, 4 * self.stages]

        return PipelineStorage

    def pipeline(self, storage) -> Fp8KvPipeline:
        return Fp8KvPipeline(
            Pipeline.of(storage.kv, self.stages),
            storage.valid_mask.get_tensor(cute.make_layout((4, self.stages))),
            self.work_tile_pipeline(storage.work),
        )

    @cute.jit
    def init(self, pipeline: Fp8KvPipeline, consumers: cutlass.Constexpr):
        """Initialize the barriers; called by one thread.

        Four warps fill a stage of keys. Twelve warps read it: four of a score warpgroup, and eight of the output
        warpgroups. `consumers` warps read work tiles.
        """
        pipeline.kv.init(consumers=12, producers=4)
        pipeline.work.init(consumers)

    @cute.jit
    def addresses_of(self, selection: Selection, page, offset):
        if const_expr(self.has_rope):
            return TopkGather.addresses_of(self, selection, page, offset)
        start = Int64(selection.cache[page, 0, None].iterator.toint())
        values = start + Int64(offset) * V4_ROW
        return values, start + Int64(selection.cache.shape[1]) * V4_ROW + Int64(offset) * 8

    @cute.jit
    def prefetch_q(self, q, query, first_row, warp, lane):
        own = warp * WARP_KEYS + lane
        if lane < WARP_KEYS and own < self.head_tile and first_row + own < q.shape[2]:
            prefetch_to_l2(Int64(q[query, 0, first_row + own, None].iterator.toint()), Int32(2 * self.head_dim))

    @cute.jit
    def load_work_tile(
        self,
        q,
        raw: Int32,
        pipeline: Fp8KvPipeline,
        lists,
        counts,
        ends,
        info: WorkTileInfo,
        first_row,
        warp,
        lane,
        state: PipelineState,
    ) -> PipelineState:
        """Load the query's Q and then the work tile's keys into the ring of stages at shared-memory address `raw`.
        Return the state after the work tile.

        Q is the rows (heads) from `first_row` on. Rows past the last head are not loaded.
        """
        query, first = info.batch_idx, info.first_tile
        own = warp * WARP_KEYS + lane % WARP_KEYS
        index = self.index_of(lists, counts, ends, query, first, own)
        # Whether to prefetch the first keys below. For the CTA's first work tile all stages are empty, so a prefetch
        # would only request the keys twice. This test also skips the prefetch for a later work tile that begins
        # at stage 0 in phase 0.
        begun = state.stage + state.phase > 0
        for i in cutlass.range_constexpr(self.q_stages):
            pipeline.kv.producer_wait(state)
            self.load_rows(q, query, first_row + i * self.q_rows, raw, pipeline.kv, state, warp, lane)
            state = pipeline.kv.advance(state)
        # The stage of the first keys can still contain an earlier tile that the output warpgroups read. Prefetch
        # the keys into the L2 cache in the meantime.
        if begun:
            source, _, valid = self.locate(lists, ends, first, index)
            if valid and lane < WARP_KEYS:
                prefetch_to_l2(source, Int32(self.row_bytes))
        for tile in cutlass.range(first, first + info.tiles, unroll=1):
            source, scales, valid = self.locate(lists, ends, tile, index)
            # Load the next tile's indices while this tile's keys are requested.
            index = self.index_of(lists, counts, ends, query, tile + 1, own)
            mask = Uint32(cute.arch.vote_ballot_sync(valid)) & 0xFFFF
            target = raw + state.stage * self.stage_bytes
            pipeline.kv.producer_wait(state)
            if mask != 0xFFFF:
                self.clear(target + warp * WARP_KEYS * self.pitch, mask, lane)
            if const_expr(not self.has_rope):
                if lane < WARP_KEYS:
                    gather_8(target + self.scales + own * 8, scales, valid)
                arrive_when_gathered_too(pipeline.kv.producer_barrier(state))
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                pipeline.valid_mask[warp, state.stage] = mask
                expect_bytes(pipeline.kv.producer_barrier(state), Int32(cute.arch.popc(mask)) * self.row_bytes)
            cute.arch.sync_warp()
            if valid and lane < WARP_KEYS:
                barrier = pipeline.kv.producer_barrier(state)
                bulk_gather(target + own * self.pitch, source, Int32(self.row_bytes), barrier)
            state = pipeline.kv.advance(state)
        return state

    @cute.jit
    def load_rows(self, q, query, first_row, raw: Int32, pipeline: Pipeline, state: PipelineState, warp, lane):
        """Load `q_rows` rows (heads) of the query's Q, from `first_row` on, into one stage. Each warp loads a quarter
        of them."""
        each = self.q_rows // 4
        row = warp * each + lane
        valid = lane < each and first_row + row < q.shape[2]
        rows = Int32(cute.arch.popc(cute.arch.vote_ballot_sync(valid)))
        pipeline.producer_expect(state, rows * (2 * self.head_dim))
        cute.arch.sync_warp()
        if valid:
            source = Int64(q[query, 0, first_row + row, None].iterator.toint())
            target = raw + state.stage * self.stage_bytes + row * self.q_pitch
            bulk_gather(target, source, Int32(2 * self.head_dim), pipeline.producer_barrier(state))

    @cute.jit
    def clear(self, target: Int32, mask: Uint32, lane):
        """Zero-fill the warp's invalid keys, whose bits in `mask` are 0."""
        for key in cutlass.range(WARP_KEYS, unroll=1):
            if (mask >> key) & 1 == 0:
                for i in cutlass.range_constexpr(2):
                    place = 16 * (lane + 32 * i)
                    if place < self.row_bytes:
                        store_16(target + key * self.pitch + place, [Uint32(0)] * 4)
        # Order these writes, which use the generic proxy, before later bulk copies to the same addresses, which use the
        # async proxy.
        cute.arch.fence_proxy("async.shared", space="cta")
