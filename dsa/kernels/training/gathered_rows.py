"""Rows of global memory, wherever they lie, to tiles of 64 in shared memory as wgmma reads them: 16 bytes a lane.

A tile is chunks of 64 channels, [64 rows, 128 bytes] each, with the swizzle of 128 bytes. A warpgroup gathers: a warp
16 rows, of which a lane has four, number 4 i + lane / 8, and of each 16 bytes of every chunk.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.copies import gather_16

TILE = 64
CHUNK = 64
CHUNK_BYTES = TILE * CHUNK * 2
WARP_ROWS = TILE // 4
LANE_ROWS = WARP_ROWS // 4


def chunk_layout(dtype: type[cutlass.Numeric], slots: int) -> cute.ComposedLayout:
    """[rows, channels, slot]"""
    return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (TILE, TILE, CHUNK), dtype, slots)


@cute.jit
def own_rows(warp, lane):
    """The rows of a tile that a lane has a part of."""
    return [warp * WARP_ROWS + 4 * i + (lane >> 3) for i in range(LANE_ROWS)]


@cute.jit
def selected(indices: cute.Tensor, first, rows, keys):
    """What the lane's rows select, indices[first + row]; -1 where that is no key."""
    found = []
    for row in rows:
        index = Int32(-1)
        if first + row < indices.shape[0]:
            index = indices[first + row]
        if index >= keys:
            index = Int32(-1)
        found.append(index)
    return found


@cute.jit
def row_addresses(start: Int64, stride: Int64, rows, lane):
    """Where the lane's parts of rows begin, and whether there are such rows: those below 0 are none."""
    sources = [start + cutlass.max(row, 0) * stride + (lane & 7) * 16 for row in rows]
    return sources, [row >= 0 for row in rows]


@cute.jit
def gather_chunk(target: Int32, sources, keep, chunk: cutlass.Constexpr, warp, lane):
    """The lane's part of a chunk, to the memory at `target`; zeros where there is no row."""
    start = target + 2 * CHUNK * (warp * WARP_ROWS + (lane >> 3))
    for i in cutlass.range_constexpr(LANE_ROWS):
        row = 4 * (i % 2) + (lane >> 3)  # of 8
        gather_16(start + 2 * (4 * i * CHUNK + ((lane & 7) ^ row) * 8), sources[i] + 2 * CHUNK * chunk, keep[i])
