"""Weighted sums of gathered rows. Products are rounded and then added in order, so the sums have the reference's bits.

A thread computes one vector of the sum, from the vectors (8 or 16 bytes) at the same offset in the rows of y. The
thread copies its vectors of BATCH rows at once, by cp.async, to its own part of shared memory. Plain loads would not
overlap, because ptxas uses the result of the first load before it issues the next load. A row is absent if its index is
outside y, or if it pads the rows to a multiple of BATCH. The copy of an absent row writes zeros and reads nothing.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr

from dsa.cute.copies import gather_8, gather_16
from dsa.cute.rounded import multiply_rounded
from dsa.cute.shared_memory import load_8, load_16

BATCH = 8  # rows at a time
COPIES = {8: (gather_8, load_8), 16: (gather_16, load_16)}  # {bytes of a vector: (copy to shared memory, load from it)}


def scratch_of_thread(vector_bytes: int, threads: int, tid: Int32) -> Int32:
    """Reserve shared memory for `add_weighted_rows`. -> the shared-memory address of this thread's first vector."""
    layout = cute.make_layout(BATCH * threads * vector_bytes)
    memory = cutlass.memory.SmemAllocator().allocate_tensor(Uint8, layout, 128)
    return Int32(memory.iterator.toint()) + tid * vector_bytes


@cute.jit
def add_weighted_rows(
    acc: cute.Tensor,
    y: cute.Tensor,
    rows: cute.Tensor,
    weights: cute.Tensor | None,
    scratch: Int32,
    vector_bytes: cutlass.Constexpr,
    threads: cutlass.Constexpr,
    token,
    vector,
):
    """acc += sum_j weights[token, j] * y[rows[token, j]], for vector `vector` of the rows of y. Without `weights`, all
    weights are 1. A row outside y counts as zero.

    acc      the fp32 sums of the vector's elements, in registers
    rows     [T, k] int32 or int64
    weights  [T, k] fp32
    scratch  from `scratch_of_thread` with the same `vector_bytes` and `threads`
    """
    gather, load = COPIES[vector_bytes]
    row_bytes = Int64(y.stride[0]) * (y.element_type.width // 8)
    start = y.iterator.toint() + Int64(vector) * vector_bytes
    for first in cutlass.range(0, rows.shape[1], BATCH, unroll=1):
        numbers = cute.make_rmem_tensor((BATCH,), rows.element_type)
        factors = cute.make_rmem_tensor((BATCH,), Float32)
        for j in cutlass.range_constexpr(BATCH):
            numbers[j], factors[j] = rows.element_type(-1), Float32(0.0)
            if first + j < rows.shape[1]:
                numbers[j] = rows[token, first + j]
                if const_expr(weights is not None):
                    factors[j] = weights[token, first + j]
        for j in cutlass.range_constexpr(BATCH):
            valid = numbers[j] >= 0 and numbers[j] < y.shape[0]
            # An absent row has the values 0. 0 times an infinite weight would be NaN.
            factors[j] = factors[j] if valid else Float32(0.0)
            # With an absent row's index the address could overflow.
            row = Int64(numbers[j]) if valid else Int64(0)
            gather(scratch + j * (threads * vector_bytes), start + row * row_bytes, valid)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        words = cute.make_rmem_tensor((vector_bytes // 4,), Uint32)
        for j in cutlass.range_constexpr(BATCH):
            loaded = load(scratch + j * (threads * vector_bytes))
            for i in cutlass.range_constexpr(cute.size(words)):
                words[i] = loaded[i]
            values = cute.recast_tensor(words, y.element_type)
            for i in cutlass.range_constexpr(cute.size(acc)):
                value = values[i].to(Float32)
                if const_expr(weights is not None):
                    value = multiply_rounded(factors[j], value)
                acc[i] += value
