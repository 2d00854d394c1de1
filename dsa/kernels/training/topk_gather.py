"""Tiles of 64 rows in shared memory, as wgmma reads them, of rows of global memory wherever they lie; and the order in
which a CTA of the sparse stage takes queries and their tiles of keys.

A tile is chunks of 64 channels, [64 rows, 128 bytes] each, with the swizzle of 128 bytes. A producer warpgroup gathers,
16 bytes a lane: a warp 16 rows, of which a lane has four, number 4 i + lane / 8, and of each 16 bytes of every chunk.

cp.async writes through the generic proxy, and wgmma reads through the async proxy: PTX asks for a fence.proxy.async
between the two. Consumers execute the fence after they wait for a stage (`wait_for_wgmma`), so that the producer need
not wait for its own copies.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.copies import gather_16
from dsa.cute.pipeline import Pipeline, PipelineState
from dsa.cute.work_tile import StaticPersistentScheduler
from dsa.kernels.training.limits import SPARSE_KEY_TILE

TILE = SPARSE_KEY_TILE
CHUNK = 64
CHUNK_BYTES = TILE * CHUNK * 2
WARP_ROWS = TILE // 4
LANE_ROWS = WARP_ROWS // 4


@dataclass(frozen=True)
class QuerySchedule:
    """This CTA's queries, its work tiles, are first, first + step and so on below `queries`; key_tiles: of each."""

    first: Int32
    step: Int32
    queries: Int32
    key_tiles: Int32

    @staticmethod
    def of(scheduler: StaticPersistentScheduler, q: cute.Tensor, indices: cute.Tensor) -> "QuerySchedule":
        """Of q [T, H, d] and indices [T, K]."""
        return QuerySchedule(scheduler.first, scheduler.step, q.shape[0], (indices.shape[1] + TILE - 1) // TILE)


def chunk_layout(dtype: type[cutlass.Numeric], stages: int) -> cute.ComposedLayout:
    """[rows, channels, stage]"""
    return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (TILE, TILE, CHUNK), dtype, stages)


@cute.jit
def wait_for_wgmma(pipeline: Pipeline, state: PipelineState, part=0):
    """Wait until wgmma can read a part of a stage that cp.async has written. Every lane's work."""
    pipeline.consumer_wait(state, part)
    cute.arch.fence_proxy("async.shared", space="cta")


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
def head_rows(x: cute.Tensor, query, first: cutlass.Constexpr, rows, lane):
    """As `row_addresses`, of the heads `first` + rows of a query of x [T, H, d], 16-bit numbers."""
    heads = []
    for row in rows:
        head = first + row
        heads.append(head if head < x.shape[1] else Int32(-1))
    own = x[query, None, None]
    return row_addresses(Int64(own.iterator.toint()), 2 * Int64(own.stride[0]), heads, lane)


@cute.jit
def key_rows(x: cute.Tensor, indices, lane):
    """As `row_addresses`, of the rows `indices` of x [Tk, d], 16-bit numbers."""
    return row_addresses(Int64(x.iterator.toint()), 2 * Int64(x.stride[0]), indices, lane)


@cute.jit
def row_addresses(start: Int64, stride: Int64, rows, lane):
    """Where the lane's parts of rows begin, and the valid mask: rows below 0 are none."""
    sources = [start + cutlass.max(row, 0) * stride + (lane & 7) * 16 for row in rows]
    return sources, [row >= 0 for row in rows]


@cute.jit
def gather_chunk(target: Int32, sources, valid, chunk: cutlass.Constexpr, warp, lane):
    """The lane's part of a chunk, to the memory at `target`; zeros where there is no row."""
    start = target + 2 * CHUNK * (warp * WARP_ROWS + (lane >> 3))
    for i in cutlass.range_constexpr(LANE_ROWS):
        row = 4 * (i % 2) + (lane >> 3)  # of 8
        gather_16(start + 2 * (4 * i * CHUNK + ((lane & 7) ^ row) * 8), sources[i] + 2 * CHUNK * chunk, valid[i])
