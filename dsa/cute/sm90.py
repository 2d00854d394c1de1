"""Constants of Hopper, indices of a thread, and a barrier against the compiler's optimisation."""

import math

import cutlass.cute as cute
from cutlass import Int32

WARP = 32
WARPGROUP = 128  # threads that issue a wgmma together
SHARED_BYTES = 232448  # the most that a CTA can have
# {consumer warpgroups: (registers per consumer thread, per producer thread)}: the launch gives all threads the same,
# and setmaxregister redistributes them.
REGISTERS = {2: (232, 40), 3: (160, 32), 4: (112, 32)}
LOG2E, LN2 = math.log2(math.e), math.log(2)


def thread_and_cta() -> tuple[Int32, Int32]:
    """This thread's index in its CTA, and the CTA's index in a one-dimensional grid."""
    return cute.arch.thread_idx()[0], cute.arch.block_idx()[0]


def warp_and_lane() -> tuple[Int32, Int32]:
    """This thread's warp, uniform for the compiler, and its lane."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()


def cluster_sync() -> None:
    """Barrier of all threads of a cluster, which makes writes to distributed shared memory visible."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def opaque(x: Int32):
    """x, opaque to ptxas, which then cannot hoist expressions of x out of a loop and keep them in registers."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[Int32(x)])
