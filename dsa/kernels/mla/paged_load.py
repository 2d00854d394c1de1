"""The producer of dense MLA decoding: the warp that finds its CTA's work tiles and loads their keys by TMA.

A work tile is some consecutive tiles of one sequence. The warp finds them from the plan (mla_plan_sm90.py) or, in
batch-invariant decoding, from the CTA's number.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Uint32, const_expr
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.pipeline import start
from dsa.kernels.mla.limits import FIXED_SPLIT_TILES, MAX_FIXED_SPLITS, TILE_N
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
    LoadState,
)

TO_THE_END = 2**30  # the tile where a plan's part ends whose last sequence is not split there
MAX_TILES = 2**31 // TILE_N


@dataclass(frozen=True)
class DecodeInputs:
    """What says which keys a CTA attends to; see the kernels for the shapes.

    page_boxes    boxes of a page
    capacity      keys that the block table has room for
    fixed_splits  0: the plan says which work tiles there are. Else: CTA i has split i % fixed_splits of sequence
                  i // fixed_splits, whose number of splits depends on its length alone
    """

    lengths: cute.Tensor
    block_table: cute.Tensor
    plan: cute.Tensor
    num_splits: cute.Tensor
    page_boxes: cute.FastDivmodDivisorV2
    capacity: Int32
    fixed_splits: Int32


class PagedLoad(KvStages):
    """Tiles of consecutive keys by TMA. `box` keys, 16, 32 or 64, lie in the same page; a cluster shares the loads."""

    def __init__(self, dtype: type[cutlass.Numeric], box: int, v_stages: int, rope_stages: int, cluster: int = 1):
        super().__init__(dtype, v_stages, rope_stages, cluster)
        self.box, self.boxes = box, TILE_N // box

    def box_layout(self, k_chunks: int) -> cute.ComposedLayout:
        """The same memory by boxes [box, K_CHUNK], those of a k chunk one after the other."""
        shape = (self.box, self.box, K_CHUNK)
        return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, self.dtype, k_chunks * self.boxes)

    def load_atom(self, cache: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
        """The TMA load of a box, and the cache [pages, P, h_k, 576] as it takes it, [P, 576, h_k, pages]."""
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
        inputs: DecodeInputs,
        part,
        kv_head,
        rank,
        lane,
        splits,
    ):
        """The load warp: all work tiles of part number `part`, and the end."""
        gk = cute.local_tile(mk, (self.box, K_CHUNK), (None, None, kv_head, None))
        one = cute.make_layout(1)
        source = cute.group_modes(gk, 0, 2)
        tvs, tkg = cute.nvgpu.cpasync.tma_partition(atom, 0, one, cute.group_modes(v_boxes, 0, 2), source)
        trs, _ = cute.nvgpu.cpasync.tma_partition(atom, 0, one, cute.group_modes(rope_boxes, 0, 2), source)
        batch, pages = inputs.lengths.shape[0], mk.shape[3]
        state = LoadState(start(), start(), start())

        sequence, tile, split, last, end_tile = Int32(0), Int32(0), Int32(0), Int32(-1), Int32(TO_THE_END)
        if inputs.fixed_splits > 0:
            sequence, split = part // inputs.fixed_splits, part % inputs.fixed_splits
            last = sequence
        else:
            sequence, tile, split = inputs.plan[part, 0], inputs.plan[part, 1], inputs.plan[part, 4]
            last, end_tile = inputs.plan[part, 2], inputs.plan[part, 3]
            # A plan of another batch, or no plan at all, must not lead outside the tensors.
            sequence, split = cutlass.max(sequence, 0), cutlass.max(split, 0)
            tile = cutlass.min(cutlass.max(tile, 0), MAX_TILES)
        last = cutlass.min(last, batch - 1)
        while sequence <= last:
            if inputs.fixed_splits == 0:
                pipeline.work.announce(sequence, state.work)
            # The first page numbers are asked for together with the length, where the work tile probably begins.
            guess = tile + split * FIXED_SPLIT_TILES if inputs.fixed_splits > 0 else tile
            page, place = self.find_box(inputs, sequence, guess * self.boxes + lane)
            seen = inputs.lengths[sequence]
            length = cutlass.max(cutlass.min(seen, inputs.capacity), 0)
            # An empty sequence has a tile, without keys: so every work tile that is a whole sequence has one.
            tiles = cutlass.max((length + TILE_N - 1) // TILE_N, 1)
            first, end, split_idx, empty = Int32(0), tiles, Int32(-1), False
            if inputs.fixed_splits > 0:
                each = cutlass.max(FIXED_SPLIT_TILES, (tiles + MAX_FIXED_SPLITS - 1) // MAX_FIXED_SPLITS)
                first, end = split * each, cutlass.min((split + 1) * each, tiles)
                if tiles > each:
                    split_idx = part
                empty = split > 0 and first >= tiles
            else:
                first = cutlass.min(tile, tiles)
                if sequence == last:
                    end = cutlass.max(cutlass.min(end_tile, tiles), first)
                if tile > 0 or (sequence == last and end_tile < TO_THE_END):
                    split_idx = cutlass.max(cutlass.min(inputs.num_splits[sequence] + split, splits - 1), 0)
            if not empty:
                if inputs.fixed_splits > 0:
                    pipeline.work.announce(sequence, state.work)
                if first != guess:
                    page, place = self.find_box(inputs, sequence, first * self.boxes + lane)
                state = self.load_work_tile(
                    *(atom, tkg, tvs, trs, pipeline, inputs, sequence, first, end - first, split_idx, length, seen),
                    *(page, place, pages, rank, lane, state),
                )
            sequence, tile, split = sequence + 1, Int32(0), Int32(0)
        pipeline.work.publish_end(state.work)

    @cute.jit
    def find_box(self, inputs: DecodeInputs, sequence, box):
        """(page, box in the page) of a box of keys; -1 if the block table does not have it."""
        number, place = divmod(box, inputs.page_boxes)
        page = Int32(-1)
        if number < inputs.block_table.shape[1]:
            page = inputs.block_table[sequence, number]
        return page, place

    @cute.jit
    def load_work_tile(
        self,
        atom,
        tkg,
        tvs,
        trs,
        pipeline: KvPipeline,
        inputs: DecodeInputs,
        sequence,
        first,
        tiles,
        split_idx,
        length,
        seen,
        page,
        place,
        pages,
        rank,
        lane,
        state: LoadState,
    ) -> LoadState:
        """Publish the work tile and load its keys. page, place: of the lane's box, of the first 32."""
        pipeline.work.publish(state.work, first, tiles, split_idx, length, seen)
        work, kv = pipeline.work.pipeline.advance(state.work), KvState(state.v, state.rope)

        next_box = Int32(0)
        for tile in cutlass.range(tiles, unroll=1):
            if next_box == 32:
                next_box = Int32(0)
                page, place = self.find_box(inputs, sequence, (first + tile) * self.boxes + lane)
            boxes, mask = [], Uint32(0)
            for i in cutlass.range_constexpr(self.boxes):
                number = cute.arch.shuffle_sync(page, next_box + i)
                if number < 0 or number >= pages or (first + tile) * TILE_N + i * self.box >= length:
                    number = Int32(pages)  # TMA reads nothing there and writes zeros
                else:
                    mask |= 1 << i
                boxes.append((number, cute.arch.shuffle_sync(place, next_box + i)))
            next_box += self.boxes
            for n, v_chunk in enumerate(V_CHUNK_ORDER):
                full = pipeline.v_full(kv.v.stage, 0)
                pipeline.v.producer_wait(kv.v)
                with cute.arch.elect_one():
                    for c in cutlass.range_constexpr(K_PER_V):
                        cute.arch.mbarrier_arrive_and_expect_tx(full + c, TILE_N * K_CHUNK * 2)
                for c in cutlass.range_constexpr(K_PER_V // self.cluster):
                    # With a cluster, the CTAs load the k chunks in turns, each for all.
                    k_chunk = c
                    if const_expr(self.cluster > 1):
                        k_chunk = c * self.cluster + rank
                    for i in cutlass.range_constexpr(self.boxes):
                        self.copy_box(
                            atom,
                            tkg[None, boxes[i][1], v_chunk * K_PER_V + k_chunk, boxes[i][0]],
                            tvs[None, (kv.v.stage * K_PER_V + k_chunk) * self.boxes + i],
                            full + k_chunk,
                        )
                kv = self.advance_v(kv)
                if const_expr(n == ROPE_AFTER - 1):
                    full = pipeline.rope.producer_barrier(kv.rope)
                    pipeline.rope.producer_wait(kv.rope)
                    with cute.arch.elect_one():
                        pipeline.valid_mask[0, kv.rope.stage] = mask
                        cute.arch.mbarrier_arrive_and_expect_tx(full, TILE_N * K_CHUNK * 2)
                    loads = True
                    if const_expr(self.cluster > 1):
                        loads = tile % self.cluster == rank
                    if loads:
                        for i in cutlass.range_constexpr(self.boxes):
                            self.copy_box(
                                atom,
                                tkg[None, boxes[i][1], ROPE_CHUNK, boxes[i][0]],
                                trs[None, kv.rope.stage * self.boxes + i],
                                full,
                            )
                    kv = self.advance_rope(kv)
        return LoadState(kv.v, kv.rope, work)

    @cute.jit
    def copy_box(self, atom, source, target, barrier):
        if const_expr(self.cluster > 1):
            cute.copy(atom, source, target, tma_bar_ptr=barrier, mcast_mask=Int16(2**self.cluster - 1))
        else:
            cute.copy(atom, source, target, tma_bar_ptr=barrier)


@cute.jit
def zero_rows(v: cute.Pointer, first, stages: cutlass.Constexpr, valid, thread):
    """Clear the rows [valid, TILE_N) of a tile's value, in the stages from `first` on of `stages`. 128 threads' work.

    Values of keys that are not the sequence's would be multiplied by zero, and may be NaN.
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
                target = rows[None, row, k_chunk, stage]
                cute.autovec_copy(zeros, cute.local_tile(target, (8,), (thread % 8,)))
