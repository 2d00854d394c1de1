"""A row of scores that the top-k selects from: its location, and its bulk load into shared memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from dsa.cute.copies import bulk_load
from dsa.cute.pipeline import arrive, expect_bytes
from dsa.kernels.indexer.limits import LENGTHS, STARTS
from dsa.kernels.indexer.radix_select import VECTOR_BYTES


@dataclass(frozen=True)
class Row:
    """scores [cols]: the matrix row. The selection uses its columns [lo, lo + n). These touch `vectors` vectors of 16
    bytes, the first of which begins `ahead` numbers before lo."""

    scores: cute.Tensor
    lo: Int32
    n: Int32
    ahead: Int32
    vectors: Int32


def vector_width(scores: cute.Tensor) -> int:
    """Numbers per 16-byte vector."""
    return VECTOR_BYTES * 8 // scores.element_type.width


@cute.jit
def find_row(scores: cute.Tensor, starts: cute.Tensor, lengths: cute.Tensor, index: Int32, options: Int32):
    """(the row's start, the row). The row excludes columns outside the matrix."""
    start, cols = Int32(0), scores.shape[1]
    if options & STARTS:
        start = starts[index]
    end = Int64(cols)
    if options & LENGTHS:
        end = cutlass.min(end, Int64(start) + lengths[index])
    lo = cutlass.min(cutlass.max(start, 0), cols)
    n = Int32(cutlass.max(end - lo, Int64(0)))
    own = scores[index, None]
    width = vector_width(own)
    ahead = (Int32((own.iterator + lo).toint()) & 15) // (scores.element_type.width // 8)
    return start, Row(own, lo, n, ahead, (n + ahead + width - 1) // width)


@cute.jit
def load_row(row: Row, first, behind, target: cute.Tensor, barrier: cute.Pointer):
    """Start to load the row's vectors [first, behind) into `target`. One thread calls this; it arrives twice.

    A first or last vector that also contains numbers outside the row is copied number by number, with NaN for those.
    """
    width = vector_width(row.scores)
    cute.arch.fence_proxy("async.shared", space="cta")
    whole = first + 1 if first * width < row.ahead else first
    whole_end = behind - 1 if behind * width > row.ahead + row.n else behind
    size = cutlass.max(whole_end - whole, 0) * VECTOR_BYTES
    expect_bytes(barrier, size)
    if size > 0:
        bulk_load(
            target.iterator + (whole - first) * width,
            row.scores.iterator + (row.lo + whole * width - row.ahead),
            size,
            barrier,
        )
    if whole > first and behind > first:
        load_one_by_one(row, first, target, Int32(0))
    if whole_end < behind and (behind - first > 1 or whole == first):
        load_one_by_one(row, behind - 1, target, behind - 1 - first)
    arrive(barrier)


@cute.jit
def load_one_by_one(row: Row, vector, target: cute.Tensor, at):
    width, dtype = vector_width(row.scores), row.scores.element_type
    for j in cutlass.range(width, unroll=1):
        column = vector * width - row.ahead + j
        x = dtype(float("nan"))
        if column >= 0 and column < row.n:
            x = row.scores[row.lo + column]
        target[at * width + j] = x
