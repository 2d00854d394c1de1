"""Kernels that run before and after the main kernel of sparse MLA's gradients (sparse_mla_backward_sm90.py).

One kernel runs before the main kernel. It computes delta[t, h] = out[t, h] . dout[t, h]. From delta it computes dsink,
and the two terms per query and head that the main kernel needs, l and e:
    share = e^lse / (e^lse + e^sink)             l = lse - log share              e = scale * (dlse / share - delta)
    dsink[t, h] = (share - 1) * delta            which the caller sums over t
share is the part of the softmax that the sink leaves to the keys. Without a sink, share is 1 and dsink does not exist.
After the main kernel, one kernel converts dKV's fp32 sums, stored in the order of the main kernel's registers, to 16
bits. With `ordered`, the main kernel stores several rows of dKV per key. Then another kernel, with one CTA per key,
first adds up the key's rows in a fixed order.

Plan
- delta: one warp per head, 16 channels per lane. Heads that pad the last block of 64 get l = inf, so they contribute
  nothing. Heads without keys get l = inf, too.
- A share below 2^-64 is replaced by 2^-64. Then dlse / share stays finite, and P = share * exp(z - lse), where z is the
  scaled score, has an error below 2^-64.
- Of each 16 consecutive numbers in a row of dKV's sums, numbers 4q to 4q + 3 (q from 0 to 3) are channels 2q, 2q + 1,
  2q + 8, 2q + 9. A thread of the kernel that converts loads 16 numbers and reorders them.
Roofline: bound by memory. The kernels read out, dout and dKV's sums once and, with `ordered`, the rows of every key
once.
"""

import itertools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake_stream
from dsa.cute.reductions import warp_reduce_sum
from dsa.cute.sm90 import LOG2E, WARP
from dsa.kernels.training.fake_tensors import ShippedVariants, fake_head_terms, fake_line, fake_numbers, fake_rows
from dsa.kernels.training.limits import MLA_CHANNELS, MLA_V_CHANNELS, SPARSE_DTYPES, SPARSE_HEAD_TILE
from dsa.runtime.compile_cache import cached, compile_sm90

HEADS, VALUE = SPARSE_HEAD_TILE, MLA_V_CHANNELS  # heads per block of terms, channels of the value
WARPS = 8
REORDERED, REORDER_THREADS = 16, 128  # channels per thread, threads per CTA
LEAST_SHARE = 2.0**-64
PREFETCHED = 4  # rows of a key's list that a thread loads at a time


class BackwardInputsSm90:
    """The kernel that runs before the main kernel and computes delta, the head terms and dsink. Without dlse, the
    gradient of lse is 0. Without sink, there is no dsink."""

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor | None,
        sink: cute.Tensor | None,
        scale: Float32,
        head_terms: cute.Tensor,
        dsink: cute.Tensor | None,
        stream,
    ):
        padded = head_terms.shape[1] * HEADS
        self.kernel(
            *(out, dout, lse, dlse, sink, scale, head_terms, dsink),
            cute.fast_divmod_create_divisor_v2(padded),
        ).launch(
            grid=(cute.ceil_div(out.shape[0] * padded, WARPS), 1, 1),
            block=(WARP * WARPS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        out: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor | None,
        sink: cute.Tensor | None,
        scale: Float32,
        head_terms: cute.Tensor,
        dsink: cute.Tensor | None,
        padded: cute.FastDivmodDivisorV2,
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = tid & (WARP - 1)
        # There is one warp per (query, padded head). The number of warps is a multiple of 64 and so of WARPS, so every
        # warp of every CTA has a head.
        query, head = divmod(block * WARPS + (tid >> 5), padded)
        own = cutlass.min(head, out.shape[1] - 1)
        wait_for_prerequisite_grids()
        delta = Float32(0.0)
        a, b = (cute.make_rmem_tensor((8, 2), out.element_type) for _ in range(2))
        for i in cutlass.range_constexpr(2):
            cute.autovec_copy(cute.local_tile(out[query, own, None], (8,), (i * WARP + lane,)), a[None, i])
            cute.autovec_copy(cute.local_tile(dout[query, own, None], (8,), (i * WARP + lane,)), b[None, i])
        for i in cutlass.range_constexpr(16):
            delta = cute.math.fma(a[i % 8, i // 8].to(Float32), b[i % 8, i // 8].to(Float32), delta)
        delta = warp_reduce_sum(delta)
        if lane == 0:
            result, slope, of_sink = Float32(float("inf")), Float32(0.0), Float32(0.0)
            value = lse[query, own]
            # The condition is false for NaN and both infinities: such a head keeps l = inf and contributes nothing.
            if head < out.shape[1] and cute.math.absf(value) < Float32(float("inf")):
                share = Float32(1.0)
                if const_expr(sink is not None):
                    above = sink[own] - value
                    share = 1.0 / (1.0 + cute.math.exp(above))
                    of_sink = -delta / (1.0 + cute.math.exp(-above))
                    share = cute.arch.fmax(share, Float32(LEAST_SHARE))
                result, slope = value * LOG2E - cute.math.log2(share), -scale * delta
                if const_expr(dlse is not None):
                    slope = scale * (dlse[query, own] / share - delta)
            target = head_terms[query, head // HEADS, None]
            target[head % HEADS * 2], target[head % HEADS * 2 + 1] = result, slope
            if const_expr(sink is not None):
                if head < out.shape[1]:
                    dsink[query, head] = of_sink


class ReorderSumsSm90:
    @cute.jit
    def __call__(self, sums: cute.Tensor, out: cute.Tensor, stream):
        self.kernel(sums, out).launch(
            grid=(cute.ceil_div(out.shape[0] * (out.shape[1] // REORDERED), REORDER_THREADS), 1, 1),
            block=(REORDER_THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, sums: cute.Tensor, out: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        number, groups = block * REORDER_THREADS + tid, out.shape[1] // REORDERED
        wait_for_prerequisite_grids()
        key, group = number // groups, number % groups
        if key < out.shape[0]:
            found = cute.make_rmem_tensor((REORDERED,), Float32)
            cute.autovec_copy(cute.local_tile(sums[key, None], (REORDERED,), (group,)), found)
            reordered = cute.make_rmem_tensor((REORDERED,), out.element_type)
            for i in cutlass.range_constexpr(REORDERED):
                quarter, n = i % 8 // 2, i // 8 * 2 + i % 2
                reordered[i] = found[4 * quarter + n].to(out.element_type)
            cute.autovec_copy(reordered, cute.local_tile(out[key, None], (REORDERED,), (group,)))


class SumListsSm90:
    @cute.jit
    def __call__(
        self,
        rows: cute.Tensor,
        order: cute.Tensor,
        bounds: cute.Tensor,
        blocks: Int32,
        stride: Int32,
        sums: cute.Tensor,
        stream,
    ):
        self.kernel(rows, order, bounds, blocks, stride, sums).launch(
            grid=(bounds.shape[0] - 1, 1, 1), block=(sums.shape[1] // 4, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        rows: cute.Tensor,
        order: cute.Tensor,
        bounds: cute.Tensor,
        blocks: Int32,
        stride: Int32,
        sums: cute.Tensor,
    ):
        tid, _, _ = cute.arch.thread_idx()
        key, _, _ = cute.arch.block_idx()
        wait_for_prerequisite_grids()
        first, end = bounds[key], bounds[key + 1]
        if first < end:
            own = cute.local_tile(sums[key, None], (4,), (tid,))
            total, found = cute.make_rmem_tensor((4,), Float32), cute.make_rmem_tensor((4, PREFETCHED), Float32)
            cute.autovec_copy(own, total)
            for number in cutlass.range(first, end, PREFETCHED, unroll=1):
                for block in cutlass.range(blocks, unroll=1):
                    for i in cutlass.range_constexpr(PREFETCHED):
                        if number + i < end:
                            source = rows[order[number + i] + block * stride, None]
                            cute.autovec_copy(cute.local_tile(source, (4,), (tid,)), found[None, i])
                    for i in cutlass.range_constexpr(PREFETCHED):
                        if number + i < end:
                            for n in cutlass.range_constexpr(4):
                                total[n] += found[n, i]
            cute.autovec_copy(total, own)


@cached
def compile_backward_inputs(dtype: str, sink: bool, lse_grad: bool):
    """-> f(out [T, H, 512], dout [T, H, 512], lse [T, H], dlse [T, H] or None, sink [H] or None, scale, head_terms
    [T, ceil(H / 64), 128], dsink [T, H] or None). head_terms: a pair (l / ln 2, e) per head. out and dout are of
    `dtype`, the other tensors are fp32."""
    queries, heads = cute.sym_int(), cute.sym_int()
    out, dout = (fake_rows(cute_dtype(dtype), queries, heads, VALUE) for _ in range(2))
    lse, dlse, dsink = (fake_numbers(queries, heads) for _ in range(3))
    return compile_sm90(
        *(BackwardInputsSm90(), out, dout, lse, dlse if lse_grad else None),
        *(fake_numbers(heads) if sink else None, Float32(0.0), fake_head_terms(queries), dsink if sink else None),
        fake_stream(),
    )


@cached
def compile_reorder_sums(dtype: str, channels: int):
    """-> f(sums [at least Tk, d] fp32, out [Tk, d] of `dtype`), which converts the first Tk rows of sums to out. Rows
    of out start at multiples of 16 bytes."""
    sums, out = (fake_rows(kind, cute.sym_int(), channels) for kind in (Float32, cute_dtype(dtype)))
    return compile_sm90(ReorderSumsSm90(), sums, out, fake_stream())


@cached
def compile_sum_lists(channels: int):
    """-> f(rows [R, d] fp32, order [n] int32, bounds [Tk + 1] int32, blocks, stride, sums [at least Tk, d] fp32), which
    computes sums[k] += rows[order[i] + b * stride], summed over bounds[k] <= i < bounds[k + 1] and b < blocks. blocks:
    blocks of 64 heads per query. stride: rows per (query, block). order: for each key, the rows of block 0. The order
    of the sum is fixed: groups of PREFETCHED values of i, then b, then i within the group."""
    # The strides are 64-bit, because `rows` can have more than 2^31 numbers: work tiles * selected keys * channels.
    rows, sums = (fake_rows(Float32, cute.sym_int(), channels) for _ in range(2))
    return compile_sm90(
        *(SumListsSm90(), rows, fake_line(Int32), fake_line(Int32), Int32(1), Int32(0), sums, fake_stream())
    )


def shipped_variants() -> ShippedVariants:
    """Return a (compile function, arguments) pair for each variant that the op can ask for."""
    either = False, True
    return [
        *((compile_backward_inputs, arguments) for arguments in itertools.product(SPARSE_DTYPES, either, either)),
        *((compile_reorder_sums, arguments) for arguments in itertools.product(SPARSE_DTYPES, MLA_CHANNELS)),
        *((compile_sum_lists, (channels,)) for channels in MLA_CHANNELS),
    ]
