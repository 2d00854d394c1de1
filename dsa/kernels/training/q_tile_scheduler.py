"""The dynamic persistent scheduler of the indexer's query-major kernels. A work tile is a few neighbouring queries of a
q tile with all keys that at least one of them sees.

CTAs take work tiles from a tile counter (dsa.cute.tile_counter). Later queries come first: in a causal batch they see
the most keys, so the short work tiles come last and all CTAs end at about the same time. A CTA's producer warp takes
the work tile and passes its WorkTileInfo to the consumers through a WorkTilePipeline.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsa.cute.pipeline import PipelineState
from dsa.cute.tile_counter import draw
from dsa.cute.work_tile import WorkTilePipeline
from dsa.kernels.training.limits import Q_TILE
from dsa.kernels.training.q_tiles import ROWS, load_q_tile


class WorkTileInfo(NamedTuple):
    """q_tile: index of the q tile, or -1 if no work tile is left. row: the work tile's first row in the q tile.
    first_q, rows: fields of the q tile. visible: number of keys that the work tile's last query sees."""

    q_tile: Int32
    row: Int32
    first_q: Int32
    rows: Int32
    visible: Int32


class QTileScheduler:
    """queries: per work tile, a divisor of 128."""

    def __init__(self, queries: int):
        self.queries, self.work_tiles_a_q_tile = queries, Q_TILE // queries

    @cute.jit
    def advance(self, work_tiles: WorkTilePipeline, tile_counter, q_tiles, state: PipelineState, lane):
        """Take the next work tile that has rows, and pass it to the consumers. Called by the producer warp.
        -> (index of the q tile, -1 if no work tile is left; the q tile; the first row; the next state)."""
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
        info = WorkTileInfo(number, row, q_tile.first_q, q_tile.rows, q_tile.visible_to(row, self.queries))
        return number, q_tile, row, work_tiles.publish(state, info)
