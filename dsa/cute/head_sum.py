"""Sums over heads of a wgmma accumulator tile whose rows are keys and whose columns are (query, head)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32


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
