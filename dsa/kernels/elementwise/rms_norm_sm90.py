"""RMSNorm of rows: y = x / sqrt(mean(x^2) + eps) * weight. Optionally, x is the sum of two inputs, y is also cast to
FP8, or y is rotated (RoPE).

Plan
- `lanes` threads (a part of a warp, or several warps) process a row in vectors of 16 bytes. Thread i has the vectors i,
  i + lanes, ..., up to `vectors` of them, in registers from the load to the store. So the row is read once and written
  once.
- A thread issues all loads, including those of the weights, before the sum needs the first value. So a single row costs
  one round trip to memory. Only the longest rows leave no registers for the weights, which are then loaded one vector
  at a time after the sum. For later rows on the same SM the weights are in L1.
- With a residual, x is first replaced by residual + x, rounded to their dtype. This sum is also stored.
- With a cast, a group of 128 channels is in adjacent lanes of one warp. These lanes compute the group's amax and scale
  by shuffles from the rounded y, so the result is exactly `per_token_cast_to_fp8_sm90` of y.
- With RoPE, the last R channels of y are rotated. A thread loads the cosines and sines for its vectors together with
  the row. Pairs are adjacent channels, so a thread has both channels. y is rounded before and after the rotation, so
  the result is exactly `rotary_sm90` of y.
- Squares are added in a fixed order: in the thread, by a shuffle tree in the warp, and then warp by warp through shared
  memory, where all threads add the same numbers in the same order. So the bits are the same in every run, and a row's
  bits do not depend on other rows.
- Vectors past the row's end are not loaded and count as zeros. x is [A, B, D], and the strides of A and B are
  arbitrary: a division with precomputed numbers gives a row's two indices, and offsets have 64 bits.
Shared memory: one number per warp, if several warps process a row. Constraints: rows at multiples of 16 bytes, D a
multiple of 8 and at most `max_channels`. With a cast, D is a multiple of 128 and lanes >= 32. With RoPE, R is a
multiple of 8 and lanes <= 32.
Roofline: bound by memory, 2 D elements per row, 2 D more with a residual, D bytes more with a cast. About 5
instructions per channel take a fifth of the issue slots in that time.
"""

import functools
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, const_expr

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake_rows, fake_stream
from dsa.cute.quantize import GROUP, quantize, round_to
from dsa.cute.reductions import reduce_sum
from dsa.cute.registers import converted, filled, load_vectors, loaded, sum_in_order
from dsa.cute.rounded import rotate_pair
from dsa.cute.sm90 import WARP, thread_and_cta
from dsa.kernels.elementwise.limits import CHANNEL_MULTIPLE, DTYPES
from dsa.runtime.compile_cache import Variants, cached, compile_sm90

VECTOR_BITS = 128
MAX_EARLY = 4  # with up to this many vectors per thread, x and the weights both fit in registers


@dataclass(frozen=True)
class NormConfig:
    """lanes: threads per row. vectors: number of 16-byte vectors for which a thread has registers. threads: threads per
    CTA, a multiple of lanes."""

    lanes: int
    vectors: int
    threads: int


# Sorted by the longest row that a configuration supports, in ascending order.
CONFIGS = (
    NormConfig(8, 2, 128),
    NormConfig(32, 2, 128),
    NormConfig(32, 4, 128),
    NormConfig(64, 4, 64),
    NormConfig(128, 4, 128),
    NormConfig(256, 4, 256),
    NormConfig(512, 4, 512),
    NormConfig(512, 8, 512),
)
# Configurations for the cast: a group of 128 channels is in one warp, and the weights fit in registers.
CAST_CONFIGS = tuple(config for config in CONFIGS if config.lanes >= WARP and config.vectors <= MAX_EARLY)
# Configurations for RoPE: their threads have registers for cosines and sines as well.
ROTARY_CONFIGS = tuple(config for config in CONFIGS if config.lanes <= WARP)


class RmsNormSm90:
    """use_ue8m0: whether the cast's scales are powers of two."""

    def __init__(self, dtype: type[cutlass.Numeric], config: NormConfig, use_ue8m0: bool = True):
        self.width = VECTOR_BITS // dtype.width
        self.lanes, self.vectors, self.threads = config.lanes, config.vectors, config.threads
        self.rows_of_cta = config.threads // config.lanes
        self.warps = config.lanes // WARP  # per row; 0 if less than a warp processes a row
        self.early = config.vectors <= MAX_EARLY
        self.use_ue8m0 = use_ue8m0

    @cute.jit
    def __call__(self, x: cute.Tensor, weight: cute.Tensor | None, out: cute.Tensor, eps: Float32, stream):
        self.launch(x, None, weight, None, out, None, None, None, None, eps, stream)

    @cute.jit
    def launch(self, x, residual, weight, total, out, q, scale, cos, sin, eps: Float32, stream):
        """x, residual, total (for residual + x), out and q (for out cast to FP8) are [A, B, D]. Arguments that an
        operation does not need are None. With a cast, A is 1 and scale is [B, D / 128]. With RoPE, cos and sin are [A,
        R / 2]."""
        rows = x.shape[0] * x.shape[1]
        inner = cute.fast_divmod_create_divisor_v2(x.shape[1])
        share = Float32(1.0) / Float32(x.shape[2])
        self.kernel(x, residual, weight, total, out, q, scale, cos, sin, eps, share, inner, rows).launch(
            grid=(cute.ceil_div(rows, self.rows_of_cta), 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        residual: cute.Tensor | None,
        weight: cute.Tensor | None,
        total: cute.Tensor | None,
        out: cute.Tensor,
        q: cute.Tensor | None,
        scale: cute.Tensor | None,
        cos: cute.Tensor | None,
        sin: cute.Tensor | None,
        eps: Float32,
        share: Float32,
        inner: cute.FastDivmodDivisorV2,
        rows: Int32,
    ):
        tid, block = thread_and_cta()
        lane, row = tid % self.lanes, block * self.rows_of_cta + tid // self.lanes
        a, b = divmod(cutlass.min(row, rows - 1), inner)
        vectors_of_row = x.shape[2] // self.width
        wait_for_prerequisite_grids()
        raw = filled((self.width, self.vectors), 0.0, x.element_type)
        gain = filled((self.width, self.vectors if self.early else 1), 0.0)
        load_vectors(x[a, b, None], raw, lane, self.lanes, vectors_of_row)
        if const_expr(residual is not None):
            earlier = filled((self.width, self.vectors), 0.0, x.element_type)
            load_vectors(residual[a, b, None], earlier, lane, self.lanes, vectors_of_row)
        if const_expr(weight is not None and self.early):
            load_vectors(weight, gain, lane, self.lanes, vectors_of_row)
        if const_expr(cos is not None):
            # RoPE rotates the row's vectors from `first_rotated` on.
            first_rotated = vectors_of_row - 2 * cos.shape[1] // self.width
            c, s = [cute.make_rmem_tensor((self.width // 2, self.vectors), Float32) for _ in range(2)]
            for n in cutlass.range_constexpr(self.vectors):
                at = lane + n * self.lanes
                if at >= first_rotated and at < vectors_of_row:
                    for source, angles in ((cos, c), (sin, s)):
                        part = cute.local_tile(source[a, None], (self.width // 2,), (at - first_rotated,))
                        cute.autovec_copy(part, angles[None, n])

        square = Float32(0.0)
        for n in cutlass.range_constexpr(self.vectors):
            v = converted(raw[None, n], Float32)
            if const_expr(residual is not None):
                v.store(earlier[None, n].load().to(Float32) + v.load())
                round_to(v, x.element_type)
                packed_sum = raw[None, n]
                packed_sum.store(v.load().to(x.element_type))
                at = lane + n * self.lanes
                if at < vectors_of_row and row < rows:
                    cute.autovec_copy(packed_sum, cute.local_tile(total[a, b, None], (self.width,), (at,)))
            for i in cutlass.range_constexpr(self.width):
                square = cute.math.fma(v[i], v[i], square)
        inverse = cute.math.rsqrt(self.sum_of_row(square, tid) * share + eps)

        target = out[a, b, None]
        for n in cutlass.range_constexpr(self.vectors):
            at = lane + n * self.lanes
            if const_expr(weight is not None and not self.early):
                if at < vectors_of_row:
                    cute.autovec_copy(cute.local_tile(weight, (self.width,), (at,)), gain[None, 0])
            v = converted(raw[None, n], Float32)
            for i in cutlass.range_constexpr(self.width):
                v[i] = v[i] * inverse
                if const_expr(weight is not None):
                    v[i] = v[i] * gain[i, n if self.early else 0]
            if const_expr(cos is not None):
                if at >= first_rotated:
                    round_to(v, x.element_type)
                    for i in cutlass.range_constexpr(self.width // 2):
                        v[2 * i], v[2 * i + 1] = rotate_pair(v[2 * i], v[2 * i + 1], c[i, n], s[i, n])
            packed = converted(v, x.element_type)
            if const_expr(q is not None):
                round_to(v, x.element_type)
                own_scale = quantize(v, self.width, self.use_ue8m0)
                bytes_of = converted(v, Float8E4M3FN)
            if at < vectors_of_row and row < rows:
                cute.autovec_copy(packed, cute.local_tile(target, (self.width,), (at,)))
                if const_expr(q is not None):
                    cute.autovec_copy(bytes_of, cute.local_tile(q[a, b, None], (self.width,), (at,)))
                    if lane % (GROUP // self.width) == 0:
                        scale[b, at * self.width // GROUP] = own_scale

    @cute.jit
    def sum_of_row(self, x: Float32, tid: Int32) -> Float32:
        """Return the sum of x over the row's threads, with the same bits in all of them."""
        x = reduce_sum(x, min(self.lanes, WARP))
        if const_expr(self.warps > 1):
            sums = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(self.warps), 16)
            if tid % WARP == 0:
                sums[tid // WARP] = x
            cute.arch.sync_threads()
            x = sum_in_order(loaded(sums))
        return x


class RmsNormRotarySm90(RmsNormSm90):
    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor | None,
        cos: cute.Tensor,
        sin: cute.Tensor,
        out: cute.Tensor,
        eps: Float32,
        stream,
    ):
        self.launch(x, None, weight, None, out, None, None, cos, sin, eps, stream)


class RmsNormCastSm90(RmsNormSm90):
    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        residual: cute.Tensor | None,
        weight: cute.Tensor,
        total: cute.Tensor | None,
        out: cute.Tensor,
        q: cute.Tensor,
        scale: cute.Tensor,
        eps: Float32,
        stream,
    ):
        earlier = None if const_expr(residual is None) else three_dims(residual)
        sums = None if const_expr(total is None) else three_dims(total)
        x, out, q = (three_dims(rows) for rows in (x, out, q))
        self.launch(x, earlier, weight, sums, out, q, scale, None, None, eps, stream)


@cute.jit
def three_dims(x: cute.Tensor) -> cute.Tensor:
    return cute.make_tensor(x.iterator, cute.prepend(x.layout, cute.make_layout(1, stride=0)))


@cached
def compile_rms_norm(dtype: str, weighted: bool, config: NormConfig):
    """-> f(x [A, B, D] dtype, weight [D] fp32 or None, out [A, B, D], eps); 0 < A * B < 2^31 - 16, D a multiple of 8 up
    to `max_channels(dtype, config)`. Rows start at multiples of 16 bytes."""
    element = cute_dtype(dtype)
    outer, inner, dim = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=CHANNEL_MULTIPLE)
    return compile_sm90(
        RmsNormSm90(element, config),
        fake_rows(element, outer, inner, dim),
        fake_rows(Float32, dim) if weighted else None,
        fake_rows(element, outer, inner, dim),
        *(Float32(0.0), fake_stream()),
    )


@cached
def compile_rms_norm_rotary(dtype: str, weighted: bool, config: NormConfig):
    """-> f(x [T, H, D] dtype, weight [D] fp32 or None, cos, sin [T, R / 2] fp32, out [T, H, D], eps); 0 < T * H <
    2^31 - 16, D a multiple of 8 up to `max_channels(dtype, config)`, R a multiple of 8 up to D. Rows start at multiples
    of 16 bytes."""
    element = cute_dtype(dtype)
    tokens, heads, dim = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=CHANNEL_MULTIPLE)
    half = cute.sym_int(divisibility=CHANNEL_MULTIPLE // 2)
    return compile_sm90(
        RmsNormRotarySm90(element, config),
        fake_rows(element, tokens, heads, dim),
        fake_rows(Float32, dim) if weighted else None,
        *(fake_rows(Float32, tokens, half) for _ in range(2)),
        fake_rows(element, tokens, heads, dim),
        *(Float32(0.0), fake_stream()),
    )


@cached
def compile_rms_norm_cast(dtype: str, summed: bool, use_ue8m0: bool, config: NormConfig):
    """-> f(x [T, D] dtype, residual [T, D], weight [D] fp32, total [T, D], out [T, D], q [T, D] e4m3, scale [T, D /
    128] fp32, eps); 0 < T < 2^31 - 16, D a multiple of 128 up to `max_channels(dtype, config)`. residual, total and out
    are of `dtype`; residual and total are None unless `summed`. Rows of all tensors but scale start at multiples of 16
    bytes."""
    element = cute_dtype(dtype)
    rows, dim = cute.sym_int(), cute.sym_int(divisibility=GROUP)
    return compile_sm90(
        RmsNormCastSm90(element, config, use_ue8m0),
        fake_rows(element, rows, dim),
        fake_rows(element, rows, dim) if summed else None,
        fake_rows(Float32, dim),
        fake_rows(element, rows, dim) if summed else None,
        fake_rows(element, rows, dim),
        fake_rows(Float8E4M3FN, rows, dim),
        fake_rows(Float32, rows, cute.sym_int(), align=4),
        *(Float32(0.0), fake_stream()),
    )


def max_channels(dtype: str, config: NormConfig = CONFIGS[-1]) -> int:
    return config.lanes * config.vectors * VECTOR_BITS // cute_dtype(dtype).width


@functools.lru_cache(4096)
def choose_config(dtype: str, channels: int, configs: tuple[NormConfig, ...] = CONFIGS) -> NormConfig:
    return next(config for config in configs if channels <= max_channels(dtype, config))


def shipped_variants() -> Variants:
    plain = [
        (function, (dtype, weighted, config))
        for function, configs in ((compile_rms_norm, CONFIGS), (compile_rms_norm_rotary, ROTARY_CONFIGS))
        for dtype in DTYPES
        for weighted in (True, False)
        for config in configs
    ]
    return plain + [
        (compile_rms_norm_cast, (dtype, summed, use_ue8m0, config))
        for dtype in DTYPES
        for summed in (False, True)
        for use_ue8m0 in (True, False)
        for config in CAST_CONFIGS
    ]
