"""Steps that the kernels of the sparse stage share. They gather rows from global memory into tiles of 64 rows in shared
memory, for wgmma, and load these tiles into registers. QuerySchedule gives each CTA its queries.

A tile is a list of chunks of 64 channels, [64 rows, 128 bytes] each, with the 128-byte swizzle. A producer warpgroup
gathers a tile, 16 rows per warp. In every chunk a lane copies 16 bytes of four rows: rows 4 i + lane / 8 of its warp's
16 rows, i from 0 to 3.

cp.async writes through the generic proxy, and wgmma reads through the async proxy. PTX requires a fence.proxy.async
between the write and the read. The consumers execute the fence after they wait for a stage (`wait_for_wgmma`), so the
producer does not wait for its copies.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from dsa.cute.copies import arrive_when_gathered, gather_16
from dsa.cute.pipeline import Pipeline, PipelineState
from dsa.cute.shared_memory import load_matrices, swizzled
from dsa.cute.work_tile import StaticPersistentScheduler
from dsa.kernels.training.limits import SPARSE_KEY_TILE

TILE = SPARSE_KEY_TILE
CHUNK = 64
CHUNK_BYTES = TILE * CHUNK * 2
WARP_ROWS = TILE // 4
LANE_ROWS = WARP_ROWS // 4
STEPS = CHUNK // 16  # wgmma instructions per chunk


@dataclass(frozen=True)
class QuerySchedule:
    """The schedule of a CTA, whose work tiles are the queries `first`, `first` + `step`, ... below `queries`.
    key_tiles: number of tiles of selected keys per query."""

    first: Int32
    step: Int32
    queries: Int32
    key_tiles: Int32

    @staticmethod
    def of(scheduler: StaticPersistentScheduler, q: cute.Tensor, indices: cute.Tensor) -> "QuerySchedule":
        return QuerySchedule(scheduler.first, scheduler.step, q.shape[0], (indices.shape[1] + TILE - 1) // TILE)


@cute.jit
def wait_for_wgmma(pipeline: Pipeline, state: PipelineState, part=0):
    """Wait until wgmma can read part `part` of a stage that cp.async has written. Called by every lane."""
    pipeline.consumer_wait(state, part)
    cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def own_rows(warp, lane):
    """Return the four rows of a tile from which this lane copies 16 bytes per chunk."""
    return [warp * WARP_ROWS + 4 * i + (lane >> 3) for i in range(LANE_ROWS)]


@cute.jit
def selected(indices: cute.Tensor, first, rows, keys):
    """Return the selected keys of the lane's rows: indices[first + row] for each row. indices: a query's list [K].
    keys: number of keys that exist. A position past the end of the list, or a key outside [0, keys), gives a negative
    number."""
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
    """Return `row_addresses` for some heads of query `query`: the heads `first` + r for each r in `rows`. x is [T, H,
    d] of a 16-bit dtype. Heads from H on are invalid."""
    heads = []
    for row in rows:
        head = first + row
        heads.append(head if head < x.shape[1] else Int32(-1))
    own = x[query, None, None]
    return row_addresses(Int64(own.iterator.toint()), 2 * Int64(own.stride[0]), heads, lane)


@cute.jit
def key_rows(x: cute.Tensor, indices, lane):
    """Return `row_addresses` for the rows `indices` of x. x is [Tk, d] of a 16-bit dtype. Negative indices are
    invalid."""
    return row_addresses(Int64(x.iterator.toint()), 2 * Int64(x.stride[0]), indices, lane)


@cute.jit
def row_addresses(start: Int64, stride: Int64, rows, lane):
    """-> (addresses, valid), two lists with an entry per row in `rows`. An address is that of the 16 bytes that this
    lane copies from the row's first chunk. A row is valid if its number is not negative. start, stride: address of row
    0, and bytes from row to row."""
    sources = [start + cutlass.max(row, 0) * stride + (lane & 7) * 16 for row in rows]
    return sources, [row >= 0 for row in rows]


@cute.jit
def gather_chunk(target: Int32, sources, valid, chunk: cutlass.Constexpr, warp, lane):
    """Start copying the lane's part of chunk `chunk` to shared memory, with zeros for invalid rows. target: address of
    the chunk in the tile. sources, valid: from `row_addresses`."""
    start = target + 2 * CHUNK * (warp * WARP_ROWS + (lane >> 3))
    for i in cutlass.range_constexpr(LANE_ROWS):
        row = 4 * (i % 2) + (lane >> 3)  # row modulo 8, the period of the swizzle
        gather_16(start + 2 * (4 * i * CHUNK + ((lane & 7) ^ row) * 8), sources[i] + 2 * CHUNK * chunk, valid[i])


@cute.jit
def gather_tile(
    pipeline: Pipeline,
    state: PipelineState,
    start: Int32,
    chunks: cutlass.Constexpr,
    sources,
    valid,
    warp,
    lane,
) -> PipelineState:
    """Gather a tile of `chunks` chunks into an empty stage, and signal the consumers when the copies are complete.
    start: address of the first stage. sources, valid: from `row_addresses`. -> the next state."""
    for chunk in cutlass.range_constexpr(chunks):
        gather_chunk(start + (state.stage * chunks + chunk) * CHUNK_BYTES, sources, valid, chunk, warp, lane)
    arrive_when_gathered(pipeline.producer_barrier(state))
    return pipeline.advance(state)


@cute.jit
def load_chunk(words, chunk: cutlass.Constexpr, source: cute.Pointer, warp, lane):
    """Load a warp's 16 rows of a chunk from shared memory to registers, as operand A. words: the operand's 32-bit
    words, [4, STEPS, chunks]."""
    for step in cutlass.range_constexpr(STEPS):
        address = source + swizzled(warp * 16 + (lane & 15), 2 * step + (lane >> 4))
        for i, word in enumerate(load_matrices(Int32(address.toint()))):
            words[i, step, chunk] = word


@cute.jit
def load_tile(words, chunks: cutlass.Constexpr, source: cute.Pointer, state: PipelineState, warp, lane):
    """Load a warp's 16 rows of a stage of `chunks` chunks to registers, as `load_chunk` does. source: start of the
    first stage."""
    for chunk in cutlass.range_constexpr(chunks):
        load_chunk(words, chunk, source + (state.stage * chunks + chunk) * (TILE * CHUNK), warp, lane)
