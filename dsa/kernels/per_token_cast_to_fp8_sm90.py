"""Cast to FP8 e4m3 with one scale per token and 128 channels, optionally after a 128-point Hadamard transform.

Plan
- A group of 128 channels belongs to 128 / V lanes of one warp, each with V consecutive channels in registers.
- A thread serves U groups: it issues the loads of all of them first, so that enough bytes are in flight to fill HBM.
- The Hadamard butterflies of strides below V stay in registers, the rest are one shuffle an element and stride. The
  order of the strides and the fp32 arithmetic are the reference's, so results agree bit for bit.
- amax is a shuffle tree with NaN-propagating maxima; the reference's rule for scales, NaN and infinity holds as it is.
- Group g of the [T, K / 128] grid is row g // (K / 128), by a precomputed divisor. Rows may be strided, 64-bit offsets.
Shared memory: none. Constraints: K a multiple of 128, innermost stride 1, rows aligned to 16 bytes.
Roofline: memory. Per channel 2 bytes in (bf16), 1 + 4 / 128 out; about 6 instructions an element (8 with fp32 scales),
which leaves the issue slots half idle at the copy bandwidth.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Uint32, const_expr

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.dtypes import cute_dtype

GROUP = 128
E4M3_MAX = 448.0
AMAX_MIN = 1e-4
SHORT = 1 << 24  # elements


@dataclass(frozen=True)
class CastConfig:
    """threads: per CTA; channels: V, 8 or 16 a thread; groups: U, how many groups a thread serves."""

    threads: int = 128
    channels: int = 16
    groups: int = 2


@cute.jit
def _hadamard(v: cute.Tensor, lane: Int32, channels: cutlass.Constexpr):
    """v <- H128 v over the group's lanes, times 128^-0.5. Channel index = lane * channels + position in v."""
    for log in cutlass.range_constexpr(7):
        stride = 1 << log
        if const_expr(stride < channels):
            for i in cutlass.range_constexpr(channels):
                if const_expr(i & stride == 0):
                    a, b = v[i], v[i + stride]
                    v[i], v[i + stride] = a + b, a - b
        else:
            lane_bit = stride // channels
            # The upper lane's result is partner - own: flip the own value's sign instead of branching.
            sign = Float32(1.0)
            if lane & lane_bit != 0:
                sign = Float32(-1.0)
            for i in cutlass.range_constexpr(channels):
                partner = cute.arch.shuffle_sync_bfly(v[i], offset=lane_bit)
                v[i] = sign * v[i] + partner
    for i in cutlass.range_constexpr(channels):
        v[i] = v[i] * Float32(GROUP**-0.5)


@cute.jit
def _round_to(v: cute.Tensor, dtype: cutlass.Constexpr):
    """v <- v rounded to dtype, kept as fp32."""
    if const_expr(dtype is BFloat16):
        # Packed by hand: the compiler's own round trip converts one element at a time, at a quarter of the rate.
        for i in cutlass.range_constexpr(0, cute.size(v), 2):
            pair = cute.arch.inline_ptx(
                "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[v[i + 1], v[i]]
            )
            v[i], v[i + 1] = (pair << 16).bitcast(Float32), (pair & Uint32(0xFFFF0000)).bitcast(Float32)
    elif const_expr(dtype is not Float32):
        v.store(v.load().to(dtype).to(Float32))


@cute.jit
def _divide(v: cute.Tensor, scale: Float32):
    """v <- v / scale, correctly rounded (Markstein): a third of the instructions of a division an element.

    With the signs as they stand, -0 stays -0. For an infinite scale the residual must not become 0 * infinity.
    """
    reciprocal = Float32(1.0) / scale
    finite = scale
    if scale == Float32(float("inf")):
        finite = Float32(0.0)
    for i in cutlass.range_constexpr(cute.size(v)):
        quotient = v[i] * reciprocal
        residual = cute.math.fma(quotient, finite, -v[i])
        v[i] = cute.math.fma(-residual, reciprocal, quotient)


@cute.jit
def _div_by_448(amax: Float32) -> Float32:
    """amax / 448, correctly rounded without the division's slow path; infinity and NaN stay."""
    reciprocal = Float32(1.0 / E4M3_MAX)
    quotient = amax * reciprocal
    remainder = cute.math.fma(-quotient, Float32(E4M3_MAX), amax)
    result = amax
    if amax < Float32(float("inf")):
        result = cute.math.fma(remainder, reciprocal, quotient)
    return result


@cute.jit
def _ceil_to_ue8m0(scale: Float32) -> Float32:
    """The next power of two at or above a positive normal number; infinity and NaN stay."""
    bits = scale.bitcast(Uint32)
    up = ((bits + Uint32(0x007FFFFF)) & Uint32(0xFF800000)).bitcast(Float32)
    result = scale
    if scale < Float32(float("inf")):
        result = up
    return result


class PerTokenCastToFp8Sm90:
    def __init__(self, use_ue8m0: bool, hadamard: bool, config: CastConfig):
        self.use_ue8m0 = use_ue8m0
        self.hadamard = hadamard
        self.threads = config.threads
        self.channels = config.channels
        self.unroll = config.groups
        self.lanes = GROUP // config.channels
        self.groups_per_pass = config.threads // self.lanes
        self.groups_per_cta = self.groups_per_pass * config.groups

    @cute.jit
    def __call__(self, x: cute.Tensor, q: cute.Tensor, scale: cute.Tensor, stream):
        groups_per_row = scale.shape[1]
        total = scale.shape[0] * groups_per_row
        self.kernel(x, q, scale, cute.fast_divmod_create_divisor_v2(groups_per_row), total).launch(
            grid=(cute.ceil_div(total, self.groups_per_cta), 1, 1), block=(self.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, x: cute.Tensor, q: cute.Tensor, scale: cute.Tensor, row_groups: cute.FastDivmodDivisorV2, total: Int32
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = tid % self.lanes
        first = block * self.groups_per_cta + tid // self.lanes

        raw = cute.make_rmem_tensor((self.channels, self.unroll), x.element_type)
        rows = [None] * self.unroll
        cols = [None] * self.unroll
        for u in cutlass.range_constexpr(self.unroll):
            # Past the end: read the last group again, and store nothing.
            group = cutlass.min(first + u * self.groups_per_pass, total - 1)
            rows[u], cols[u] = divmod(group, row_groups)
            source = cute.local_tile(x, (1, self.channels), (rows[u], cols[u] * self.lanes + lane))
            cute.autovec_copy(source[0, None], raw[None, u])

        v = cute.make_rmem_tensor((self.channels,), Float32)
        out = cute.make_rmem_tensor((self.channels,), Float8E4M3FN)
        for u in cutlass.range_constexpr(self.unroll):
            v.store(raw[None, u].load().to(Float32))
            if const_expr(self.hadamard):
                _hadamard(v, lane, self.channels)
                _round_to(v, x.element_type)
            amax = Float32(AMAX_MIN)
            for i in cutlass.range_constexpr(self.channels):
                amax = cute.arch.fmax(amax, cute.math.absf(v[i]), nan=True)
            lane_bit = 1
            while const_expr(lane_bit < self.lanes):
                amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, offset=lane_bit), nan=True)
                lane_bit *= 2
            s = _div_by_448(amax)
            if const_expr(self.use_ue8m0):
                s = _ceil_to_ue8m0(s)
                # The approximate reciprocal is exact for powers of two, 0 for infinity and NaN for NaN.
                v.store(v.load() * cute.arch.rcp_approx(s))
            else:
                _divide(v, s)
            out.store(v.load().to(Float8E4M3FN))
            if first + u * self.groups_per_pass < total:
                target = cute.local_tile(q, (1, self.channels), (rows[u], cols[u] * self.lanes + lane))
                cute.autovec_copy(out, target[0, None])
                if lane == 0:
                    scale[rows[u], cols[u]] = s


@cached
def compile_per_token_cast_to_fp8(dtype: str, use_ue8m0: bool, hadamard: bool, config: CastConfig):
    """-> f(x [T, K] dtype, row stride a multiple of 16 bytes; q [T, K] e4m3; scale [T, K / 128] fp32), T * K > 0."""
    element = cute_dtype(dtype)
    aligned = 128 // element.width
    rows, cols, groups = cute.sym_int(), cute.sym_int(divisibility=GROUP), cute.sym_int()
    x = cute.runtime.make_fake_tensor(
        element, (rows, cols), (cute.sym_int64(divisibility=aligned), 1), assumed_align=16
    )
    q = cute.runtime.make_fake_tensor(
        Float8E4M3FN, (rows, cols), (cute.sym_int64(divisibility=GROUP), 1), assumed_align=16
    )
    scale = cute.runtime.make_fake_tensor(Float32, (rows, groups), (cute.sym_int64(), 1), assumed_align=4)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return compile_sm90(PerTokenCastToFp8Sm90(use_ue8m0, hadamard, config), x, q, scale, stream)


def choose_config(dtype: str, elements: int) -> CastConfig:
    """The shipped configuration. Short inputs spread over more CTAs, long ones keep 64 bytes of loads in flight a
    thread (measured: docs/kernel-notes.md)."""
    return CastConfig(groups=1 if dtype == "float32" or elements < SHORT else 2)


def shipped_variants() -> list[tuple]:
    """Every argument tuple of `compile_per_token_cast_to_fp8` that the op can ask for."""
    return [
        (dtype, use_ue8m0, hadamard, config)
        for dtype in ("bfloat16", "float16", "float32")
        for config in sorted({choose_config(dtype, n) for n in (1, SHORT)}, key=str)
        for use_ue8m0 in (True, False)
        for hadamard in (True, False)
    ]
