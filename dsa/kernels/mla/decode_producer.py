"""The producer of dense MLA decoding: one warp that computes its CTA's work tiles and loads their keys by TMA.

A CTA computes one part of the work, for one row tile and one KV head. A sequence has s_q * h_q / h_k rows (query tokens
x query heads) per KV head; a row tile is TILE_M of these rows. With a plan (mla_plan_sm90.py) a part is a range of
sequences. The range can begin or end inside a sequence. Such a sequence is split: other parts compute the rest of the
sequence. In batch-invariant decoding there are no plans: a part is one split of one sequence, and the length of a
sequence's splits depends only on the sequence's length.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64, Uint32, const_expr
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.pipeline import Mbarriers, PipelineState, arrive, expect_bytes, start
from dsa.cute.work_tile import INFO_STAGES, WorkTilePipeline, work_tile_storage
from dsa.kernels.mla.limits import FIXED_SPLIT_TILES, MAX_FIXED_SPLITS, TILE_N
from dsa.kernels.mla.mla_roles import WorkTileInfo
from dsa.kernels.mla.mla_tiles import (
    K_CHUNK,
    K_PER_V,
    ROPE_AFTER,
    ROPE_CHUNK,
    V_CHUNK,
    V_CHUNK_ORDER,
    V_CHUNKS,
    KvPipeline,
    KvStages,
    KvState,
)

TO_THE_END = 2**30  # END_TILE of a part that runs to the end of the part's last sequence
MAX_TILES = 2**31 // TILE_N


class PlanColumn(IntEnum):
    """Columns of a plan, int32 [parts, 8]. The last two columns are 0.

    Row i describes part i. It begins at tile FIRST_TILE of sequence FIRST_SEQUENCE and ends before tile END_TILE of
    sequence LAST_SEQUENCE. It is empty if LAST_SEQUENCE < FIRST_SEQUENCE. Column SPLIT_SEQUENCE does not describe
    parts: it lists the split sequences for the combine kernel, then -1.
    """

    FIRST_SEQUENCE = 0
    FIRST_TILE = 1
    LAST_SEQUENCE = 2
    END_TILE = 3
    FIRST_SPLIT = 4  # index of this part's split among the splits of FIRST_SEQUENCE; 0 if that sequence is not split
    SPLIT_SEQUENCE = 5


class DecodeState(NamedTuple):
    """Position in a part: the next work tile, and the end of the part.

    sequence  sequence of the next work tile
    tile      first tile of the next work tile in `sequence`
    split     index of the next work tile among the splits of `sequence`; 0 if the sequence is not split
    last      last sequence of the part
    end_tile  in sequence `last`, the part ends before this tile
    """

    sequence: Int32
    tile: Int32
    split: Int32
    last: Int32
    end_tile: Int32


@dataclass(frozen=True)
class DecodeScheduler:
    """Computes the work tiles of a part (see the docstring of this file).

    lengths       [B] int32: number of keys per sequence
    plan          [parts, 8] int32, see PlanColumn; not read if fixed_splits > 0
    num_splits    [B + 1] int32: entry b is the number of partial results of sequences 0 to b - 1; not read if
                  fixed_splits > 0
    capacity      number of keys for which a row of the block table has pages; further keys are ignored
    fixed_splits  0: work tiles come from the plan. Otherwise (batch-invariant decoding) part i is split
                  i % fixed_splits of sequence i // fixed_splits. A short sequence has fewer splits, so some parts
                  have no work tile
    """

    lengths: cute.Tensor
    plan: cute.Tensor
    num_splits: cute.Tensor
    capacity: Int32
    fixed_splits: Int32

    @cute.jit
    def first(self, part) -> DecodeState:
        sequence, tile, split, last, end_tile = Int32(0), Int32(0), Int32(0), Int32(-1), Int32(TO_THE_END)
        if self.fixed_splits > 0:
            sequence, split = part // self.fixed_splits, part % self.fixed_splits
            last = sequence
        else:
            sequence, tile = self.plan[part, PlanColumn.FIRST_SEQUENCE], self.plan[part, PlanColumn.FIRST_TILE]
            split = self.plan[part, PlanColumn.FIRST_SPLIT]
            last, end_tile = self.plan[part, PlanColumn.LAST_SEQUENCE], self.plan[part, PlanColumn.END_TILE]
            # A plan of another batch, or garbage, must not cause accesses outside the tensors.
            sequence, split = cutlass.max(sequence, 0), cutlass.max(split, 0)
            tile = cutlass.min(cutlass.max(tile, 0), MAX_TILES)
        return DecodeState(sequence, tile, split, cutlass.min(last, self.lengths.shape[0] - 1), end_tile)

    @cute.jit
    def work_tile(self, state: DecodeState, tiles, part, partials):
        """Return (first tile, end tile, split_idx, empty) of the next work tile.

        split_idx is the index of the partial result to write, or -1 if the work tile has all keys of the sequence.
        `empty` is True if fixed_splits > 0 and the sequence is too short to have this split. Then the caller must skip
        it.

        tiles     number of tiles of the sequence
        partials  number of partial results for which there is memory: split_idx stays below it even if num_splits is
                  wrong
        """
        first, end, split_idx, empty = Int32(0), tiles, Int32(-1), False
        if self.fixed_splits > 0:
            each = cutlass.max(FIXED_SPLIT_TILES, (tiles + MAX_FIXED_SPLITS - 1) // MAX_FIXED_SPLITS)
            first, end = state.split * each, cutlass.min((state.split + 1) * each, tiles)
            if tiles > each:
                split_idx = part
            empty = state.split > 0 and first >= tiles
        else:
            first = cutlass.min(state.tile, tiles)
            if state.sequence == state.last:
                end = cutlass.max(cutlass.min(state.end_tile, tiles), first)
            if state.tile > 0 or (state.sequence == state.last and state.end_tile < TO_THE_END):
                split = self.num_splits[state.sequence] + state.split
                split_idx = cutlass.max(cutlass.min(split, partials - 1), 0)
        return first, end, split_idx, empty


@dataclass(frozen=True)
class Pages:
    """The block table [B, max_pages], and the number of TMA boxes per page as a divisor."""

    block_table: cute.Tensor
    boxes: cute.FastDivmodDivisorV2

    @cute.jit
    def find(self, sequence, box):
        """Find TMA box number `box` of the sequence's keys. Return (page number, index of the box in this page).

        The page number is -1 if the block table does not cover the box.
        """
        number, place = divmod(box, self.boxes)
        page = Int32(-1)
        if number < self.block_table.shape[1]:
            page = self.block_table[sequence, number]
        return page, place


def announced_work_tile_storage() -> type:
    @cute.struct
    class AnnouncedWorkTileStorage:
        batch_known: cute.struct.MemRange[Int64, INFO_STAGES]
        work_tiles: work_tile_storage(WorkTileInfo)
        batch_idx: cute.struct.MemRange[Int32, INFO_STAGES]

    return AnnouncedWorkTileStorage


@dataclass(frozen=True)
class AnnouncedWorkTilePipeline(WorkTilePipeline):
    """A WorkTilePipeline whose producer announces batch_idx before it publishes the WorkTileInfo, so that the score
    warps can load Q early.

    batch_known  one mbarrier per stage, which completes when batch_idx is written
    batch_idx    [stages], in shared memory
    """

    batch_known: Mbarriers
    batch_idx: cute.Tensor

    @staticmethod
    def of(storage) -> "AnnouncedWorkTilePipeline":
        work_tiles = WorkTilePipeline.of(storage.work_tiles, WorkTileInfo)
        return AnnouncedWorkTilePipeline(
            *(work_tiles.pipeline, work_tiles.info, WorkTileInfo),
            Mbarriers(storage.batch_known.data_ptr(), INFO_STAGES),
            storage.batch_idx.get_tensor(cute.make_layout(INFO_STAGES)),
        )

    @cute.jit
    def init(self, consumers: cutlass.Constexpr):
        """Initialize the barriers; called by one thread. consumers: number of warps that read each work tile."""
        self.batch_known.init(1)
        self.pipeline.init(consumers)

    @cute.jit
    def announce(self, state: PipelineState, batch_idx):
        """Wait for an empty stage and publish the next work tile's batch_idx.

        Called by one warp, which then publishes the WorkTileInfo by `commit`.
        """
        self.pipeline.producer_wait(state)
        with cute.arch.elect_one():
            self.batch_idx[state.stage] = batch_idx
            arrive(self.batch_known.barrier(state.stage))

    @cute.jit
    def announced(self, state: PipelineState):
        self.batch_known.wait(state.phase, state.stage)
        return self.batch_idx[state.stage]


class PagedLoad(KvStages):
    """Load tiles of consecutive keys by TMA.

    box      keys per TMA box, 16, 32 or 64; it divides the page size, so a box lies in one page
    cluster  CTAs per cluster, 1 or 2; the CTAs of a cluster share the loads by multicast
    """

    def __init__(self, dtype: type[cutlass.Numeric], box: int, v_stages: int, rope_stages: int, cluster: int = 1):
        super().__init__(dtype, v_stages, rope_stages, cluster)
        self.box, self.boxes = box, TILE_N // box

    def work_tile_storage(self) -> type:
        return announced_work_tile_storage()

    def work_tile_pipeline(self, storage) -> AnnouncedWorkTilePipeline:
        return AnnouncedWorkTilePipeline.of(storage)

    def box_layout(self, k_chunks: int) -> cute.ComposedLayout:
        """Return the shared-memory layout [box, K_CHUNK, n] of n = k_chunks * TILE_N / box TMA boxes. The boxes of a k
        chunk are adjacent."""
        tile = self.box, self.box, K_CHUNK
        return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, self.dtype, k_chunks * self.boxes)

    def load_atom(self, cache: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
        """Return the TMA atom that loads a box, and the cache as a tensor [P, 576, h_k, pages] of TMA coordinates.
        cache: [pages, P, h_k, 576]."""
        keys = cute.make_tensor(cache.iterator, cute.select(cache.layout, mode=[1, 3, 2, 0]))
        load = cute.nvgpu.cpasync.CopyBulkTensorTileG2SOp()
        if const_expr(self.cluster > 1):
            load = cute.nvgpu.cpasync.CopyBulkTensorTileG2SMulticastOp()
        layout = cute.slice_(self.box_layout(1), (None, None, 0))
        info = cute.nvgpu.cpasync.make_tiled_tma_atom(load, keys, layout, (self.box, K_CHUNK))
        return info[0], info[1]

    @cute.jit
    def load(
        self,
        atom,
        mk,
        v_boxes,
        rope_boxes,
        pipeline: KvPipeline,
        scheduler: DecodeScheduler,
        pages: Pages,
        part,
        kv_head,
        rank,
        lane,
        partials,
    ):
        """Run the load warp over all work tiles of part `part`, then publish the end marker."""
        one = cute.make_layout(1)
        source = cute.group_modes(cute.local_tile(mk, (self.box, K_CHUNK), (None, None, kv_head, None)), 0, 2)
        tvs, tkg = cute.nvgpu.cpasync.tma_partition(atom, 0, one, cute.group_modes(v_boxes, 0, 2), source)
        trs, _ = cute.nvgpu.cpasync.tma_partition(atom, 0, one, cute.group_modes(rope_boxes, 0, 2), source)
        kv_state, work_state = pipeline.start(), start()
        work = scheduler.first(part)
        while work.sequence <= work.last:
            if scheduler.fixed_splits == 0:
                pipeline.work.announce(work_state, work.sequence)
            # Load the first page numbers at the same time as the sequence's length. Before the length is known, the
            # work tile's first tile can only be guessed. `first` below is the true first tile.
            guess = work.tile + work.split * FIXED_SPLIT_TILES if scheduler.fixed_splits > 0 else work.tile
            page, place = pages.find(work.sequence, guess * self.boxes + lane)
            seen = scheduler.lengths[work.sequence]
            length = cutlass.max(cutlass.min(seen, scheduler.capacity), 0)
            # An empty sequence gets one tile without keys, so that its work tile writes results.
            tiles = cutlass.max((length + TILE_N - 1) // TILE_N, 1)
            first, end, split_idx, empty = scheduler.work_tile(work, tiles, part, partials)
            if not empty:
                if scheduler.fixed_splits > 0:
                    pipeline.work.announce(work_state, work.sequence)
                if first != guess:
                    page, place = pages.find(work.sequence, first * self.boxes + lane)
                info = WorkTileInfo(work.sequence, first, end - first, split_idx, length, seen)
                work_state = pipeline.work.commit(work_state, info)
                kv_state = self.load_work_tile(
                    *(atom, tkg, tvs, trs, pipeline, pages, info, page, place, mk.shape[3], rank, lane, kv_state),
                )
            work = DecodeState(work.sequence + 1, Int32(0), Int32(0), work.last, work.end_tile)
        last = WorkTileInfo.last()
        pipeline.work.announce(work_state, last.batch_idx)
        pipeline.work.commit(work_state, last)

    @cute.jit
    def load_work_tile(
        self,
        atom,
        tkg,
        tvs,
        trs,
        pipeline: KvPipeline,
        pages: Pages,
        info: WorkTileInfo,
        page,
        place,
        num_pages,
        rank,
        lane,
        state: KvState,
    ) -> KvState:
        """Load the work tile's keys. Return the state after the work tile.

        page   page of the lane's box: lane i has box i of the work tile
        place  index of the box in the page

        After 32 boxes the lanes look up the next 32.
        """
        first, length = info.first_tile, info.length
        next_box = Int32(0)
        for tile in cutlass.range(info.tiles, unroll=1):
            if next_box == 32:
                next_box = Int32(0)
                page, place = pages.find(info.batch_idx, (first + tile) * self.boxes + lane)
            boxes, mask = [], Uint32(0)
            for i in cutlass.range_constexpr(self.boxes):
                number = cute.arch.shuffle_sync(page, next_box + i)
                if number < 0 or number >= num_pages or (first + tile) * TILE_N + i * self.box >= length:
                    number = Int32(num_pages)  # out of bounds, so TMA writes zeros
                else:
                    mask |= 1 << i
                boxes.append((number, cute.arch.shuffle_sync(place, next_box + i)))
            next_box += self.boxes
            for n, v_chunk in enumerate(V_CHUNK_ORDER):
                pipeline.v.producer_wait(state.v)
                with cute.arch.elect_one():
                    for c in cutlass.range_constexpr(K_PER_V):
                        expect_bytes(pipeline.v.producer_barrier(state.v, c), TILE_N * K_CHUNK * 2)
                for c in cutlass.range_constexpr(K_PER_V // self.cluster):
                    # In a cluster, CTA `rank` loads k chunk `rank` of every v chunk and multicasts this k chunk to
                    # both CTAs.
                    k_chunk = c
                    if const_expr(self.cluster > 1):
                        k_chunk = c * self.cluster + rank
                    for i in cutlass.range_constexpr(self.boxes):
                        self.copy_box(
                            atom,
                            tkg[None, boxes[i][1], v_chunk * K_PER_V + k_chunk, boxes[i][0]],
                            tvs[None, (state.v.stage * K_PER_V + k_chunk) * self.boxes + i],
                            pipeline.v.producer_barrier(state.v, k_chunk),
                        )
                state = pipeline.advance_v(state)
                if const_expr(n == ROPE_AFTER - 1):
                    pipeline.rope.producer_wait(state.rope)
                    with cute.arch.elect_one():
                        pipeline.valid_mask[0, state.rope.stage] = mask
                        expect_bytes(pipeline.rope.producer_barrier(state.rope), TILE_N * K_CHUNK * 2)
                    loads = True
                    if const_expr(self.cluster > 1):
                        loads = tile % self.cluster == rank
                    if loads:
                        for i in cutlass.range_constexpr(self.boxes):
                            self.copy_box(
                                atom,
                                tkg[None, boxes[i][1], ROPE_CHUNK, boxes[i][0]],
                                trs[None, state.rope.stage * self.boxes + i],
                                pipeline.rope.producer_barrier(state.rope),
                            )
                    state = pipeline.advance_rope(state)
        return state

    @cute.jit
    def copy_box(self, atom, source, target, barrier):
        multicast = {"mcast_mask": Int16(2**self.cluster - 1)} if self.cluster > 1 else {}
        cute.copy(atom, source, target, tma_bar_ptr=barrier, **multicast)


@cute.jit
def zero_rows(v: cute.Pointer, first, stages: cutlass.Constexpr, valid, thread):
    """Zero-fill rows [valid, TILE_N) of a tile's values in shared memory; called by 128 threads.

    first   the tile's first v stage
    stages  number of v stages in the ring

    The rows are keys past the end of the sequence. TMA loads whole boxes, so it can load such keys. Their P is 0, but
    their values can be NaN, and 0 * NaN is NaN.
    """
    zeros = cute.make_rmem_tensor((8,), v.dtype)
    zeros.fill(0.0)
    rows = cute.make_tensor(
        v,
        cute.make_layout((K_CHUNK, TILE_N, K_PER_V, stages), stride=(1, K_CHUNK, TILE_N * K_CHUNK, TILE_N * V_CHUNK)),
    )
    for row in cutlass.range(valid + thread // 8, TILE_N, 16, unroll=1):
        for n in cutlass.range_constexpr(V_CHUNKS):
            stage = first + n - stages if first + n >= stages else first + n
            for k_chunk in cutlass.range_constexpr(K_PER_V):
                cute.autovec_copy(zeros, cute.local_tile(rows[None, row, k_chunk, stage], (8,), (thread % 8,)))
