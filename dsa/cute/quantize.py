"""FP8 e4m3 quantisation of a group of channels, which share a scale and are in the registers of a few adjacent lanes.

A group is 128 channels (GROUP), `channels` per lane, so GROUP / `channels` lanes have it. Only `quantize_group` accepts
groups of another size: a group is then all channels of `lanes` lanes. Channels are fp32 in registers, also after
quantisation: the caller rounds them to e4m3. Operations come in the same order and in the same fp32 arithmetic as in
the references on a GPU, so results agree bit for bit.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32, const_expr

GROUP = 128
E4M3_MAX = 448.0
AMAX_MIN = 1e-4


@cute.jit
def hadamard(v: cute.Tensor, lane: Int32, channels: cutlass.Constexpr):
    """v <- 128^-0.5 H128 v, where H128 is Sylvester's Hadamard matrix. v are the group's 128 channels. `lane` is the
    lane's index in the group, and element i of the lane's v is channel `lane` * `channels` + i."""
    for log in cutlass.range_constexpr(7):
        stride = 1 << log
        if const_expr(stride < channels):
            for i in cutlass.range_constexpr(channels):
                if const_expr(i & stride == 0):
                    a, b = v[i], v[i + stride]
                    v[i], v[i + stride] = a + b, a - b
        else:
            lane_bit = stride // channels
            # The lower lane of a pair computes partner + v, the upper lane partner - v. The sign avoids a branch.
            sign = Float32(1.0)
            if lane & lane_bit != 0:
                sign = Float32(-1.0)
            for i in cutlass.range_constexpr(channels):
                partner = cute.arch.shuffle_sync_bfly(v[i], offset=lane_bit)
                v[i] = sign * v[i] + partner
    for i in cutlass.range_constexpr(channels):
        v[i] = v[i] * Float32(GROUP**-0.5)


@cute.jit
def round_to(v: cute.Tensor, dtype: cutlass.Constexpr):
    """v <- v rounded to dtype, but stored as fp32."""
    if const_expr(dtype is BFloat16):
        # Convert pairs by PTX. The compiler's own conversion to bf16 and back has a quarter of the rate.
        for i in cutlass.range_constexpr(0, cute.size(v), 2):
            pair = cute.arch.inline_ptx(
                "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[v[i + 1], v[i]]
            )
            v[i], v[i + 1] = (pair << 16).bitcast(Float32), (pair & Uint32(0xFFFF0000)).bitcast(Float32)
    elif const_expr(dtype is not Float32):
        v.store(v.load().to(dtype).to(Float32))


@cute.jit
def scale_of(amax: Float32) -> Float32:
    """Return amax * fp32(1 / 448). On a GPU, PyTorch computes amax / 448 in this way, so the bits agree."""
    return amax * Float32(1.0 / E4M3_MAX)


@cute.jit
def ceil_to_ue8m0(scale: Float32) -> Float32:
    """Return the least power of two that is at least `scale`. `scale` is a positive normal number; infinity and NaN are
    returned unchanged."""
    bits = scale.bitcast(Uint32)
    up = ((bits + Uint32(0x007FFFFF)) & Uint32(0xFF800000)).bitcast(Float32)
    result = scale
    if scale < Float32(float("inf")):
        result = up
    return result


@cute.jit
def quantize(v: cute.Tensor, channels: cutlass.Constexpr, use_ue8m0: cutlass.Constexpr) -> Float32:
    return quantize_group(v, GROUP // channels, use_ue8m0)


@cute.jit
def quantize_group(v: cute.Tensor, lanes: cutlass.Constexpr, use_ue8m0: cutlass.Constexpr) -> Float32:
    """v <- v * (1 / scale), not yet rounded to e4m3. Return the scale of the group, in all lanes of the group.

    scale = amax / 448, rounded up to a power of two if `use_ue8m0`. amax is the largest |v| over the group's `lanes`
    adjacent lanes, and at least 1e-4. NaN propagates.
    """
    amax = amax_of(v, GROUP // lanes)
    scale, reciprocal = scale_and_reciprocal(amax, use_ue8m0)
    for i in cutlass.range_constexpr(cute.size(v)):
        v[i] = v[i] * reciprocal
    return scale


@cute.jit
def amax_of(v: cute.Tensor, channels: cutlass.Constexpr) -> Float32:
    """Return the largest |v| over the group's GROUP / `channels` adjacent lanes, but at least AMAX_MIN. All lanes of
    the group get the result. NaN propagates."""
    amax = Float32(AMAX_MIN)
    for i in cutlass.range_constexpr(cute.size(v)):
        amax = cute.arch.fmax(amax, cute.math.absf(v[i]), nan=True)
    for log in cutlass.range_constexpr((GROUP // channels).bit_length() - 1):
        amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, offset=1 << log), nan=True)
    return amax


@cute.jit
def scale_and_reciprocal(amax: Float32, use_ue8m0: cutlass.Constexpr):
    """-> (a group's scale, the correctly rounded 1 / scale). Callers multiply values by 1 / scale, as DeepGEMM does,
    and do not divide them by the scale. So the e4m3 bytes equal DeepGEMM's."""
    scale = scale_of(amax)
    if const_expr(use_ue8m0):
        scale = ceil_to_ue8m0(scale)
        # The approximate reciprocal is exact for powers of two, 0 for infinity and NaN for NaN.
        reciprocal = cute.arch.rcp_approx(scale)
    else:
        reciprocal = Float32(1.0) / scale
    return scale, reciprocal


@cute.jit
def store_pair(address: Int32, low: Float32, high: Float32):
    """Round `low` and `high` to e4m3, and store them to two adjacent bytes of shared memory, `low` first."""
    cute.arch.inline_ptx(
        "{ .reg .b16 pair; cvt.rn.satfinite.e4m3x2.f32 pair, {$r2}, {$r1}; st.shared.b16 [{$r0}], pair; }",
        read_only_args=[address, low, high],
    )
