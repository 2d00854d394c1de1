"""Conversions of an FP8 cache's e4m3 and bf16 values, and of FP8 weights, to f16; conversions of FP8 caches' scales."""

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32


@cute.jit
def four_halves(word: Uint32):
    """Convert four e4m3 values to two words of two f16 each, without rounding."""
    return cute.arch.inline_ptx(
        "{{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, l; cvt.rn.f16x2.e4m3x2 {$w1}, h; }}",
        write_only_types=[Uint32, Uint32],
        read_only_args=[word],
    )


@cute.jit
def larger_bf16(a: Uint32, b: Uint32) -> Uint32:
    """Return two bf16. Each half has the larger magnitude of the same halves of a and b.

    The signs of the results are arbitrary, so the caller must ignore them. If one of two values is NaN, the result is
    the other value.
    """
    return cute.arch.inline_ptx(
        "{{ .reg .b32 x, y; mov.b32 x, {$r0}; mov.b32 y, {$r1}; max.xorsign.abs.bf16x2 {$w0}, x, y; }}",
        write_only_types=[Uint32],
        read_only_args=[a, b],
    )


@cute.jit
def times_to_f16(word: Uint32, low_factor: Float32, high_factor: Float32) -> Uint32:
    """Multiply two bf16 values by one factor each, and convert the products to f16."""
    low, high = (word << 16).bitcast(Float32) * low_factor, (word & Uint32(0xFFFF0000)).bitcast(Float32) * high_factor
    return cute.arch.inline_ptx(
        "cvt.rn.f16x2.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[high, low]
    )


@cute.jit
def halves_of_two(low: Uint32, high: Uint32):
    """Convert the four e4m3 values in `low` and the four in `high` to f16, without rounding.

    Return four words. Word i has value i of `low` in the lower half, and value i of `high` in the upper half.
    """
    return cute.arch.inline_ptx(
        "{{ .reg .b16 p, q, r, s; .reg .b32 m, n; "
        "prmt.b32 m, {$r0}, {$r1}, 0x5140; prmt.b32 n, {$r0}, {$r1}, 0x7362; "
        "mov.b32 {p, q}, m; mov.b32 {r, s}, n; "
        "cvt.rn.f16x2.e4m3x2 {$w0}, p; cvt.rn.f16x2.e4m3x2 {$w1}, q; "
        "cvt.rn.f16x2.e4m3x2 {$w2}, r; cvt.rn.f16x2.e4m3x2 {$w3}, s; }}",
        write_only_types=[Uint32] * 4,
        read_only_args=[low, high],
    )


@cute.jit
def times(word: Uint32, factors: Uint32) -> Uint32:
    """Multiply two f16 values by one f16 factor each."""
    return cute.arch.inline_ptx(
        "mul.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[word, factors]
    )


@cute.jit
def times_split(word: Uint32, high: Uint32, low: Uint32) -> Uint32:
    """Multiply two f16 values by one factor each. A factor is the sum of an f16 in `high` and an f16 in `low`."""
    return cute.arch.inline_ptx(
        "{{ .reg .b32 x; mul.rn.f16x2 x, {$r0}, {$r2}; fma.rn.f16x2 {$w0}, {$r0}, {$r1}, x; }}",
        write_only_types=[Uint32],
        read_only_args=[word, high, low],
    )


@cute.jit
def store_split(address: Int32, x: Float32):
    """Store x to shared memory as a sum of two f16: x rounded to f16, and 4 bytes further the rounding error."""
    cute.arch.inline_ptx(
        "{{ .reg .b16 a, b; .reg .f32 y; cvt.rn.f16.f32 a, {$r1}; cvt.f32.f16 y, a; sub.f32 y, {$r1}, y; "
        "cvt.rn.f16.f32 b, y; st.shared.b16 [{$r0}], a; st.shared.b16 [{$r0} + 4], b; }}",
        read_only_args=[address, x],
    )


@cute.jit
def store_half(address: Int32, x: Float32, as_bf16: Boolean):
    """Store x to shared memory in 16 bits: rounded to f16 or, if `as_bf16`, truncated to bf16 (the upper 16 bits of
    x)."""
    cute.arch.inline_ptx(
        "{{ .reg .b16 a, b, c; .reg .pred p; cvt.rn.f16.f32 a, {$r1}; mov.b32 {b, c}, {$r1}; setp.ne.s32 p, {$r2}, 0; "
        "selp.b16 a, c, a, p; st.shared.b16 [{$r0}], a; }}",
        read_only_args=[address, x, Int32(1) if as_bf16 else Int32(0)],
    )


@cute.jit
def interleave(low: Uint32, high: Uint32):
    """Return a word of the lower 16-bit halves of `low` and `high`, and a word of their upper halves."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, 0x5410; prmt.b32 {$w1}, {$r0}, {$r1}, 0x7632;",
        write_only_types=[Uint32, Uint32],
        read_only_args=[low, high],
    )


@cute.jit
def ue8m0_scale(exponent: Uint32) -> Float32:
    """Return the value of a ue8m0 scale: 2^(exponent - 127), or NaN for exponent 255. 2^-127 is a denormal number."""
    bits = exponent << 23
    if exponent == 0:
        bits = Uint32(0x00400000)
    if exponent == 255:
        bits = Uint32(0x7FFFFFFF)
    return bits.bitcast(Float32)
