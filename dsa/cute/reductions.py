"""Reductions over the lanes of a quad or a warp, and scans (prefix sums) over a warp or a block. A block here is all
threads of a CTA."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32


@cute.jit
def warp_inclusive_scan(own, lane):
    """Return the sum of `own` over this warp's lanes up to and including this lane."""
    scanned = own
    for log in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(scanned, offset=1 << log)
        if lane >= 1 << log:
            scanned += other
    return scanned


@cute.jit
def block_exclusive_scan(own, sums: cute.Tensor, lane, warp):
    """-> (the sum of `own` over the threads before this thread, the sum over all threads of the CTA). The function
    contains one barrier of the CTA.

    sums  32 Int32 in shared memory. The caller sets elements W to 31 to zero, where W is the number of warps. Another
          barrier must come before the next use of `sums`
    """
    scanned = warp_inclusive_scan(own, lane)
    if lane == 31:
        sums[warp] = scanned
    cute.arch.sync_threads()
    of_lane = sums[lane]
    before = cute.arch.warp_redux_sync(of_lane if lane < warp else Int32(0), "add")
    total = cute.arch.warp_redux_sync(of_lane, "add")
    return before + scanned - own, total


@cute.jit
def quad_reduce_scatter(a, b, c, d, upper, odd):
    """Sum a, b, c and d over each quad of lanes, with three shuffles. Lane 0 of the quad gets the sum of a, lane 1 that
    of b, lane 2 that of c, and lane 3 that of d.

    upper  whether this lane is lane 2 or 3 of the quad
    odd    whether this lane is lane 1 or 3 of the quad
    """
    even_pair = (c if upper else a) + cute.arch.shuffle_sync_bfly(a if upper else c, offset=2)
    odd_pair = (d if upper else b) + cute.arch.shuffle_sync_bfly(b if upper else d, offset=2)
    keep = odd_pair if odd else even_pair
    send = even_pair if odd else odd_pair
    return keep + cute.arch.shuffle_sync_bfly(send, offset=1)


@cute.jit
def reduce_sum(x: Float32, lanes: cutlass.Constexpr) -> Float32:
    """Return the sum of x over `lanes` adjacent lanes, in all these lanes. `lanes` is a power of two."""
    for log in cutlass.range_constexpr(lanes.bit_length() - 1):
        x += cute.arch.shuffle_sync_bfly(x, offset=1 << log)
    return x


def warp_reduce_sum(x: Float32) -> Float32:
    """Return the sum of x over a warp's lanes, in all lanes."""
    return reduce_sum(x, 32)
