"""A pipeline whose producer puts zeros where a copy has brought rows of the next sequence.

TMA and bulk copies bring whole tiles, so the tile at a sequence's end has rows that belong to another sequence. Their
factors in the product are 0, but 0 * NaN is NaN. A copy of a whole tile signals the consumers, as in any pipeline. A
copy of a partial one signals the producer, by the barrier `landed`; the producer overwrites the rows and then signals
the consumers itself:

    pipeline.ring.producer_wait(state)
    barrier = pipeline.copy_barrier(state, is_whole)             # counts the bytes of all copies to the stage
    ...
    if not is_whole:
        landed_phase = pipeline.wait_landed(landed_phase)
        zero_rows(...)
        pipeline.commit(state)
    state = pipeline.ring.advance(state)

Consumers need the `ring` alone.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from dsa.cute.pipeline import Mbarriers, Pipeline, PipelineState
from dsa.cute.shared_memory import store_4

SWIZZLE_BYTES = 128  # of a row, side by side in shared memory


def zero_fill_storage(stages: int) -> type:
    """The barriers of a ZeroFillPipeline in shared memory: a field of a @cute.struct."""

    @cute.struct
    class ZeroFillStorage:
        full: cute.struct.MemRange[Int64, stages + 1]  # the last is `landed`
        empty: cute.struct.MemRange[Int64, stages]

    return ZeroFillStorage


@dataclass(frozen=True)
class ZeroFillPipeline:
    """ring: what the consumers wait for and release; landed: the barrier that the producer waits for, behind the ring's
    full ones, so that a number tells which barrier counts a copy's bytes."""

    ring: Pipeline
    landed: Mbarriers

    @staticmethod
    def of(storage, stages: int) -> "ZeroFillPipeline":
        """Of what `zero_fill_storage(stages)` has reserved."""
        full = storage.full.data_ptr()
        return ZeroFillPipeline(Pipeline(full, storage.empty.data_ptr(), stages, Int32(0)), Mbarriers(full + stages, 1))

    @cute.jit
    def init(self, consumers: cutlass.Constexpr):
        """Make the barriers; so many warps release a stage. One thread's work."""
        self.ring.init(consumers)
        self.landed.init(1)

    @cute.jit
    def copy_barrier(self, state: PipelineState, is_whole: Boolean) -> cute.Pointer:
        """What counts the bytes of the copies to a stage."""
        return self.ring.full + (state.stage if is_whole else self.ring.stages)

    @cute.jit
    def wait_landed(self, phase: Int32) -> Int32:
        """Wait until the copies to a partial stage are there. -> the phase of the next such wait."""
        self.landed.wait(phase)
        return phase ^ 1

    @cute.jit
    def commit(self, state: PipelineState):
        """What the producer warp has written to a stage is there, too."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        self.ring.producer_commit(state)


@cute.jit
def zero_rows(tile: Int32, first, rows: cutlass.Constexpr, row_bytes: cutlass.Constexpr, lane):
    """The last of a tile's `rows` rows, from `first` on, become 0: rows of `row_bytes` bytes at the address `tile` of
    shared memory, in the layout of TMA's swizzle of 128 bytes. A warp's work."""
    for row in cutlass.range(first, rows, unroll=1):
        for part in cutlass.range_constexpr(row_bytes // SWIZZLE_BYTES):
            store_4(tile + part * (rows * SWIZZLE_BYTES) + row * SWIZZLE_BYTES + 4 * lane, Uint32(0))
