"""Rotary embedding of heads and their cast to FP8 e4m3 with one scale per 128 channels. The result [G, T, H / G, d]
separates the G groups of heads.

Plan
- 16 lanes of one warp process 128 channels of a head, eight consecutive channels per lane, which stay in registers from
  the load to the store. The two channels of a rotary pair are adjacent, so a lane has both. The lane loads its cosines
  and sines together with its channels.
- Rotated channels are rounded to x's dtype before the cast, and the rotation's products are rounded to fp32 before they
  are added. So the bits are those of `rotary_sm90` followed by `per_token_cast_to_fp8_sm90`.
- The divisions that give the token, head and group of heads use precomputed numbers; offsets have 64 bits.
Shared memory: none.
Constraints: d a multiple of 128, R a multiple of 8 (the last R channels of a head are rotated), rows aligned to 16
bytes.
Roofline: bound by memory. Per channel 2 bytes are read (bf16), and 1 + 4 / 128 bytes are written. With few tokens,
bound by the latency of the launch and one round trip to memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake, fake_rows, fake_stream, strides
from dsa.cute.quantize import GROUP, quantize, round_to
from dsa.cute.registers import converted, loaded
from dsa.cute.rounded import rotate_pair
from dsa.cute.sm90 import thread_and_cta
from dsa.kernels.gemm.limits import CAST_DTYPES, ROTARY_MULTIPLE
from dsa.runtime.compile_cache import Variants, cached, compile_sm90

CHANNELS = ROTARY_MULTIPLE  # per lane
LANES = GROUP // CHANNELS
THREADS = 128


class RotaryCastToFp8Sm90:
    def __init__(self, use_ue8m0: bool):
        self.use_ue8m0 = use_ue8m0

    @cute.jit
    def __call__(self, x: cute.Tensor, cos: cute.Tensor, sin: cute.Tensor, q: cute.Tensor, scale: cute.Tensor, stream):
        blocks = x.shape[2] // GROUP
        total = x.shape[0] * x.shape[1] * blocks
        divisors = (cute.fast_divmod_create_divisor_v2(n) for n in (blocks, x.shape[1], q.shape[2]))
        self.kernel(x, cos, sin, q, scale, *divisors, total).launch(
            grid=(cute.ceil_div(total, THREADS // LANES), 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        q: cute.Tensor,
        scale: cute.Tensor,
        blocks: cute.FastDivmodDivisorV2,
        heads: cute.FastDivmodDivisorV2,
        group_heads: cute.FastDivmodDivisorV2,
        total: Int32,
    ):
        tid, cta = thread_and_cta()
        lane, index = tid % LANES, cta * (THREADS // LANES) + tid // LANES
        # Lanes past the end compute the last 128 channels again, since shuffles need all lanes.
        row, block = divmod(cutlass.min(index, total - 1), blocks)
        t, h = divmod(row, heads)
        group, of_group = divmod(h, group_heads)
        at = block * LANES + lane
        rotated = at - (x.shape[2] - 2 * cos.shape[1]) // CHANNELS
        wait_for_prerequisite_grids()

        raw = loaded(cute.local_tile(x[t, h, None], (CHANNELS,), (at,)))
        c, s = [cute.make_rmem_tensor((CHANNELS // 2,), Float32) for _ in range(2)]
        if rotated >= 0:
            for source, angles in ((cos, c), (sin, s)):
                cute.autovec_copy(cute.local_tile(source[t, None], (CHANNELS // 2,), (rotated,)), angles)
        v = converted(raw, Float32)
        if rotated >= 0:
            for i in cutlass.range_constexpr(CHANNELS // 2):
                v[2 * i], v[2 * i + 1] = rotate_pair(v[2 * i], v[2 * i + 1], c[i], s[i])
            round_to(v, x.element_type)
        own_scale = quantize(v, CHANNELS, self.use_ue8m0)
        out = converted(v, Float8E4M3FN)
        if index < total:
            cute.autovec_copy(out, cute.local_tile(q[group, t, of_group, None], (CHANNELS,), (at,)))
            if lane == 0:
                scale[group, t, of_group, block] = own_scale


@cached
def compile_rotary_cast_to_fp8(dtype: str, use_ue8m0: bool):
    """-> f(x [T, H, d] dtype, cos, sin [T, R / 2] fp32, q [G, T, H / G, d] e4m3, scale [G, T, H / G, d / 128] fp32).

    T * H > 0; d is a multiple of 128, R a multiple of 8 from 8 to d. T * H * d / 128, plus the number of 128-channel
    blocks per CTA, is below 2^31. Rows of all tensors but scale are aligned to 16 bytes, and the strides of q are
    multiples of 128.
    """
    tokens, heads, dim = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=GROUP)
    half = cute.sym_int(divisibility=ROTARY_MULTIPLE // 2)
    groups, group_heads = cute.sym_int(), cute.sym_int()
    return compile_sm90(
        RotaryCastToFp8Sm90(use_ue8m0),
        fake_rows(cute_dtype(dtype), tokens, heads, dim),
        *(fake_rows(Float32, tokens, half) for _ in range(2)),
        fake(Float8E4M3FN, (groups, tokens, group_heads, dim), (*strides(3, GROUP), 1)),
        fake_rows(Float32, groups, tokens, group_heads, cute.sym_int(), align=4),
        fake_stream(),
    )


def shipped_variants() -> Variants:
    return [(compile_rotary_cast_to_fp8, (dtype, use_ue8m0)) for dtype in CAST_DTYPES for use_ue8m0 in (True, False)]
