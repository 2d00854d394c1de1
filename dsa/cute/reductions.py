"""Prefix sums, and prefix maxima, over the threads of a warp and of a CTA.

Sums over heads of a wgmma accumulator tile whose rows are keys and whose columns are (query, head).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32


@cute.jit
def warp_scan(own, lane):
    """The sum of `own` over this warp's lanes up to and with this one."""
    scanned = own
    for log in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(scanned, offset=1 << log)
        if lane >= 1 << log:
            scanned += other
    return scanned


@cute.jit
def before_and_all(own, sums: cute.Tensor, lane, warp):
    """The sum of `own` over the threads before this one, and over all of the CTA. One barrier.

    sums  32 Int32 of shared memory, zero beyond the CTA's warps. They may be used again after another barrier
    """
    scanned = warp_scan(own, lane)
    if lane == 31:
        sums[warp] = scanned
    cute.arch.sync_threads()
    of_lane = sums[lane]
    before = cute.arch.warp_redux_sync(of_lane if lane < warp else Int32(0), "add")
    total = cute.arch.warp_redux_sync(of_lane, "add")
    return before + scanned - own, total


@cute.jit
def highest_so_far(own, tops: cute.Tensor, lane, warp):
    """The maximum of `own`, at least 0, over the threads up to and with this one, and over all of the CTA. One barrier.

    tops  as `sums` of `before_and_all`
    """
    scanned = own
    for log in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(scanned, offset=1 << log)
        if lane >= 1 << log:
            scanned = cutlass.max(scanned, other)
    if lane == 31:
        tops[warp] = scanned
    cute.arch.sync_threads()
    of_lane = tops[lane]
    before = cute.arch.warp_redux_sync(of_lane if lane < warp else Int32(0), "max")
    return cutlass.max(before, scanned), cute.arch.warp_redux_sync(of_lane, "max")


@cute.jit
def head_sum(acc, weights, query: cutlass.Constexpr, heads: cutlass.Constexpr):
    """Halves of sum_h w[h] relu(acc[key, query * heads + h]) over this lane's heads: [keys row, keys row + 8].

    acc      this thread's accumulators, flat: [column / 8][key half][2 neighbouring columns]
    weights  w / 2 of this lane's columns, flat: [column / 8][2]
    """
    sums = [Float32(0.0), Float32(0.0)]
    for j in cutlass.range_constexpr(heads // 8):
        column = query * (heads // 8) + j
        for c in cutlass.range_constexpr(2):
            for half in cutlass.range_constexpr(2):
                # x + |x| = 2 relu(x), exactly; w is halved. It runs on the FMA pipe, at twice the rate of a maximum,
                # and passes NaN on.
                x = acc[4 * column + 2 * half + c]
                sums[half] = cute.math.fma(x + cute.math.absf(x), weights[2 * column + c], sums[half])
    return sums


@cute.jit
def quad_pair(a, b, upper):
    """The sum over a quad of a in its lanes 0 and 1, of b in lanes 2 and 3: two shuffles, added in the same order as
    below."""
    keep = b if upper else a
    send = a if upper else b
    value = keep + cute.arch.shuffle_sync_bfly(send, offset=2)
    return value + cute.arch.shuffle_sync_bfly(value, offset=1)


@cute.jit
def quad_transpose(a, b, c, d, upper, odd):
    """The sum over a quad of a in its lane 0, of b in lane 1, of c in lane 2, of d in lane 3: three shuffles."""
    even_pair = (c if upper else a) + cute.arch.shuffle_sync_bfly(a if upper else c, offset=2)
    odd_pair = (d if upper else b) + cute.arch.shuffle_sync_bfly(b if upper else d, offset=2)
    keep = odd_pair if odd else even_pair
    send = even_pair if odd else odd_pair
    return keep + cute.arch.shuffle_sync_bfly(send, offset=1)


@cute.jit
def sum_of_warp(x: Float32) -> Float32:
    """The sum of x over a warp's lanes, which all get it."""
    for log in cutlass.range_constexpr(5):
        x += cute.arch.shuffle_sync_bfly(x, offset=1 << log)
    return x
