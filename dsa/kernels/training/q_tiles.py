"""Q tiles: 128 consecutive queries of a sequence (fewer at the sequence's end), the unit of work of the kernels that
train the indexer.

`q_tiles` is int32 [S, 8], one row per q tile: first_q, rows, first_k, keys, seen, step, key_tiles, sequence. The q tile
is `rows` queries from query first_q on. Its sequence has `keys` keys from key first_k on, and row i of the q tile sees
the first clamp(seen + step * i, 0, keys) of them. step is 1 with a causal mask and 0 without one. The scores of a q
tile are stored as key_tiles tiles of 128 keys. A q tile with rows = 0 is unused.

The active bits and the gradient kernels divide a q tile's flat (query, head) columns into blocks of 64, and a score
tile's keys into two blocks of 64.

QTileScheduler is the dynamic persistent scheduler of indexer_scores_sm90.py and indexer_query_grad_sm90.py. A work tile
is a few adjacent queries of a q tile with all keys that at least one of these queries sees. CTAs take work tiles from a
tile counter (dsa.cute.tile_counter). Later queries come first: in a causal batch the last queries of a sequence see the
most keys, so most short work tiles come last and all CTAs end at about the same time. A CTA's producer warp takes the
work tile and passes a WorkTileInfo to the consumers through a WorkTilePipeline.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsa.cute.pipeline import PipelineState
from dsa.cute.sm90 import WARPGROUP
from dsa.cute.tile_counter import draw
from dsa.cute.work_tile import WorkTilePipeline
from dsa.kernels.training.limits import K_TILE, Q_TILE, Q_TILE_FIELDS

COLUMN_BLOCK = 64  # (query, head) columns per block
KEY_BLOCK = 64  # keys per block
BIT_BYTES = 4 * WARPGROUP  # bytes of active bits per (key block, column block)


class QTile(NamedTuple):
    """A row of `q_tiles`; see the docstring of this file."""

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
        return QTile(*[Int32(0)] * (Q_TILE_FIELDS - 1), Int32(-1))

    @cute.jit
    def visible(self, row):
        """Return the number of keys that a row sees in the q tile's key tiles. The caller's maximum length limits
        key_tiles. If the sequence is longer, the row can see more keys than these."""
        end = cutlass.min(self.keys, self.key_tiles * K_TILE)
        return cutlass.max(cutlass.min(self.seen + self.step * row, end), 0)

    @cute.jit
    def visible_to(self, row, count):
        """Return the number of keys that the q tile's last row in the range [row, row + count) sees; 0 if the q tile
        has no row in this range."""
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
    """Return the pointer to row `row` (0 to 127) of dI of one key tile. di: [S, N, 2, 64, 128], the dI of all (q tile,
    key tile). Rows 0 to 63 are contiguous in memory, and so are rows 64 to 127. There is a gap between the halves."""
    return di[q_tile, key_tile, row >> 6, row & 63, None].iterator


class WorkTileInfo(NamedTuple):
    """A work tile. q_tile: index of the q tile, or -1 if no work tile is left. row: the work tile's first row in the q
    tile. first_q, rows: fields of the q tile. visible: number of keys that the work tile's last query sees."""

    q_tile: Int32
    row: Int32
    first_q: Int32
    rows: Int32
    visible: Int32


class QTileScheduler:
    """The scheduler described above. queries: number of queries per work tile, a divisor of 128."""

    def __init__(self, queries: int):
        self.queries, self.work_tiles_a_q_tile = queries, Q_TILE // queries

    @cute.jit
    def advance(self, work_tiles: WorkTilePipeline, tile_counter, q_tiles, state: PipelineState, lane):
        """Take the next work tile that has rows, and pass it to the consumers. Called by the producer warp.
        -> (index of the q tile, or -1 if no work tile is left; the q tile; the work tile's first row in it; the next
        state). With -1 the q tile and the row mean nothing."""
        count = q_tiles.shape[0]
        number, row, found = Int32(-1), Int32(0), Int32(0)
        while found == 0:
            index = draw(tile_counter, lane)
            found = Int32(1)
            if index < count * self.work_tiles_a_q_tile:
                number = count - 1 - index // self.work_tiles_a_q_tile
                row = (self.work_tiles_a_q_tile - 1 - index % self.work_tiles_a_q_tile) * self.queries
                if row >= q_tiles[number, ROWS]:
                    found = Int32(0)
                    number = Int32(-1)
        q_tile = load_q_tile(q_tiles, cutlass.max(number, 0))
        visible = q_tile.visible_to(row, self.queries)
        state = work_tiles.publish(state, WorkTileInfo(number, row, q_tile.first_q, q_tile.rows, visible))
        return number, q_tile, row, state
