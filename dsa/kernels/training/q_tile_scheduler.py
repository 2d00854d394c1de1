"""The dynamic persistent scheduler of the indexer's kernels that go by queries: a work tile is some neighbouring
queries of a q tile, with all keys that one of them sees.

CTAs draw work tiles from a tile counter (dsa.cute.tile_counter). Later queries come first: in a causal batch they see
the most keys, so that short work tiles come last and all CTAs end together. A CTA's producer warp draws, and passes the
WorkTileInfo to the consumers by a WorkTilePipeline.
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
    """q_tile: its number, -1 behind the last work tile; row: the work tile's first, of the q tile; first_q, rows: the
    q tile's; visible: how many keys the work tile's last query sees."""

    q_tile: Int32
    row: Int32
    first_q: Int32
    rows: Int32
    visible: Int32


class QTileScheduler:
    """Of work tiles of `queries` queries, a divisor of 128."""

    def __init__(self, queries: int):
        self.queries, self.work_tiles_a_q_tile = queries, Q_TILE // queries

    @cute.jit
    def advance(self, work_tiles: WorkTilePipeline, tile_counter, q_tiles, state: PipelineState, lane):
        """Draw the next work tile that has rows, and pass it on to the consumers. The producer warp's work.
        -> (the q tile's number, -1 if there is no work tile left; the q tile; the first row; the next state)."""
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
