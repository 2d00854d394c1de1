"""Tiles of a paged latent cache in shared memory: which of them a CTA works on, and the warp that loads them.

A tile is 64 keys of 576 channels: four units of 128 channels, which are the value, and 64 rope channels. Units and
rope parts have a ring each, of UNITS and ROPES slots, so that a tile of which only a part fits is loaded that far.

A piece is what a CTA does of one sequence: some consecutive tiles. The loading warp finds the pieces, from the plan or
from the CTA's number, and tells the others by a ring of FACTS slots.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64, Uint32, const_expr
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.pipeline import advance

TILE = 64  # keys
CHUNK = 64  # channels of a row of 128 bytes, which the swizzle works on
VALUE, LATENT = 512, 576
UNIT = 128
UNIT_CHUNKS, TILE_UNITS = UNIT // CHUNK, VALUE // UNIT
# The order in which a tile is loaded and scored: what is needed of the value first comes first.
UNIT_ORDER = (0, 2, 1, 3)
ROPE_AFTER = 2  # units
FACTS = 2
PRESENT = 4
NEVER = 2**30
MOST_TILES = 2**31 // TILE
SPLIT_TILES, MAX_SPLITS = 64, 32  # of splits that depend on nothing but the sequence's length
# What a slot of the facts holds.
SEQUENCE, FIRST_TILE, TILES, PART, LENGTH, SEEN = range(6)


def chunk_order(channels: int) -> list[int]:
    """The chunks of 64 channels in the order in which a key's units come, and its rope part if it has one."""
    order = [unit * UNIT_CHUNKS + c for unit in UNIT_ORDER for c in range(UNIT_CHUNKS)]
    if channels > VALUE:
        order.insert(ROPE_AFTER * UNIT_CHUNKS, VALUE // CHUNK)
    return order


@dataclass(frozen=True)
class LatentRings:
    """Barriers and what goes with them.

    unit_full  a barrier for each chunk of each slot
    unit_empty, rope_full, rope_empty, facts_full, facts_empty  a barrier for each slot
    named  a barrier for each slot of the facts, whose SEQUENCE is known: before the rest, if it can be
    present  [PRESENT, ROPES] which keys there are in the tile whose rope part is in the slot. Paged: a bit of the first
             number for each box; gathered: 16 bits of each number for as many keys
    facts    [8, FACTS] SEQUENCE (-1: no more), FIRST_TILE, TILES, PART (the partial result to write, -1: the piece is
             the whole sequence), LENGTH (keys that there are), SEEN (keys that the last query may see)
    """

    unit_full: cute.Pointer
    unit_empty: cute.Pointer
    rope_full: cute.Pointer
    rope_empty: cute.Pointer
    named: cute.Pointer
    facts_full: cute.Pointer
    facts_empty: cute.Pointer
    present: cute.Tensor
    facts: cute.Tensor


@dataclass(frozen=True)
class DecodeInputs:
    """What says which keys a CTA attends to; see the kernels for the shapes.

    page_boxes    boxes of a page
    capacity      keys that the block table has room for
    fixed_splits  0: the plan says which pieces there are. Else: CTA i has split i % fixed_splits of sequence
                  i // fixed_splits, whose number of splits depends on its length alone
    """

    lengths: cute.Tensor
    block_table: cute.Tensor
    plan: cute.Tensor
    num_splits: cute.Tensor
    page_boxes: cute.FastDivmodDivisorV2
    capacity: Int32
    fixed_splits: Int32


class LatentMemory:
    """The rings in shared memory of a CTA: `units` slots for units, `ropes` for rope parts. `cluster` CTAs load into
    each other's."""

    def __init__(self, dtype: type[cutlass.Numeric], units: int, ropes: int, cluster: int = 1):
        self.dtype, self.units, self.ropes, self.cluster = dtype, units, ropes, cluster

    def unit_layout(self) -> cute.ComposedLayout:
        """[keys, channels, slot]"""
        return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (TILE, TILE, UNIT), self.dtype, self.units)

    def rope_layout(self) -> cute.ComposedLayout:
        return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (TILE, TILE, CHUNK), self.dtype, self.ropes)

    def storage(self) -> type:
        @cute.struct
        class RingStorage:
            unit_full: cute.struct.MemRange[Int64, self.units * UNIT_CHUNKS]
            unit_empty: cute.struct.MemRange[Int64, self.units]
            rope_full: cute.struct.MemRange[Int64, self.ropes]
            rope_empty: cute.struct.MemRange[Int64, self.ropes]
            named: cute.struct.MemRange[Int64, FACTS]
            facts_full: cute.struct.MemRange[Int64, FACTS]
            facts_empty: cute.struct.MemRange[Int64, FACTS]
            present: cute.struct.Align[cute.struct.MemRange[Uint32, PRESENT * self.ropes], 16]
            facts: cute.struct.MemRange[Int32, 8 * FACTS]

        return RingStorage

    def rings(self, storage) -> LatentRings:
        return LatentRings(
            storage.unit_full.data_ptr(),
            storage.unit_empty.data_ptr(),
            storage.rope_full.data_ptr(),
            storage.rope_empty.data_ptr(),
            storage.named.data_ptr(),
            storage.facts_full.data_ptr(),
            storage.facts_empty.data_ptr(),
            storage.present.get_tensor(cute.make_layout((PRESENT, self.ropes))),
            storage.facts.get_tensor(cute.make_layout((8, FACTS))),
        )

    @cute.jit
    def init(
        self,
        rings: LatentRings,
        unit_writers: cutlass.Constexpr,
        rope_writers: cutlass.Constexpr,
        readers: cutlass.Constexpr = 12,
    ):
        """Barriers: of a slot, so many arrivals fill it; four warps of every CTA of the cluster empty it, and `readers`
        read facts. One thread's work."""
        for i in cutlass.range_constexpr(self.units * UNIT_CHUNKS):
            cute.arch.mbarrier_init(rings.unit_full + i, unit_writers)
        for i in cutlass.range_constexpr(self.units):
            cute.arch.mbarrier_init(rings.unit_empty + i, 4 * self.cluster)
        for i in cutlass.range_constexpr(self.ropes):
            cute.arch.mbarrier_init(rings.rope_full + i, rope_writers)
            cute.arch.mbarrier_init(rings.rope_empty + i, 4 * self.cluster)
        for i in cutlass.range_constexpr(FACTS):
            cute.arch.mbarrier_init(rings.named + i, 1)
            cute.arch.mbarrier_init(rings.facts_full + i, 1)
            cute.arch.mbarrier_init(rings.facts_empty + i, readers)

    @cute.jit
    def release(self, barrier: cute.Pointer):
        """This warp has read the slot: say so to all that load into it."""
        with cute.arch.elect_one():
            if const_expr(self.cluster > 1):
                for peer in cutlass.range_constexpr(self.cluster):
                    cute.arch.mbarrier_arrive(barrier, peer)
            else:
                cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def name(self, rings: LatentRings, sequence, at, phase):
        """Say which sequence the next piece is of: slot `at` of the facts. A warp's work."""
        cute.arch.mbarrier_wait(rings.facts_empty + at, phase ^ 1)
        with cute.arch.elect_one():
            rings.facts[SEQUENCE, at] = sequence
            cute.arch.mbarrier_arrive(rings.named + at)


class PagedTiles(LatentMemory):
    """Tiles of consecutive keys by TMA. `box` keys, 16, 32 or 64, lie in the same page; a cluster shares the loads."""

    def __init__(self, dtype: type[cutlass.Numeric], box: int, units: int, ropes: int, cluster: int = 1):
        super().__init__(dtype, units, ropes, cluster)
        self.box, self.boxes = box, TILE // box

    def box_layout(self, chunks: int) -> cute.ComposedLayout:
        """The same memory by boxes [box, CHUNK], those of a chunk of channels one after the other."""
        shape = (self.box, self.box, CHUNK)
        return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, self.dtype, chunks * self.boxes)

    def load_atom(self, cache: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
        """The TMA load of a box, and the cache [pages, P, h_k, 576] as it takes it, [P, 576, h_k, pages]."""
        keys = cute.make_tensor(cache.iterator, cute.select(cache.layout, mode=[1, 3, 2, 0]))
        load = cute.nvgpu.cpasync.CopyBulkTensorTileG2SOp()
        if const_expr(self.cluster > 1):
            load = cute.nvgpu.cpasync.CopyBulkTensorTileG2SMulticastOp()
        layout = cute.slice_(self.box_layout(1), (None, None, 0))
        info = cute.nvgpu.cpasync.make_tiled_tma_atom(load, keys, layout, (self.box, CHUNK))
        return info[0], info[1]

    @cute.jit
    def load(
        self, atom, mk, sboxes, rope_boxes, rings: LatentRings, inputs: DecodeInputs, part, kv_head, rank, lane, slots
    ):
        """The loading warp: all pieces of this CTA, and the end."""
        gk = cute.local_tile(mk, (self.box, CHUNK), (None, None, kv_head, None))
        one = cute.make_layout(1)
        source = cute.group_modes(gk, 0, 2)
        ths, thg = cute.nvgpu.cpasync.tma_partition(atom, 0, one, cute.group_modes(sboxes, 0, 2), source)
        trs, _ = cute.nvgpu.cpasync.tma_partition(atom, 0, one, cute.group_modes(rope_boxes, 0, 2), source)
        batch, pages = inputs.lengths.shape[0], mk.shape[3]
        state = (Int32(0), Int32(0), Int32(0), Int32(0), Int32(0), Int32(0))

        sequence, cut, index, last, end_cut = Int32(0), Int32(0), Int32(0), Int32(-1), Int32(NEVER)
        if inputs.fixed_splits > 0:
            sequence, index = part // inputs.fixed_splits, part % inputs.fixed_splits
            last = sequence
        else:
            sequence, cut, index = inputs.plan[part, 0], inputs.plan[part, 1], inputs.plan[part, 4]
            last, end_cut = inputs.plan[part, 2], inputs.plan[part, 3]
            # A plan of another batch, or no plan at all, must not lead outside the tensors.
            sequence, index = cutlass.max(sequence, 0), cutlass.max(index, 0)
            cut = cutlass.min(cutlass.max(cut, 0), MOST_TILES)
        last = cutlass.min(last, batch - 1)
        while sequence <= last:
            if inputs.fixed_splits == 0:
                self.name(rings, sequence, state[4], state[5])
            # The first page numbers are asked for together with the length, where the piece probably begins.
            guess = cut + index * SPLIT_TILES if inputs.fixed_splits > 0 else cut
            page, place = self.find_box(inputs, sequence, guess * self.boxes + lane)
            seen = inputs.lengths[sequence]
            length = cutlass.max(cutlass.min(seen, inputs.capacity), 0)
            # An empty sequence has a tile, without keys: so every piece that is a whole sequence has one.
            tiles = cutlass.max((length + TILE - 1) // TILE, 1)
            first, end, slot, empty = Int32(0), tiles, Int32(-1), False
            if inputs.fixed_splits > 0:
                each = cutlass.max(SPLIT_TILES, (tiles + MAX_SPLITS - 1) // MAX_SPLITS)
                first, end = index * each, cutlass.min((index + 1) * each, tiles)
                if tiles > each:
                    slot = part
                empty = index > 0 and first >= tiles
            else:
                first = cutlass.min(cut, tiles)
                if sequence == last:
                    end = cutlass.max(cutlass.min(end_cut, tiles), first)
                if cut > 0 or (sequence == last and end_cut < NEVER):
                    slot = cutlass.max(cutlass.min(inputs.num_splits[sequence] + index, slots - 1), 0)
            if not empty:
                if inputs.fixed_splits > 0:
                    self.name(rings, sequence, state[4], state[5])
                if first != guess:
                    page, place = self.find_box(inputs, sequence, first * self.boxes + lane)
                state = self.load_piece(
                    *(atom, thg, ths, trs, rings, inputs, sequence, first, end - first, slot, length, seen),
                    *(page, place, pages, rank, lane, state),
                )
            sequence, cut, index = sequence + 1, Int32(0), Int32(0)
        self.name(rings, Int32(-1), state[4], state[5])
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(rings.facts_full + state[4])

    @cute.jit
    def find_box(self, inputs: DecodeInputs, sequence, box):
        """(page, box in the page) of a box of keys; -1 if the block table does not have it."""
        number, place = divmod(box, inputs.page_boxes)
        page = Int32(-1)
        if number < inputs.block_table.shape[1]:
            page = inputs.block_table[sequence, number]
        return page, place

    @cute.jit
    def load_piece(
        self,
        atom,
        thg,
        ths,
        trs,
        rings: LatentRings,
        inputs: DecodeInputs,
        sequence,
        first,
        tiles,
        slot,
        length,
        seen,
        page,
        place,
        pages,
        rank,
        lane,
        state,
    ):
        unit, unit_phase, rope, rope_phase, at, facts_phase = state
        with cute.arch.elect_one():
            rings.facts[FIRST_TILE, at], rings.facts[TILES, at], rings.facts[PART, at] = first, tiles, slot
            rings.facts[LENGTH, at], rings.facts[SEEN, at] = length, seen
            cute.arch.mbarrier_arrive(rings.facts_full + at)
        at, facts_phase = advance(at, facts_phase, FACTS)

        next_box = Int32(0)
        for tile in cutlass.range(tiles, unroll=1):
            if next_box == 32:
                next_box = Int32(0)
                page, place = self.find_box(inputs, sequence, (first + tile) * self.boxes + lane)
            boxes, bits = [], Uint32(0)
            for i in cutlass.range_constexpr(self.boxes):
                number = cute.arch.shuffle_sync(page, next_box + i)
                if number < 0 or number >= pages or (first + tile) * TILE + i * self.box >= length:
                    number = Int32(pages)  # TMA reads nothing there and writes zeros
                else:
                    bits |= 1 << i
                boxes.append((number, cute.arch.shuffle_sync(place, next_box + i)))
            next_box += self.boxes
            for n, number in enumerate(UNIT_ORDER):
                full = rings.unit_full + unit * UNIT_CHUNKS
                cute.arch.mbarrier_wait(rings.unit_empty + unit, unit_phase ^ 1)
                with cute.arch.elect_one():
                    for c in cutlass.range_constexpr(UNIT_CHUNKS):
                        cute.arch.mbarrier_arrive_and_expect_tx(full + c, TILE * CHUNK * 2)
                for c in cutlass.range_constexpr(UNIT_CHUNKS // self.cluster):
                    # With a cluster, the CTAs load the chunks in turns, each for all.
                    chunk = c
                    if const_expr(self.cluster > 1):
                        chunk = c * self.cluster + rank
                    for i in cutlass.range_constexpr(self.boxes):
                        self.copy_box(
                            atom,
                            thg[None, boxes[i][1], number * UNIT_CHUNKS + chunk, boxes[i][0]],
                            ths[None, (unit * UNIT_CHUNKS + chunk) * self.boxes + i],
                            full + chunk,
                        )
                unit, unit_phase = advance(unit, unit_phase, self.units)
                if const_expr(n == ROPE_AFTER - 1):
                    full = rings.rope_full + rope
                    cute.arch.mbarrier_wait(rings.rope_empty + rope, rope_phase ^ 1)
                    with cute.arch.elect_one():
                        rings.present[0, rope] = bits
                        cute.arch.mbarrier_arrive_and_expect_tx(full, TILE * CHUNK * 2)
                    loads = True
                    if const_expr(self.cluster > 1):
                        loads = tile % self.cluster == rank
                    if loads:
                        for i in cutlass.range_constexpr(self.boxes):
                            self.copy_box(
                                atom,
                                thg[None, boxes[i][1], VALUE // CHUNK, boxes[i][0]],
                                trs[None, rope * self.boxes + i],
                                full,
                            )
                    rope, rope_phase = advance(rope, rope_phase, self.ropes)
        return unit, unit_phase, rope, rope_phase, at, facts_phase

    @cute.jit
    def copy_box(self, atom, source, target, barrier):
        if const_expr(self.cluster > 1):
            cute.copy(atom, source, target, tma_bar_ptr=barrier, mcast_mask=Int16(2**self.cluster - 1))
        else:
            cute.copy(atom, source, target, tma_bar_ptr=barrier)


@cute.jit
def zero_rows(units: cute.Pointer, first, count: cutlass.Constexpr, valid, thread):
    """Clear the rows [valid, 64) of a tile's value, in the slots from `first` on of `count`. 128 threads' work.

    Values of keys that are not the sequence's would be multiplied by zero, and may be NaN.
    """
    zeros = cute.make_rmem_tensor((8,), units.dtype)
    zeros.fill(0.0)
    rows = cute.make_tensor(
        units, cute.make_layout((CHUNK, TILE, UNIT_CHUNKS, count), stride=(1, CHUNK, TILE * CHUNK, TILE * UNIT))
    )
    for row in cutlass.range(valid + thread // 8, TILE, 16, unroll=1):
        for n in cutlass.range_constexpr(TILE_UNITS):
            slot = first + n - count if first + n >= count else first + n
            for chunk in cutlass.range_constexpr(UNIT_CHUNKS):
                target = rows[None, row, chunk, slot]
                cute.autovec_copy(zeros, cute.local_tile(target, (8,), (thread % 8,)))
