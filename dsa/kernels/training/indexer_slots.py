"""Slots: tiles of 128 consecutive queries of a sequence, as the indexer's training kernels take them.

`slots` int32 [S, 8], a row a slot: first_q, rows, first_k, keys, seen, step, key_tiles, sequence. Row i of a slot sees
the keys j < clamp(seen + step * i, 0, keys) of its sequence, which begins at key first_k. A slot visits key_tiles tiles
of 128 keys. One with rows 0 is unused.

The gradients' kernels look at index heads in groups: 64 neighbours of a slot's flat (query, head) columns.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32

SLOT_ROWS = 128
SLOT_FIELDS = 8
GROUP = 64  # (query, head) columns
BLOCK = 64  # keys


@dataclass(frozen=True)
class Slot:
    first_q: Int32
    rows: Int32
    first_k: Int32
    keys: Int32
    seen: Int32
    step: Int32
    key_tiles: Int32
    sequence: Int32

    @cute.jit
    def visible(self, row):
        """How many keys row `row` sees in the tiles that its slot visits: too few if the sequence is too long."""
        there = cutlass.min(self.keys, self.key_tiles * SLOT_ROWS)
        return cutlass.max(cutlass.min(self.seen + self.step * row, there), 0)

    @cute.jit
    def seen_by(self, row, count):
        """How many keys the rows `row` to `row` + count - 1 see, those of them that there are."""
        last = cutlass.min(row + count, self.rows) - 1
        result = Int32(0)
        if last >= row:
            result = self.visible(last)
        return result


@cute.jit
def load_slot(slots: cute.Tensor, index: Int32) -> Slot:
    words = cute.make_rmem_tensor((SLOT_FIELDS,), Int32)
    cute.autovec_copy(slots[index, None], words)
    return Slot(*[words[i] for i in range(SLOT_FIELDS)])


def fake_slots() -> cute.Tensor:
    return cute.runtime.make_fake_tensor(Int32, (cute.sym_int(), SLOT_FIELDS), (SLOT_FIELDS, 1), assumed_align=16)


def fake_gradients() -> cute.Tensor:
    """dI of tiles, bf16 [S, N, 2, 64, 128], each 64 rows where the scores of these rows were."""
    half = SLOT_ROWS * SLOT_ROWS
    shape = cute.sym_int(), cute.sym_int(), 2, SLOT_ROWS // 2, SLOT_ROWS
    stride = cute.sym_int64(divisibility=2 * half), 2 * half, half, SLOT_ROWS, 1
    return cute.runtime.make_fake_tensor(BFloat16, shape, stride, assumed_align=16)


@cute.jit
def gradients_of(di: cute.Tensor, slot, tile, row):
    """Where dI of a tile's rows from `row` on begins. Rows follow on one another up to the 64th, and from it on."""
    return di[slot, tile, row >> 6, row & 63, None].iterator


def fake_tiles(dtype: type[cutlass.Numeric], *of_a_tile: int) -> cute.Tensor:
    """[S, N, *of_a_tile], a tile of each slot and 128 keys: contiguous but for the slots, whose tiles may be fewer."""
    strides = [1]
    for extent in of_a_tile[::-1]:
        strides.insert(0, strides[0] * extent)
    shape = cute.sym_int(), cute.sym_int(), *of_a_tile
    stride = cute.sym_int64(divisibility=strides[0]), *strides
    return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=16)
