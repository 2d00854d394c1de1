"""Q tiles: 128 consecutive queries of a sequence, the unit of work of the kernels that train the indexer.

`q_tiles` is int32 [S, 8], one row per q tile: first_q, rows, first_k, keys, seen, step, key_tiles, sequence. The q
tile's sequence begins at key first_k, and row i sees its keys j < clamp(seen + step * i, 0, keys). The scores of a q
tile are stored as key_tiles tiles of 128 keys. A q tile with rows = 0 is unused.

The gradient kernels split a q tile's flat (query, head) columns into blocks of 64, and a score tile's keys into two
blocks of 64.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32

from dsa.cute.fake_tensors import fake
from dsa.cute.sm90 import WARPGROUP
from dsa.kernels.training.limits import K_TILE, Q_TILE, Q_TILE_FIELDS

COLUMN_BLOCK = 64  # (query, head) columns
KEY_BLOCK = 64  # keys
BIT_BYTES = 4 * WARPGROUP  # of active bits per (key block, column block)


class QTile(NamedTuple):
    """A row of `q_tiles`."""

    first_q: Int32
    rows: Int32
    first_k: Int32
    keys: Int32
    seen: Int32
    step: Int32
    key_tiles: Int32
    sequence: Int32

    @staticmethod
    def unused() -> "QTile":
        """A q tile without rows, in no sequence."""
        return QTile(*[Int32(0)] * (Q_TILE_FIELDS - 1), Int32(-1))

    @cute.jit
    def visible(self, row):
        """Number of keys that a row sees in the q tile's key tiles. It is too low if the sequence is longer than the
        caller's maximum, which limits key_tiles."""
        there = cutlass.min(self.keys, self.key_tiles * K_TILE)
        return cutlass.max(cutlass.min(self.seen + self.step * row, there), 0)

    @cute.jit
    def visible_to(self, row, count):
        """Number of keys that the last valid one of the rows `row` to `row` + count - 1 sees; 0 if none is valid."""
        last = cutlass.min(row + count, self.rows) - 1
        result = Int32(0)
        if last >= row:
            result = self.visible(last)
        return result


ROWS, SEQUENCE = QTile._fields.index("rows"), QTile._fields.index("sequence")


@cute.jit
def load_q_tile(q_tiles: cute.Tensor, index: Int32) -> QTile:
    words = cute.make_rmem_tensor((Q_TILE_FIELDS,), Int32)
    cute.autovec_copy(q_tiles[index, None], words)
    return QTile(*[words[i] for i in range(Q_TILE_FIELDS)])


@cute.jit
def store_q_tile(q_tiles: cute.Tensor, index: Int32, q_tile: QTile):
    for i in cutlass.range_constexpr(Q_TILE_FIELDS):
        q_tiles[index, i] = q_tile[i]


@cute.jit
def gradients_of(di: cute.Tensor, q_tile, key_tile, row):
    """Pointer to dI of row `row` of a tile. Rows 0 to 63 are contiguous, and so are rows 64 to 127."""
    return di[q_tile, key_tile, row >> 6, row & 63, None].iterator


def fake_q_tiles(count=None) -> cute.Tensor:
    """int32 [S, 8]. count: the symbol of S, if other tensors share it."""
    count = cute.sym_int() if count is None else count
    return fake(Int32, (count, Q_TILE_FIELDS), (Q_TILE_FIELDS, 1))


def fake_tiles(dtype: type[cutlass.Numeric], *of_a_tile: int) -> cute.Tensor:
    """[S, N, *of_a_tile], one entry per q tile and 128 keys. Contiguous except for S: a view may have fewer tiles per q
    tile."""
    inner = [1]
    for extent in of_a_tile[::-1]:
        inner.insert(0, inner[0] * extent)
    shape = cute.sym_int(), cute.sym_int(), *of_a_tile
    return fake(dtype, shape, (cute.sym_int64(divisibility=inner[0]), *inner))


def fake_scores() -> cute.Tensor:
    """fp32 [S, N, 128, 128]"""
    return fake_tiles(Float32, Q_TILE, K_TILE)


def fake_gradients() -> cute.Tensor:
    """dI, bf16 [S, N, 2, 64, 128]. It overwrites the scores: each 64 rows begin where the scores of these rows
    began."""
    half = Q_TILE * K_TILE
    shape = cute.sym_int(), cute.sym_int(), 2, Q_TILE // 2, K_TILE
    return fake(BFloat16, shape, (cute.sym_int64(divisibility=2 * half), 2 * half, half, K_TILE, 1))


def fake_active(heads: int) -> cute.Tensor:
    """Active bits (active_bits.py), uint32 [S, 2 H, 2 N, 128], one word per thread of a warpgroup."""
    shape = cute.sym_int(), Q_TILE * heads // COLUMN_BLOCK, cute.sym_int(), WARPGROUP
    outer = [cute.sym_int64(divisibility=WARPGROUP) for _ in range(2)]
    return fake(Uint32, shape, (*outer, WARPGROUP, 1))
