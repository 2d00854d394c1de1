"""Hyper-connections: collapse four residual streams into a sublayer's input, and expand the sublayer's output to four
new streams. DeepSeek-V4's mix the streams by a matrix, comb; Hy4's streams are independent and have no comb.

Plan, collapse
- A CTA processes one token at a time. Its threads load all four streams into registers, 16 bytes per load, and use them
  twice: for the mean square and for the weighted sum. So streams are read once. The warps' sums of squares are added
  through shared memory.
- pre has four elements. When the mean square is ready, each lane computes element lane % 4, and the lanes of each warp
  exchange the four elements by shuffles.
- At the end, the first warp computes post and comb, one token per lane. Sinkhorn's chain of reciprocals has a latency
  of over a microsecond. So with more than CTAS tokens, a CTA has up to MAX_TOKENS tokens, and this latency occurs once
  for all of them.
Plan, expand
- A thread loads 16 bytes of a token's sublayer output and of each of the token's four streams, and computes 16 bytes of
  each new stream.
Independent streams: without comb, nothing follows the mean square but four sigmoids. All other parts are the same.
Shared memory: in collapse, one sum per warp and token, and per token the reciprocal of the root mean square.
Constraints: four streams, D a multiple of 8, rows at multiples of 16 bytes; in collapse, D at most 2048 vectors of 16
bytes.
Roofline: bound by memory, 5 D elements per token in collapse and 9 D in expand. With few tokens, collapse is bound by
the latency of memory, of the sum over the CTA and of 40 dependent reciprocals (with 20 iterations).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake_rows, fake_stream
from dsa.cute.reductions import reduce_sum, warp_reduce_sum
from dsa.cute.registers import converted, filled, loaded
from dsa.cute.sm90 import WARP, opaque, thread_and_cta
from dsa.kernels.elementwise.hyper_arithmetic import (
    COUNT,
    INDEPENDENT_COUNT,
    WORDS,
    add_squares,
    independent_post,
    independent_stream,
    new_stream,
    post_and_comb,
    shared_by_shuffles,
    sigmoid,
    weighted_sum,
)
from dsa.kernels.elementwise.limits import CHANNEL_MULTIPLE, DTYPES, HYPER_STREAMS, HYPER_TILES
from dsa.runtime.compile_cache import Variants, cached, compile_sm90

MAX_TOKENS = 4  # per CTA of collapse
CTAS = 1024  # of collapse, about two waves; with more tokens than this, a CTA gets up to MAX_TOKENS tokens
# Shared-memory carveout in percent, far more than collapse needs. Without it, and with several CTAs per SM, the DSL
# asks a CUDA driver for the SM's limit, so compiling would need a driver.
SHARED_MEMORY_PERCENT = 10
EXPAND_THREADS = 128


class HyperCollapseSm90:
    """The collapse. If post and comb are None, the kernel collapses the streams for the model's head. mix and base then
    contain only pre's elements, and a CTA has only one token. If only comb is None, the streams are independent: mix
    and base contain the elements of pre and post, and iterations is None. Otherwise magnitude is None."""

    def __init__(self, dtype: type[cutlass.Numeric], threads: int, steps: int):
        self.dtype, self.threads, self.steps = dtype, threads, steps
        self.width, self.warps = 128 // dtype.width, threads // WARP
        # A thread with 8 vectors of streams (32 registers) gets 64 registers, and a thread with 16 vectors gets 128.
        self.ctas = 2048 // (threads * steps)

    @cute.jit
    def __call__(
        self,
        streams: cute.Tensor,
        mix: cute.Tensor,
        base: cute.Tensor,
        scale: cute.Tensor,
        x: cute.Tensor,
        post: cute.Tensor | None,
        comb: cute.Tensor | None,
        iterations: Int32 | None,
        eps: Float32,
        hc_eps: Float32,
        magnitude: Float32 | None,
        stream,
    ):
        tokens = streams.shape[0]
        most = 1 if const_expr(post is None) else MAX_TOKENS
        together = cutlass.min(cute.ceil_div(tokens, CTAS), most)
        share = Float32(1.0) / Float32(HYPER_STREAMS * streams.shape[2])
        sizes = together, iterations, share, eps, hc_eps, magnitude
        self.kernel(streams, mix, base, scale, x, post, comb, *sizes).launch(
            grid=(cute.ceil_div(tokens, together), 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.ctas,
            preferred_smem_carveout=SHARED_MEMORY_PERCENT,
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
        x: cute.Tensor,
        post: cute.Tensor | None,
        comb: cute.Tensor | None,
        together: Int32,
        iterations: Int32 | None,
        share: Float32,
        eps: Float32,
        hc_eps: Float32,
        magnitude: Float32 | None,
    ):
        tid, block = thread_and_cta()
        smem = cutlass.memory.SmemAllocator()
        sums = smem.allocate_tensor(Float32, cute.make_layout((self.warps, MAX_TOKENS)))
        scales = smem.allocate_tensor(Float32, cute.make_layout(MAX_TOKENS))
        first = block * together
        # This is 0, but the compiler cannot know it (see `weighted_sum`).
        zero = Uint32(together >> 8)
        wait_for_prerequisite_grids()
        if const_expr(post is None):
            self.collapse(streams, mix, base, scale, x, sums[None, 0], first, share, zero, eps, hc_eps, tid)
        else:
            i = Int32(0)
            # These bounds are in uniform registers. A precomputed number of tokens would take a register in each
            # thread.
            while i < together and first + i < streams.shape[0]:
                # Without `opaque`, values computed from tid would stay in registers across tokens.
                own = opaque(tid)
                inverse = self.collapse(
                    streams, mix, base, scale, x, sums[None, i], first + i, share, zero, eps, hc_eps, own
                )
                if tid == 0:
                    scales[i] = inverse
                i += 1
            cute.arch.sync_warp()
            if tid < i:
                t = first + tid
                if const_expr(comb is None):
                    given = independent_post(mix[t, None], base, scale, scales[tid], magnitude, hc_eps)
                    cute.autovec_copy(given, post[t, None])
                else:
                    given, weights = post_and_comb(mix[t, None], base, scale, scales[tid], iterations, hc_eps)
                    cute.autovec_copy(given, post[t, None])
                    cute.autovec_copy(weights, comb[t, None])

    @cute.jit
    def collapse(self, streams, mix, base, scale, x, sums, t, share, zero, eps, hc_eps, tid):
        """Compute and store x of token t, and return 1 / sqrt(mean square of the token's streams + eps). Each warp
        writes its sum of squares to `sums`. Every token of a CTA has separate `sums`, so no barrier is needed before
        the next token."""
        vectors = streams.shape[2] // self.width
        # Load 32-bit words, because 16-bit elements that are loaded conditionally would take a register each.
        words = filled((WORDS, HYPER_STREAMS, self.steps), 0, Uint32)
        for s in cutlass.range_constexpr(self.steps):
            if tid + s * self.threads < vectors:
                for k in cutlass.range_constexpr(HYPER_STREAMS):
                    source = cute.local_tile(streams[t, k, None], (self.width,), (tid + s * self.threads,))
                    cute.autovec_copy(cute.recast_tensor(source, Uint32), words[None, k, s])
        number, bias = mix[t, tid & (HYPER_STREAMS - 1)] * scale[0], base[tid & (HYPER_STREAMS - 1)]
        squares = filled((HYPER_STREAMS,), 0.0)
        for s in cutlass.range_constexpr(self.steps):
            for k in cutlass.range_constexpr(HYPER_STREAMS):
                for n in cutlass.range_constexpr(WORDS):
                    squares[k] = add_squares(squares[k], words[n, k, s], self.dtype)
        square = warp_reduce_sum((squares[0] + squares[1]) + (squares[2] + squares[3]))
        if tid & (WARP - 1) == 0:
            sums[tid >> 5] = square
        cute.arch.sync_threads()
        square = reduce_sum(sums[tid & (self.warps - 1)], self.warps)
        inverse = cute.math.rsqrt(square * share + eps)
        pre = shared_by_shuffles(sigmoid(number * inverse + bias) + hc_eps)
        for s in cutlass.range_constexpr(self.steps):
            packed = weighted_sum(words[None, None, s], pre, self.dtype, zero)
            if tid + s * self.threads < vectors:
                cute.autovec_copy(packed, cute.local_tile(x[t, None], (self.width,), (tid + s * self.threads,)))
        return inverse


class HyperExpandSm90:
    """The expansion. If comb is None, the streams are independent."""

    def __init__(self, dtype: type[cutlass.Numeric]):
        self.dtype, self.width = dtype, 128 // dtype.width

    @cute.jit
    def __call__(
        self,
        y: cute.Tensor,
        streams: cute.Tensor,
        post: cute.Tensor,
        comb: cute.Tensor | None,
        out: cute.Tensor,
        stream,
    ):
        vectors = y.shape[1] // self.width
        total = y.shape[0] * vectors
        divisor = cute.fast_divmod_create_divisor_v2(vectors)
        self.kernel(y, streams, post, comb, out, divisor, total).launch(
            grid=(cute.ceil_div(total, EXPAND_THREADS), 1, 1), block=(EXPAND_THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        y: cute.Tensor,
        streams: cute.Tensor,
        post: cute.Tensor,
        comb: cute.Tensor | None,
        out: cute.Tensor,
        divisor: cute.FastDivmodDivisorV2,
        total: Int32,
    ):
        tid, block = thread_and_cta()
        index = block * EXPAND_THREADS + tid
        wait_for_prerequisite_grids()
        if index < total:
            t, at = divmod(index, divisor)
            raw = cute.make_rmem_tensor((self.width, HYPER_STREAMS + 1), self.dtype)
            for j in cutlass.range_constexpr(HYPER_STREAMS):
                cute.autovec_copy(cute.local_tile(streams[t, j, None], (self.width,), (at,)), raw[None, j])
            cute.autovec_copy(cute.local_tile(y[t, None], (self.width,), (at,)), raw[None, HYPER_STREAMS])
            given = loaded(post[t, None])
            weights = None if const_expr(comb is None) else loaded(comb[t, None])
            for k in cutlass.range_constexpr(HYPER_STREAMS):
                if const_expr(comb is None):
                    acc = independent_stream(raw[None, HYPER_STREAMS], raw[None, k], given[k])
                else:
                    of_stream = cute.make_tensor(
                        weights.iterator + k, cute.make_layout(HYPER_STREAMS, stride=HYPER_STREAMS)
                    )
                    acc = new_stream(raw[None, HYPER_STREAMS], raw, given[k], of_stream)
                cute.autovec_copy(converted(acc, self.dtype), cute.local_tile(out[t, k, None], (self.width,), (at,)))


@cached
def compile_hyper_collapse(dtype: str, threads: int, steps: int):
    """-> f(streams [T, 4, D] dtype, mix [T, 24], base [24], scale [3] fp32, x [T, D] dtype, post [T, 4], comb [T, 16]
    fp32, iterations, eps, hc_eps, None); T, iterations > 0, D at most threads * steps 16-byte vectors. x, post and
    comb are results. Rows of all tensors but scale start at multiples of 16 bytes."""
    element, tokens, channels = cute_dtype(dtype), cute.sym_int(), cute.sym_int(divisibility=CHANNEL_MULTIPLE)
    return compile_sm90(
        HyperCollapseSm90(element, threads, steps),
        fake_rows(element, tokens, HYPER_STREAMS, channels),
        fake_rows(Float32, tokens, COUNT),
        fake_rows(Float32, COUNT),
        fake_rows(Float32, 3, align=4),
        fake_rows(element, tokens, channels),
        fake_rows(Float32, tokens, HYPER_STREAMS),
        fake_rows(Float32, tokens, HYPER_STREAMS * HYPER_STREAMS),
        *(Int32(1), Float32(0.0), Float32(0.0), None),
        fake_stream(),
    )


@cached
def compile_hyper_collapse_independent(dtype: str, threads: int, steps: int):
    """-> f(streams [T, 4, D] dtype, mix [T, 8], base [8], scale [2] fp32, x [T, D] dtype, post [T, 4] fp32, None, None,
    eps, hc_eps, magnitude); T > 0, D at most threads * steps 16-byte vectors. x and post are results. Rows of all
    tensors but scale start at multiples of 16 bytes."""
    element, tokens, channels = cute_dtype(dtype), cute.sym_int(), cute.sym_int(divisibility=CHANNEL_MULTIPLE)
    return compile_sm90(
        HyperCollapseSm90(element, threads, steps),
        fake_rows(element, tokens, HYPER_STREAMS, channels),
        fake_rows(Float32, tokens, INDEPENDENT_COUNT),
        fake_rows(Float32, INDEPENDENT_COUNT),
        fake_rows(Float32, 2, align=4),
        fake_rows(element, tokens, channels),
        fake_rows(Float32, tokens, HYPER_STREAMS),
        *(None, None, Float32(0.0), Float32(0.0), Float32(0.0)),
        fake_stream(),
    )


@cached
def compile_hyper_head(dtype: str, threads: int, steps: int):
    """-> f(streams [T, 4, D] dtype, mix [T, 4], base [4], scale [1] fp32, x [T, D] dtype, None, None, 1, eps, hc_eps,
    None); T > 0, D at most threads * steps 16-byte vectors. Rows of all tensors but scale start at multiples of 16
    bytes."""
    element, tokens, channels = cute_dtype(dtype), cute.sym_int(), cute.sym_int(divisibility=CHANNEL_MULTIPLE)
    return compile_sm90(
        HyperCollapseSm90(element, threads, steps),
        fake_rows(element, tokens, HYPER_STREAMS, channels),
        fake_rows(Float32, tokens, HYPER_STREAMS),
        fake_rows(Float32, HYPER_STREAMS),
        fake_rows(Float32, 1, align=4),
        fake_rows(element, tokens, channels),
        *(None, None, Int32(1), Float32(0.0), Float32(0.0), None),
        fake_stream(),
    )


@cached
def compile_hyper_expand(dtype: str, mixed: bool):
    """-> f(y [T, D], streams [T, 4, D] dtype, post [T, 4], comb [T, 16] fp32, out [T, 4, D] dtype); T, D > 0. Rows
    start at multiples of 16 bytes. mixed: whether there is a comb, else f takes None."""
    element, tokens, channels = cute_dtype(dtype), cute.sym_int(), cute.sym_int(divisibility=CHANNEL_MULTIPLE)
    return compile_sm90(
        HyperExpandSm90(element),
        fake_rows(element, tokens, channels),
        fake_rows(element, tokens, HYPER_STREAMS, channels),
        fake_rows(Float32, tokens, HYPER_STREAMS),
        fake_rows(Float32, tokens, HYPER_STREAMS * HYPER_STREAMS) if mixed else None,
        fake_rows(element, tokens, HYPER_STREAMS, channels),
        fake_stream(),
    )


def shipped_variants() -> Variants:
    return [
        *((compile_hyper_collapse, (dtype, *tile)) for dtype in DTYPES for tile in HYPER_TILES),
        *((compile_hyper_collapse_independent, (dtype, *tile)) for dtype in DTYPES for tile in HYPER_TILES),
        *((compile_hyper_head, (dtype, *tile)) for dtype in DTYPES for tile in HYPER_TILES),
        *((compile_hyper_expand, (dtype, mixed)) for dtype in DTYPES for mixed in (True, False)),
    ]
