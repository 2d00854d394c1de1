"""Pipelines between the warps of a CTA: rings of shared-memory stages, each with a `full` and an `empty` mbarrier.

A Pipeline holds the barriers of a ring. A PipelineState is a thread's position in the ring: the next stage and its
phase bit. The state is a NamedTuple of two Int32, so a dynamic loop can carry it, a @cute.jit function can take and
return it, and an older state can be kept under another name. Producers and consumers both begin with `start()` and go
on with `advance`. Producers wait with the inverted phase bit, because all stages are empty at first.

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

In the waits, all lanes of a warp wait. In `producer_expect`, `producer_commit` and `consumer_release` one elected lane
arrives at the barrier, but the whole warp must call them. If several lanes read the stage with ordinary loads, call
`cute.arch.sync_warp()` before `consumer_release`. `producer_acquire` is `producer_wait` followed by `producer_expect`.
A warp that writes to the stage with ordinary stores calls `producer_wait`, writes, calls `cute.arch.sync_warp()`, and
then calls `producer_commit`, or `producer_expect` if asynchronous copies to the stage follow. If the elected lane has
more to do before it arrives, the kernel elects the lane itself (`cute.arch.elect_one()`). The elected lane then ends
with `arrive(pipeline.producer_barrier(state))`, or with `expect_bytes` of that barrier. Call `producer_barrier` at each
use: keeping the address in a variable over several uses can change the SASS.

If a stage's data arrives in several parts that can be used one by one, the stage has `parts` full barriers, and the
methods that use a full barrier take the part's number. A consumer releases all parts of a stage at once.

A parity wait can distinguish a phase only from the phase directly before it. So a thread that waits for a stage must
have consumed the stage's previous data itself. If a producer's tiles are divided among several consumers, each consumer
therefore needs a separate ring. In a common ring, a consumer that runs ahead would mistake an old phase for the next
one. The rings of the consumers share one array of barriers: `pipeline.ring(i, stages)` is the i-th ring. `state.stage`
is then the stage's index in the ring, and `ring.index(state)` is the stage's index among the stages of all rings, which
also locates the stage's data in shared memory. For a Pipeline that is not divided into rings, `index(state)` is
`state.stage`.

Mbarriers are barriers outside a ring, for example a signal from one warpgroup to another. The kernel keeps track of
their phase bits.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64


class PipelineState(NamedTuple):
    """The stage that a thread uses next, and the phase bit that a consumer waits for."""

    stage: Int32
    phase: Int32

    @cute.jit
    def advance(self, stages) -> "PipelineState":
        """Return the next state in a ring of `stages` stages. A comparison finds the end of the ring, because a
        division would put a dozen instructions before every wait."""
        wraps = self.stage == stages - 1
        return PipelineState(0 if wraps else self.stage + 1, self.phase ^ 1 if wraps else self.phase)


def start() -> PipelineState:
    """Return the first state in a ring, for producers and consumers."""
    return PipelineState(Int32(0), Int32(0))


@cute.jit
def state_at(count, stages: cutlass.Constexpr) -> PipelineState:
    """Return the state after `count` stages. A loop that carries `count` instead of a state saves a register, but every
    call costs a division."""
    return PipelineState(count % stages, count // stages & 1)


def state_at_of_two(count: Int32) -> PipelineState:
    """Return the state after `count` stages in a ring of two stages, without a division."""
    return PipelineState(count & 1, (count >> 1) & 1)


def pipeline_storage(stages: int, parts: int = 1) -> type:
    """Return the type of a @cute.struct field for the barriers of a ring."""

    @cute.struct
    class PipelineStorage:
        full: cute.struct.MemRange[Int64, stages * parts]
        empty: cute.struct.MemRange[Int64, stages]

    return PipelineStorage


@dataclass(frozen=True)
class Pipeline:
    """A ring of `stages` stages, each with `parts` full barriers and one empty barrier in shared memory. Several rings
    can share the arrays `full` and `empty`. The stages of this ring begin at index `first` of the arrays."""

    full: cute.Pointer
    empty: cute.Pointer
    stages: cutlass.Constexpr[int]
    first: Int32
    parts: cutlass.Constexpr[int] = 1

    @staticmethod
    def of(storage, stages: int, parts: int = 1) -> "Pipeline":
        return Pipeline(storage.full.data_ptr(), storage.empty.data_ptr(), stages, Int32(0), parts)

    @cute.jit
    def init(self, consumers: cutlass.Constexpr, producers: cutlass.Constexpr = 1):
        """Initialise the barriers. A part of a stage is full after `producers` arrivals and all bytes that they
        announced; a stage is empty after `consumers` warps have released it. One thread calls this."""
        for i in cutlass.range_constexpr(self.stages):
            for part in cutlass.range_constexpr(self.parts):
                cute.arch.mbarrier_init(self.full + (i * self.parts + part), producers)
            cute.arch.mbarrier_init(self.empty + i, consumers)

    def ring(self, index: Int32, stages: int) -> "Pipeline":
        """Return ring number `index` of the rings that share these barriers and have `stages` stages each."""
        return Pipeline(self.full, self.empty, stages, index * stages, self.parts)

    def index(self, state: PipelineState) -> Int32:
        """Return the index of the state's stage among the stages of all rings. The stage's data in shared memory has
        the same index."""
        return self.first + state.stage

    @cute.jit
    def advance(self, state: PipelineState) -> PipelineState:
        return state.advance(self.stages)

    @cute.jit
    def skip(self, state: PipelineState, count: cutlass.Constexpr) -> PipelineState:
        wraps = state.stage >= self.stages - count
        stage = state.stage + count
        return PipelineState(stage - self.stages if wraps else stage, state.phase ^ 1 if wraps else state.phase)

    @cute.jit
    def producer_wait(self, state: PipelineState):
        cute.arch.mbarrier_wait(self.empty + self.index(state), state.phase ^ 1)

    @cute.jit
    def producer_expect(self, state: PipelineState, size, part=0):
        """Announce `size` bytes of asynchronous copies to a part of the stage, and arrive, with one instruction."""
        with cute.arch.elect_one():
            expect_bytes(self.producer_barrier(state, part), size)

    @cute.jit
    def producer_acquire(self, state: PipelineState, size):
        self.producer_wait(state)
        self.producer_expect(state, size)

    @cute.jit
    def producer_commit(self, state: PipelineState, part=0):
        """Arrive at a part's full barrier, after this warp has written the part and called sync_warp."""
        with cute.arch.elect_one():
            arrive(self.producer_barrier(state, part))

    def producer_barrier(self, state: PipelineState, part=0) -> cute.Pointer:
        """Return the full barrier of a part of the stage."""
        if self.parts == 1:
            return self.full + self.index(state)
        return self.full + (self.index(state) * self.parts + part)

    @cute.jit
    def consumer_wait(self, state: PipelineState, part=0):
        cute.arch.mbarrier_wait(self.producer_barrier(state, part), state.phase)

    @cute.jit
    def is_full(self, state: PipelineState, part=0):
        return cute.arch.mbarrier_test_wait(self.producer_barrier(state, part), state.phase)

    @cute.jit
    def consumer_release(self, state: PipelineState):
        """Arrive at the stage's empty barrier, after this warp has read the stage."""
        with cute.arch.elect_one():
            arrive(self.consumer_barrier(state))

    def consumer_barrier(self, state: PipelineState) -> cute.Pointer:
        return self.empty + self.index(state)


@dataclass(frozen=True)
class Mbarriers:
    first: cute.Pointer
    count: cutlass.Constexpr[int]

    @cute.jit
    def init(self, arrivals: cutlass.Constexpr):
        """Initialise the barriers. A phase ends after `arrivals` arrivals and all bytes that they announced. One thread
        calls this."""
        for i in cutlass.range_constexpr(self.count):
            cute.arch.mbarrier_init(self.first + i, arrivals)

    def barrier(self, index=0) -> cute.Pointer:
        return self.first + index

    @cute.jit
    def wait(self, phase, index=0):
        cute.arch.mbarrier_wait(self.barrier(index), phase)

    @cute.jit
    def arrive(self, index=0):
        with cute.arch.elect_one():
            arrive(self.barrier(index))


@cute.jit
def arrive(barrier: cute.Pointer, cta: cutlass.Constexpr = None):
    """The calling thread arrives at the barrier. With `cta`, a rank in the cluster, it arrives at that CTA's barrier at
    the same shared-memory offset."""
    cute.arch.mbarrier_arrive(barrier, cta)


@cute.jit
def expect_bytes(barrier: cute.Pointer, size):
    """Announce `size` bytes of asynchronous copies, and arrive. The calling thread does both."""
    cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
