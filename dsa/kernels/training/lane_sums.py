"""Sums over the rows of a wgmma accumulator tile of 64 columns: over a warp's 16 rows, by shuffles."""

import cutlass
import cutlass.cute as cute


@cute.jit
def sum_rows(values, lane):
    """values[2 j + e]: what the lane has for column 8 j + 2 (lane % 4) + e. -> the sums over the lanes with the same
    columns, of columns 2 lane and 2 lane + 1.

    Fourteen shuffles: each step halves the columns that a lane still has.
    """
    for log in cutlass.range_constexpr(4, 1, -1):
        upper = (lane >> log) & 1 != 0
        half = len(values) // 2
        kept = [values[half + i] if upper else values[i] for i in range(half)]
        sent = [values[i] if upper else values[half + i] for i in range(half)]
        values = [keep + cute.arch.shuffle_sync_bfly(send, offset=1 << log) for keep, send in zip(kept, sent)]
    return values
