"""The producer of sparse MLA attention over an FP8 cache: the load warpgroup, which gathers selected keys (top-k
gather) as the bytes that they are into a ring of whole tiles.

A key comes whole, by one bulk copy, which costs the warp that asks for it 30 clocks: four warps have 16 keys of a tile
each. Where there is no key the warp writes zeros, whose scale is zero, too, and the key's bit of the valid
mask is 0.

Layouts, d = 576: 512 e4m3 | 4 fp32 scales, of 128 each | 64 bf16, 656 bytes a key. d = 512: of a page P x (448 e4m3 |
64 bf16), then P x 8 bytes: 7 ue8m0 scales, of 64 each, which lie behind the tile's keys here, too. Keys are `pitch`
bytes apart, an odd multiple of 16 whose double is 8 banks and whose fourfold is 16: what is read together, channels of
two keys apart or of four, lies in different banks.
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
from dsa.kernels.mla.tile_scheduler import WorkTileInfo
from dsa.kernels.mla.topk_gather import WARP_KEYS, Selection, TopkGather

V32_BYTES, V4_ROW = FP8_KV_BYTES[HEAD_DIM], 576  # of d = 512 without its scales


@dataclass(frozen=True)
class Fp8KvPipeline:
    """kv          the ring of tiles
    valid_mask  [4, stages]: 16 bits for as many keys of the tile: which exist
    work        the work tiles
    """

    kv: Pipeline
    valid_mask: cute.Tensor
    work: WorkTilePipeline

    def start(self) -> PipelineState:
        """Before the first tile."""
        return start()


class Fp8TopkGather(TopkGather):
    """Keys of `head_dim` channels, 576 or 512, in a ring of `stages` tiles; queries of `head_tile` heads; the score
    warpgroups take the tiles in turns, the two output warpgroups all of them."""

    def __init__(self, head_dim: int, head_tile: int, stages: int, score_warpgroups: int):
        super().__init__(BFloat16, head_dim, stages, stages)
        self.head_tile, self.stages, self.score_warpgroups = head_tile, stages, score_warpgroups
        # A query's rows come before its keys, through the same stages.
        self.q_rows = min(head_tile, TILE_N // 2)  # of a stage
        self.q_stages = head_tile // self.q_rows
        self.q_pitch = 2 * head_dim + 16  # so that what is read together of two rows lies in different banks
        self.row_bytes, self.pitch = (V32_BYTES, V32_BYTES) if self.has_rope else (V4_ROW, V4_ROW + 16)
        # Behind the keys of a stage.
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
        """Make the barriers: four warps fill a stage of keys and twelve read it; `consumers` warps read work tiles. One
        thread's work."""
        pipeline.kv.init(consumers=12, producers=4)
        pipeline.work.init(consumers)

    @cute.jit
    def address_of(self, selection: Selection, page, offset):
        if const_expr(self.has_rope):
            return selection.cache[page, offset, None].iterator.toint()
        return selection.cache[page, 0, None].iterator.toint() + Int64(offset) * V4_ROW

    @cute.jit
    def scales_of(self, selection: Selection, page, offset):
        """Where a key's scales begin, if they are not behind its numbers."""
        if const_expr(self.has_rope):
            return selection.cache.iterator.toint()
        start = selection.cache[page, 0, None].iterator.toint()
        return start + Int64(selection.cache.shape[1]) * V4_ROW + Int64(offset) * 8

    @cute.jit
    def prefetch_q(self, q, query, first_row, warp, lane):
        """The next query's rows will be in the L2 cache when its turn comes."""
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
        """The query's rows and then the work tile's keys go to the stages at `raw`. Rows that are none are left out.
        -> the state behind them."""
        query, first = info.batch_idx, info.first_tile
        own = warp * WARP_KEYS + lane % WARP_KEYS
        index = self.index_of(lists, counts, ends, query, first, own)
        # Of a CTA's first query, whose stages are all empty, no key is asked for twice; of a later one that begins
        # where the ring does, its first keys are not asked for before their stage is empty.
        begun = state.stage + state.phase > 0
        for i in cutlass.range_constexpr(self.q_stages):
            pipeline.kv.producer_wait(state)
            self.load_rows(q, query, first_row + i * self.q_rows, raw, pipeline.kv, state, warp, lane)
            state = pipeline.kv.advance(state)
        # The first keys' stage is a tile's until its values have been added: they come to the L2 cache meanwhile.
        if begun:
            source, _, valid = self.locate(lists, ends, first, index)
            if valid and lane < WARP_KEYS:
                prefetch_to_l2(source, Int32(self.row_bytes))
        for tile in cutlass.range(first, first + info.tiles, unroll=1):
            source, scales, valid = self.locate(lists, ends, tile, index)
            # The next tile's indices are on their way while these keys are asked for.
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
                keys = Int32(cute.arch.popc(mask))
                expect_bytes(pipeline.kv.producer_barrier(state), keys * self.row_bytes)
            cute.arch.sync_warp()
            if valid and lane < WARP_KEYS:
                full = pipeline.kv.producer_barrier(state)
                bulk_gather(target + own * self.pitch, source, Int32(self.row_bytes), full)
            state = pipeline.kv.advance(state)
        return state

    @cute.jit
    def load_rows(self, q, query, first_row, raw: Int32, pipeline: Pipeline, state: PipelineState, warp, lane):
        """A stage's rows of a query, from first_row on."""
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
        """Zeros where the warp's keys are to be that do not exist, of which `mask` says which."""
        zeros = [Uint32(0)] * 4
        for key in cutlass.range(WARP_KEYS, unroll=1):
            if (mask >> key) & 1 == 0:
                for i in cutlass.range_constexpr(2):
                    place = 16 * (lane + 32 * i)
                    if place < self.row_bytes:
                        store_16(target + key * self.pitch + place, zeros)
        # Bulk copies may write to the same place later.
        cute.arch.fence_proxy("async.shared", space="cta")
