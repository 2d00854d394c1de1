"""Compute the input of a sublayer with hyper-connections: collapse the streams, apply RMSNorm, and cast the result to
FP8.

Plan
- A CTA processes one token at a time. A thread loads its 16-byte vectors of all four streams into registers, and uses
  them for the mean square and for x, the collapsed streams. Norm and cast use x, rounded to bf16, from registers. x
  itself is not stored.
- To get the bits of the separate kernels for collapse and for norm and cast, this kernel adds in their order. The norm
  assigns vectors to threads as `rms_norm_sm90` does. The squares for the mean square are added in the order of
  `hyper_connections_sm90`, which has `shares` (2 or 4) times as many threads per token. So each thread here computes
  the sums of `shares` threads of that kernel, one after the other.
- One extra warp computes post and comb, one token per lane. This warp loads mix, base and scale before the mean square
  is ready. With 20 iterations, Sinkhorn is a chain of 39 dependent steps after the softmax. Each step has four
  independent reciprocals. The chain takes longer than x, norm and cast, which the other warps compute meanwhile.
- Threads load the norm's weights after the norm's sum, when the streams no longer occupy registers. This does not delay
  the kernel, because Sinkhorn takes longer. Before it waits for the previous kernel, the first CTA prefetches weights,
  base and scale to L2: in decode, they were last read in the previous step and may no longer be in L2.
- With more than CTAS tokens, a CTA has up to MAX_TOKENS of them, and Sinkhorn's latency occurs once for all of them.
- Independent streams (Hy4) have no comb, so the extra warp computes only post.
Shared memory: per token, shares + 1 sums per warp and 8 numbers for pre.
Constraints: bf16, four streams, D a multiple of 128 and at most lanes x vectors x 8, rows at multiples of 16 bytes.
Roofline: bound by memory, 11 D bytes per token. With few tokens, bound by latency: of memory, of the sum over the CTA,
and of 40 dependent reciprocals, which are one for the softmax and one per step.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint32, const_expr

from dsa.cute.copies import prefetch_to_l2
from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake_rows, fake_stream
from dsa.cute.quantize import GROUP, quantize, round_to
from dsa.cute.reductions import warp_reduce_sum
from dsa.cute.registers import converted, filled, loaded, sum_in_order
from dsa.cute.sm90 import WARP, opaque, thread_and_cta
from dsa.kernels.elementwise.hyper_arithmetic import (
    COUNT,
    INDEPENDENT_COUNT,
    WORDS,
    add_squares,
    independent_post,
    numbers_of,
    post_and_comb,
    shared_by_shuffles,
    sigmoid,
    weighted_sum,
)
from dsa.kernels.elementwise.limits import HYPER_NORM_TILES, HYPER_STREAMS, INDEPENDENT_NORM_TILES
from dsa.runtime.compile_cache import Variants, cached, compile_sm90

VECTOR = 8  # channels in 16 bytes
MAX_TOKENS = 4  # per CTA
CTAS = 1024  # about two waves; with more tokens than this, a CTA gets up to MAX_TOKENS tokens
STREAMS_BARRIER, NORM_BARRIER = 1, 2  # named barriers


class HyperCollapseNormCastSm90:
    """threads: threads per CTA of the separate collapse kernel (hyper_connections_sm90). lanes, vectors: threads per
    row and vectors per thread of the separate norm kernel (rms_norm_sm90). use_ue8m0: whether the cast's scales are
    powers of two. If comb is None, the streams are independent: mix and base contain the elements of pre and post, and
    iterations is None. Otherwise magnitude is None."""

    def __init__(self, threads: int, lanes: int, vectors: int, use_ue8m0: bool):
        self.lanes, self.vectors, self.use_ue8m0 = lanes, vectors, use_ue8m0
        self.shares, self.warps, self.all_warps = threads // lanes, lanes // WARP, threads // WARP
        self.threads = lanes + WARP

    @cute.jit
    def __call__(
        self,
        streams: cute.Tensor,
        mix: cute.Tensor,
        base: cute.Tensor,
        scale: cute.Tensor,
        weight: cute.Tensor,
        y: cute.Tensor,
        q: cute.Tensor,
        q_scale: cute.Tensor,
        post: cute.Tensor,
        comb: cute.Tensor | None,
        iterations: Int32 | None,
        eps: Float32,
        hc_eps: Float32,
        norm_eps: Float32,
        magnitude: Float32 | None,
        stream,
    ):
        tokens = streams.shape[0]
        together = cutlass.min(cute.ceil_div(tokens, CTAS), MAX_TOKENS)
        of_streams = Float32(1.0) / Float32(HYPER_STREAMS * streams.shape[2])
        of_row = Float32(1.0) / Float32(streams.shape[2])
        self.kernel(
            *(streams, mix, base, scale, weight, y, q, q_scale, post, comb),
            *(together, iterations, of_streams, of_row, eps, hc_eps, norm_eps, magnitude),
        ).launch(
            grid=(cute.ceil_div(tokens, together), 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        streams: cute.Tensor,
        mix: cute.Tensor,
        base: cute.Tensor,
        scale: cute.Tensor,
        weight: cute.Tensor,
        y: cute.Tensor,
        q: cute.Tensor,
        q_scale: cute.Tensor,
        post: cute.Tensor,
        comb: cute.Tensor | None,
        together: Int32,
        iterations: Int32 | None,
        of_streams: Float32,
        of_row: Float32,
        eps: Float32,
        hc_eps: Float32,
        norm_eps: Float32,
        magnitude: Float32 | None,
    ):
        tid, block = thread_and_cta()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.memory.SmemAllocator()
        squares = smem.allocate_tensor(Float32, cute.make_layout((self.all_warps, MAX_TOKENS)), 16)
        logits = smem.allocate_tensor(Float32, cute.make_layout((2 * HYPER_STREAMS, MAX_TOKENS)), 16)
        sums = smem.allocate_tensor(Float32, cute.make_layout((max(self.warps, 4), MAX_TOKENS)), 16)
        sums = cute.local_tile(sums, (self.warps, MAX_TOKENS), (0, 0))
        first = block * together
        count = cutlass.min(together, streams.shape[0] - first)
        if tid == 0 and block == 0:
            prefetch_to_l2(Int64(weight.iterator.toint()), weight.shape[0] * 4)
            prefetch_to_l2(Int64(base.iterator.toint()), Int32(base.shape[0] * 4))
            cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[Int64(scale.iterator.toint())])
        wait_for_prerequisite_grids()
        if warp == self.warps:
            given = mix, base, scale, logits, squares, post, comb, first, count
            self.mixing(*given, iterations, of_streams, eps, hc_eps, magnitude)
        else:
            # This is 0, but the compiler cannot know it (see `weighted_sum`).
            zero = Uint32(together >> 8)
            # Without `opaque`, values computed from tid would stay in registers across tokens.
            for i in cutlass.range(count, unroll=1):
                x = self.collapse(
                    *(streams, logits[None, i], squares[None, i], first + i, of_streams, zero, eps, hc_eps, opaque(tid))
                )
                self.norm_and_cast(
                    *(x, weight, y, q, q_scale, sums[None, i], first + i, of_row, norm_eps, opaque(tid)),
                    padded=comb is None,
                )

    @cute.jit
    def mixing(
        self, mix, base, scale, logits, squares, post, comb, first, count, iterations, share, eps, hc_eps, magnitude
    ):
        """The extra warp's role: compute post and comb, one token per lane. For pre, which the other warps compute,
        write four products mix * scale and then four elements of base to `logits`."""
        lane = cute.arch.lane_idx()
        own = cutlass.min(lane, count - 1)
        numbers, bias = loaded(mix[first + own, None]), loaded(base)
        parts = scale.shape[0]
        scales = cute.make_rmem_tensor((parts,), Float32)
        for i in cutlass.range_constexpr(parts):
            scales[i] = scale[i]
        if lane < count:
            for k in cutlass.range_constexpr(HYPER_STREAMS):
                logits[k, lane], logits[HYPER_STREAMS + k, lane] = numbers[k] * scales[0], bias[k]
        for _ in cutlass.range(count, unroll=1):
            cute.arch.barrier(barrier_id=STREAMS_BARRIER, number_of_threads=self.threads)
        inverse = self.inverse(squares[None, own], share, eps)
        if const_expr(comb is None):
            given = independent_post(numbers, bias, scales, inverse, magnitude, hc_eps)
            if lane < count:
                cute.autovec_copy(given, post[first + lane, None])
        else:
            given, weights = post_and_comb(numbers, bias, scales, inverse, iterations, hc_eps)
            if lane < count:
                cute.autovec_copy(given, post[first + lane, None])
                cute.autovec_copy(weights, comb[first + lane, None])

    @cute.jit
    def inverse(self, squares, of_streams, eps):
        """Return 1 / sqrt(mean square of the token's streams + eps). `squares` contains one sum for each warp of the
        separate collapse kernel. They are added in the order of that kernel."""
        values = loaded(squares)
        for log in cutlass.range_constexpr(self.all_warps.bit_length() - 1):
            for i in cutlass.range_constexpr(0, self.all_warps, 2 << log):
                values[i] = values[i] + values[i + (1 << log)]
        return cute.math.rsqrt(values[0] * of_streams + eps)

    @cute.jit
    def collapse(self, streams, logits, squares, t, of_streams, zero, eps, hc_eps, tid) -> cute.Tensor:
        """-> this thread's bf16 elements of x of token t, as words [4, vectors]. Each warp writes its sums of squares
        to `squares`. After the barrier, `squares` and `logits` from `mixing` are complete."""
        vectors = streams.shape[2] // VECTOR
        words = filled((WORDS, HYPER_STREAMS, self.vectors), 0, Uint32)
        starts = [cute.local_tile(streams[t, k, None], (VECTOR,), (tid,)) for k in range(HYPER_STREAMS)]
        for n in cutlass.range_constexpr(self.vectors):
            if tid + n * self.lanes < vectors:
                for k in cutlass.range_constexpr(HYPER_STREAMS):
                    source = cute.make_tensor(starts[k].iterator + n * self.lanes * VECTOR, starts[k].layout)
                    cute.autovec_copy(cute.recast_tensor(source, Uint32), words[None, k, n])
        for share in cutlass.range_constexpr(self.shares):
            sums = filled((HYPER_STREAMS,), 0.0)
            for n in cutlass.range_constexpr(share, self.vectors, self.shares):
                for w in cutlass.range_constexpr(WORDS):
                    for k in cutlass.range_constexpr(HYPER_STREAMS):
                        sums[k] = add_squares(sums[k], words[w, k, n], BFloat16)
            square = warp_reduce_sum((sums[0] + sums[1]) + (sums[2] + sums[3]))
            if tid % WARP == 0:
                squares[share * self.warps + tid // WARP] = square
        cute.arch.barrier(barrier_id=STREAMS_BARRIER, number_of_threads=self.threads)
        inverse = self.inverse(squares, of_streams, eps)
        own = tid & (HYPER_STREAMS - 1)
        pre = shared_by_shuffles(sigmoid(logits[own] * inverse + logits[HYPER_STREAMS + own]) + hc_eps)
        x = cute.make_rmem_tensor((WORDS, self.vectors), Uint32)
        for n in cutlass.range_constexpr(self.vectors):
            packed = weighted_sum(words[None, None, n], pre, BFloat16, zero)
            x[None, n].store(cute.recast_tensor(packed, Uint32).load())
        return x

    @cute.jit
    def norm_and_cast(self, x, weight, y, q, q_scale, sums, t, of_row, eps, tid, padded: cutlass.Constexpr):
        """padded: whether q_scale may have more columns than a row has groups of channels, up to a multiple of 4"""
        vectors = weight.shape[0] // VECTOR
        square = Float32(0.0)
        for n in cutlass.range_constexpr(self.vectors):
            for w in cutlass.range_constexpr(WORDS):
                square = add_squares(square, x[w, n], BFloat16)
        inverse = cute.math.rsqrt(self.sum_of_row(square, sums, tid) * of_row + eps)
        gain = filled((VECTOR, self.vectors), 0.0)
        for n in cutlass.range_constexpr(self.vectors):
            at = tid + n * self.lanes
            if at < vectors:
                cute.autovec_copy(cute.local_tile(weight, (VECTOR,), (at,)), gain[None, n])
        for n in cutlass.range_constexpr(self.vectors):
            at = tid + n * self.lanes
            values = cute.make_rmem_tensor((VECTOR,), Float32)
            for w in cutlass.range_constexpr(WORDS):
                v = numbers_of(x[w, n], BFloat16)
                for i in cutlass.range_constexpr(2):
                    values[2 * w + i] = v[i] * inverse * gain[2 * w + i, n]
            packed = converted(values, BFloat16)
            round_to(values, BFloat16)
            own_scale = quantize(values, VECTOR, self.use_ue8m0)
            quantized = converted(values, Float8E4M3FN)
            if at < vectors:
                cute.autovec_copy(packed, cute.local_tile(y[t, None], (VECTOR,), (at,)))
                cute.autovec_copy(quantized, cute.local_tile(q[t, None], (VECTOR,), (at,)))
                if const_expr(not padded):
                    if tid % (GROUP // VECTOR) == 0:
                        q_scale[t, at * VECTOR // GROUP] = own_scale
            if const_expr(padded):  # the columns that pad the scales belong to vectors of zeros
                if tid % (GROUP // VECTOR) == 0 and at * VECTOR < q_scale.shape[1] * GROUP:
                    q_scale[t, at * VECTOR // GROUP] = own_scale

    @cute.jit
    def sum_of_row(self, x: Float32, sums: cute.Tensor, tid: Int32) -> Float32:
        """Return the sum of x over the row's threads, with the same bits in all of them."""
        total = warp_reduce_sum(x)
        if const_expr(self.warps > 1):
            if tid % WARP == 0:
                sums[tid // WARP] = total
            cute.arch.barrier(barrier_id=NORM_BARRIER, number_of_threads=self.lanes)
            total = sum_in_order(loaded(sums))
        return total


@cached
def compile_hyper_collapse_norm_cast(threads: int, lanes: int, vectors: int, use_ue8m0: bool):
    """-> f(streams [T, 4, D] bf16, mix [T, 24], base [24], scale [3], weight [D] fp32, y [T, D] bf16, q [T, D] e4m3,
    q_scale [T, D / 128], post [T, 4], comb [T, 16] fp32, iterations, eps, hc_eps, norm_eps, None); T, iterations > 0,
    D a multiple of 128 and at most lanes * vectors 16-byte vectors. y, q, q_scale, post and comb are results. Rows of
    all tensors but scale and q_scale start at multiples of 16 bytes."""
    tokens, channels, groups = cute.sym_int(), cute.sym_int(divisibility=GROUP), cute.sym_int()
    return compile_sm90(
        HyperCollapseNormCastSm90(threads, lanes, vectors, use_ue8m0),
        fake_rows(BFloat16, tokens, HYPER_STREAMS, channels),
        fake_rows(Float32, tokens, COUNT),
        fake_rows(Float32, COUNT),
        fake_rows(Float32, 3, align=4),
        fake_rows(Float32, channels),
        fake_rows(BFloat16, tokens, channels),
        fake_rows(Float8E4M3FN, tokens, channels),
        fake_rows(Float32, tokens, groups, align=4),
        fake_rows(Float32, tokens, HYPER_STREAMS),
        fake_rows(Float32, tokens, HYPER_STREAMS * HYPER_STREAMS),
        *(Int32(1), Float32(0.0), Float32(0.0), Float32(0.0), None),
        fake_stream(),
    )


@cached
def compile_hyper_collapse_independent_norm_cast(threads: int, lanes: int, vectors: int, use_ue8m0: bool):
    """-> f(streams [T, 4, D] bf16, mix [T, 8], base [8], scale [2], weight [D] fp32, y [T, D] bf16, q [T, D] e4m3,
    q_scale [T, D / 128 or 4 ceil(D / 512)], post [T, 4] fp32, None, None, eps, hc_eps, norm_eps, magnitude); T > 0. y,
    q, q_scale and post are results. D and the rows as in `compile_hyper_collapse_norm_cast`."""
    tokens, channels, groups = cute.sym_int(), cute.sym_int(divisibility=GROUP), cute.sym_int()
    return compile_sm90(
        HyperCollapseNormCastSm90(threads, lanes, vectors, use_ue8m0),
        fake_rows(BFloat16, tokens, HYPER_STREAMS, channels),
        fake_rows(Float32, tokens, INDEPENDENT_COUNT),
        fake_rows(Float32, INDEPENDENT_COUNT),
        fake_rows(Float32, 2, align=4),
        fake_rows(Float32, channels),
        fake_rows(BFloat16, tokens, channels),
        fake_rows(Float8E4M3FN, tokens, channels),
        fake_rows(Float32, tokens, groups, align=4),
        fake_rows(Float32, tokens, HYPER_STREAMS),
        *(None, None, Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)),
        fake_stream(),
    )


def shipped_variants() -> Variants:
    return [
        (function, (*tile, use_ue8m0))
        for function, tiles in (
            (compile_hyper_collapse_norm_cast, HYPER_NORM_TILES),
            (compile_hyper_collapse_independent_norm_cast, INDEPENDENT_NORM_TILES),
        )
        for tile in tiles
        for use_ue8m0 in (True, False)
    ]
