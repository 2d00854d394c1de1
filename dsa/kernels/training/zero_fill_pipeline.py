"""A pipeline whose producer overwrites, in the last tile of a sequence, the rows of the next sequence with zeros.

TMA and bulk copies load whole tiles, so the last tile of a sequence can contain rows of another sequence. The factors
of these rows in the product are 0, but 0 * NaN is NaN. If all rows of a tile are valid, the copies complete the stage's
full barrier, as in any pipeline. Otherwise the copies complete the barrier `landed`, on which the producer waits. The
producer overwrites the invalid rows and then completes the full barrier itself:

    pipeline.ring.producer_wait(state)
    barrier = pipeline.copy_barrier(state, is_whole)             # counts the bytes of all copies to the stage
    ...
    if not is_whole:
        landed_phase = pipeline.zero_rows(landed_phase, ...)
        pipeline.commit(state)
    state = pipeline.ring.advance(state)

Consumers use only `ring`.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from dsa.cute.pipeline import Mbarriers, Pipeline, PipelineState
from dsa.cute.shared_memory import store_4

SWIZZLE_BYTES = 128  # bytes of a row that are contiguous in shared memory


def zero_fill_storage(stages: int) -> type:
    @cute.struct
    class ZeroFillStorage:
        full: cute.struct.MemRange[Int64, stages + 1]  # the last is `landed`
        empty: cute.struct.MemRange[Int64, stages]

    return ZeroFillStorage


@dataclass(frozen=True)
class ZeroFillPipeline:
    """The pipeline described above. ring: the pipeline that the consumers use. landed: the barrier on which the
    producer waits for copies of partial tiles. `landed` is stored after the ring's full barriers, so that
    `copy_barrier` can select a barrier by an index."""

    ring: Pipeline
    landed: Mbarriers

    @staticmethod
    def of(storage, stages: int) -> "ZeroFillPipeline":
        full = storage.full.data_ptr()
        return ZeroFillPipeline(Pipeline(full, storage.empty.data_ptr(), stages, Int32(0)), Mbarriers(full + stages, 1))

    @cute.jit
    def init(self, consumers: cutlass.Constexpr):
        """Initialize the barriers. consumers: number of warps that release a stage. Called by one thread."""
        self.ring.init(consumers)
        self.landed.init(1)

    @cute.jit
    def copy_barrier(self, state: PipelineState, is_whole: Boolean) -> cute.Pointer:
        """Return the barrier that counts the bytes of the copies to a stage: the stage's full barrier if all rows of
        the tile are valid, else `landed`."""
        return self.ring.full + (state.stage if is_whole else self.ring.stages)

    @cute.jit
    def zero_rows(
        self, phase: Int32, tile: Int32, first, rows: cutlass.Constexpr, row_bytes: cutlass.Constexpr, lane
    ) -> Int32:
        """Wait until the copies of a partial tile have arrived, then zero-fill rows `first` to `rows` - 1 of the tile.
        tile: address of the tile in shared memory, with rows of `row_bytes` bytes in TMA's 128-byte swizzle. Called by
        a whole warp. -> the phase for the next call."""
        self.landed.wait(phase)
        for row in cutlass.range(first, rows, unroll=1):
            for part in cutlass.range_constexpr(row_bytes // SWIZZLE_BYTES):
                store_4(tile + part * (rows * SWIZZLE_BYTES) + row * SWIZZLE_BYTES + 4 * lane, Uint32(0))
        return phase ^ 1

    @cute.jit
    def commit(self, state: PipelineState):
        """Signal the consumers that a partial tile is complete. The producer warp calls this after `zero_rows` and its
        other writes to the stage."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        self.ring.producer_commit(state)
