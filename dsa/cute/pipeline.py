"""Pipelines between the warps of a CTA: rings of shared-memory stages, each with a `full` and an `empty` mbarrier.

A Pipeline is the barriers of a ring; a PipelineState is where a thread is in it: the stage that comes next and the
phase bit that goes with it. The state is a NamedTuple of two Int32, so a dynamic loop can carry it, a @cute.jit
function can take and return it, and an older state can be kept under another name. Producers and consumers both begin
with `start()` and go on with `advance`; the waits of a producer turn the phase bit over, because all stages are empty
at first.

    class Storage:                                               # a @cute.struct, the CTA's shared memory
        k_pipeline: pipeline_storage(stages)
        k: ...                                                   # [keys, channels, stages]
    k_pipeline = Pipeline.of(storage.k_pipeline, stages)
    if tid == 0:
        k_pipeline.init(consumers=4)                             # four warps release a stage
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    # The producer warp, which loads by TMA:
    state = start()
    for tile in cutlass.range(tiles, unroll=1):
        k_pipeline.producer_acquire(state, bytes_of_a_stage)
        cute.copy(atom, gk[None, tile], sk[None, state.stage], tma_bar_ptr=k_pipeline.producer_barrier(state))
        state = k_pipeline.advance(state)

    # A consumer warp:
    state = start()
    for tile in cutlass.range(tiles, unroll=1):
        k_pipeline.consumer_wait(state)
        ...                                                      # reads stage number state.stage
        k_pipeline.consumer_release(state)
        state = k_pipeline.advance(state)

Waits are every lane's work. What arrives at a barrier (`producer_expect`, `producer_commit`, `consumer_release`) is the
work of one elected lane, and the whole warp must call it; where ordinary reads of the other lanes come before it,
`cute.arch.sync_warp()` must stand between. `producer_acquire` is `producer_wait` and `producer_expect`; a warp that
writes to the stage itself calls the first, writes, and then calls `producer_expect` or `producer_commit`. Where an
elected lane has more to do before it arrives, its block ends with `arrive(pipeline.producer_barrier(state))`, or with
`expect_bytes` in place of `arrive`.
Ask for `producer_barrier` at each use: a name that keeps the address over several uses may change the machine code.

A stage whose data arrives in several parts, of which each can be used as soon as it is there, has `parts` full
barriers: what concerns them takes the part's number. A consumer that is through with a stage releases all of it.

A parity wait tells a phase from the one before it, not from the one before that. So whoever waits for a stage's data
must have consumed the stage's last data itself: consumers that share a load between them need a ring each, or one that
runs ahead takes the phase before last for the next. Such rings share one array of barriers: `pipeline.ring(i, stages)`
is the i-th of them. Its states count its own stages, and `ring.index(state)` is the stage's number among all, by which
it is found in shared memory. For a Pipeline that is not divided, `index(state)` is `state.stage`.

What is not a ring, such as one warpgroup's word to another that it has come to some point, is an Mbarriers: barriers
whose phases the kernel counts by itself.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64


class PipelineState(NamedTuple):
    """The stage that comes next, and the phase bit that a consumer waits for there."""

    stage: Int32
    phase: Int32

    @cute.jit
    def advance(self, stages) -> "PipelineState":
        """The stage behind this one of a ring of `stages`, by comparison: a division would put a dozen instructions
        before every wait."""
        wraps = self.stage == stages - 1
        return PipelineState(0 if wraps else self.stage + 1, self.phase ^ 1 if wraps else self.phase)


def start() -> PipelineState:
    """Before the first stage of a ring; of producers and consumers."""
    return PipelineState(Int32(0), Int32(0))


@cute.jit
def state_at(count, stages: cutlass.Constexpr) -> PipelineState:
    """The state behind `count` stages of a ring of `stages`: one number to carry instead of two, for a division."""
    return PipelineState(count % stages, count // stages & 1)


def state_at_of_two(count: Int32) -> PipelineState:
    """The same of a ring of two, by bits."""
    return PipelineState(count & 1, (count >> 1) & 1)


def pipeline_storage(stages: int, parts: int = 1) -> type:
    """The barriers of a ring of `stages` stages in shared memory: a field of a @cute.struct."""

    @cute.struct
    class PipelineStorage:
        full: cute.struct.MemRange[Int64, stages * parts]
        empty: cute.struct.MemRange[Int64, stages]

    return PipelineStorage


@dataclass(frozen=True)
class Pipeline:
    """A ring of `stages` stages: those from number `first` on of the barriers `full` and `empty` in shared memory, of
    which a stage has `parts` full ones."""

    full: cute.Pointer
    empty: cute.Pointer
    stages: cutlass.Constexpr[int]
    first: Int32
    parts: cutlass.Constexpr[int] = 1

    @staticmethod
    def of(storage, stages: int, parts: int = 1) -> "Pipeline":
        """The pipeline whose barriers `pipeline_storage(stages, parts)` has reserved."""
        return Pipeline(storage.full.data_ptr(), storage.empty.data_ptr(), stages, Int32(0), parts)

    @cute.jit
    def init(self, consumers: cutlass.Constexpr, producers: cutlass.Constexpr = 1):
        """Make the barriers: `producers` arrivals, and the bytes that they announce, fill each part of a stage; the
        arrivals of `consumers` warps empty it. One thread's work, before mbarrier_init_fence and a barrier of the
        CTA."""
        for i in cutlass.range_constexpr(self.stages):
            for part in cutlass.range_constexpr(self.parts):
                cute.arch.mbarrier_init(self.full + (i * self.parts + part), producers)
            cute.arch.mbarrier_init(self.empty + i, consumers)

    def ring(self, index: Int32, stages: int) -> "Pipeline":
        """Ring number `index` of those of `stages` stages each that share these barriers."""
        return Pipeline(self.full, self.empty, stages, index * stages, self.parts)

    def index(self, state: PipelineState) -> Int32:
        """The number of the stage among all that share the barriers: where it is in shared memory."""
        return self.first + state.stage

    @cute.jit
    def advance(self, state: PipelineState) -> PipelineState:
        """The stage behind `state`."""
        return state.advance(self.stages)

    @cute.jit
    def skip(self, state: PipelineState, count: cutlass.Constexpr) -> PipelineState:
        """The state `count` stages further, no more than there are."""
        wraps = state.stage >= self.stages - count
        stage = state.stage + count
        return PipelineState(stage - self.stages if wraps else stage, state.phase ^ 1 if wraps else state.phase)

    @cute.jit
    def producer_wait(self, state: PipelineState):
        """Wait until the stage is empty."""
        cute.arch.mbarrier_wait(self.empty + self.index(state), state.phase ^ 1)

    @cute.jit
    def producer_expect(self, state: PipelineState, size, part=0):
        """Announce `size` bytes of asynchronous copies to the stage, and arrive. An elected lane's work."""
        with cute.arch.elect_one():
            expect_bytes(self.producer_barrier(state, part), size)

    @cute.jit
    def producer_acquire(self, state: PipelineState, size):
        """Wait until the stage is empty, and announce `size` bytes of asynchronous copies to it."""
        self.producer_wait(state)
        self.producer_expect(state, size)

    @cute.jit
    def producer_commit(self, state: PipelineState, part=0):
        """Arrive: what this warp has written to the stage by itself is there. An elected lane's work."""
        with cute.arch.elect_one():
            arrive(self.producer_barrier(state, part))

    def producer_barrier(self, state: PipelineState, part=0) -> cute.Pointer:
        """What counts the bytes of copies to a part of the stage."""
        if self.parts == 1:
            return self.full + self.index(state)
        return self.full + (self.index(state) * self.parts + part)

    @cute.jit
    def consumer_wait(self, state: PipelineState, part=0):
        """Wait until a part of the stage is full."""
        cute.arch.mbarrier_wait(self.producer_barrier(state, part), state.phase)

    @cute.jit
    def is_full(self, state: PipelineState, part=0):
        """Whether a part of the stage is full, without waiting."""
        return cute.arch.mbarrier_test_wait(self.producer_barrier(state, part), state.phase)

    @cute.jit
    def consumer_release(self, state: PipelineState):
        """Arrive: this warp has read the stage. An elected lane's work."""
        with cute.arch.elect_one():
            arrive(self.consumer_barrier(state))

    def consumer_barrier(self, state: PipelineState) -> cute.Pointer:
        """What counts the arrivals of warps that have read the stage."""
        return self.empty + self.index(state)


@dataclass(frozen=True)
class Mbarriers:
    """`count` barriers in shared memory from `first` on, which are no ring: the kernel counts their phases itself."""

    first: cute.Pointer
    count: cutlass.Constexpr[int]

    @cute.jit
    def init(self, arrivals: cutlass.Constexpr):
        """Make them: so many arrivals, and the bytes that they announce, end a phase. One thread's work."""
        for i in cutlass.range_constexpr(self.count):
            cute.arch.mbarrier_init(self.first + i, arrivals)

    def barrier(self, index=0) -> cute.Pointer:
        """Barrier number `index`, for `arrive`, `expect_bytes` and copies."""
        return self.first + index

    @cute.jit
    def wait(self, phase, index=0):
        """Wait for the end of the phase."""
        cute.arch.mbarrier_wait(self.barrier(index), phase)

    @cute.jit
    def arrive(self, index=0):
        """An elected lane's work."""
        with cute.arch.elect_one():
            arrive(self.barrier(index))


@cute.jit
def arrive(barrier: cute.Pointer, cta: cutlass.Constexpr = None):
    """This thread's arrival; with `cta`, at the same barrier of that CTA of the cluster."""
    cute.arch.mbarrier_arrive(barrier, cta)


@cute.jit
def expect_bytes(barrier: cute.Pointer, size):
    """Announce `size` bytes of asynchronous copies, and arrive. This thread's work."""
    cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
