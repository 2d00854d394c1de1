"""Constants of Hopper, a thread's indices, a cluster barrier, and `opaque`, which hides a value from ptxas."""

import math

import cutlass.cute as cute
from cutlass import Int32

WARP = 32
WARPGROUP = 128  # threads that issue a wgmma together
SHARED_BYTES = 232448  # largest shared memory of a CTA
# {consumer warpgroups: (registers per consumer thread, per producer thread)}. setmaxregister redistributes the
# registers after the launch.
REGISTERS = {2: (232, 40), 3: (160, 32), 4: (112, 32)}
LOG2E, LN2 = math.log2(math.e), math.log(2)


def thread_and_cta() -> tuple[Int32, Int32]:
    """-> (this thread's index in the CTA, the CTA's index in a one-dimensional grid)."""
    return cute.arch.thread_idx()[0], cute.arch.block_idx()[0]


def warp_and_lane() -> tuple[Int32, Int32]:
    """-> (this thread's warp index, which the compiler knows to be uniform in a warp; its lane index)."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()


def cluster_sync() -> None:
    """Wait for all threads of the cluster. Their earlier writes to distributed shared memory are then visible."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def opaque(x: Int32):
    """Return x in a register whose value ptxas does not know. So ptxas cannot compute expressions of x before a loop
    and keep them in registers through the loop."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[Int32(x)])
