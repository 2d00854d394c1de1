"""e4m3 numbers with a scale to bf16: 16 bytes of a cached key to 32."""

import cutlass.cute as cute
from cutlass import Float32, Uint32


@cute.jit
def four_numbers(word: Uint32, scale: Float32):
    """Four e4m3 numbers times scale, the product in fp32, rounded once: two words of two bf16."""
    return cute.arch.inline_ptx(
        "{{ .reg .b16 l, h, a, b, c, d; .reg .b32 x, y; .reg .f32 e, f, g, i; "
        "mov.b32 {l, h}, {$r0}; cvt.rn.f16x2.e4m3x2 x, l; cvt.rn.f16x2.e4m3x2 y, h; "
        "mov.b32 {a, b}, x; mov.b32 {c, d}, y; "
        "cvt.f32.f16 e, a; cvt.f32.f16 f, b; cvt.f32.f16 g, c; cvt.f32.f16 i, d; "
        "mul.f32 e, e, {$r1}; mul.f32 f, f, {$r1}; mul.f32 g, g, {$r1}; mul.f32 i, i, {$r1}; "
        "cvt.rn.bf16x2.f32 {$w0}, f, e; cvt.rn.bf16x2.f32 {$w1}, i, g; }}",
        write_only_types=[Uint32, Uint32],
        read_only_args=[word, scale],
    )


@cute.jit
def two_keys(low: Uint32, high: Uint32, low_scale: Float32, high_scale: Float32):
    """Four e4m3 numbers of each of two keys times the key's scale, as above: of each number a word, the first key's
    below the second's."""
    return cute.arch.inline_ptx(
        "{{ .reg .b16 p, q, r, s, a, b, c, d; .reg .b32 m, n, x, y; .reg .f32 e, f; "
        "prmt.b32 m, {$r0}, {$r1}, 0x5140; prmt.b32 n, {$r0}, {$r1}, 0x7362; "
        "mov.b32 {p, q}, m; mov.b32 {r, s}, n; "
        "cvt.rn.f16x2.e4m3x2 x, p; cvt.rn.f16x2.e4m3x2 y, q; mov.b32 {a, b}, x; mov.b32 {c, d}, y; "
        "cvt.f32.f16 e, a; cvt.f32.f16 f, b; mul.f32 e, e, {$r2}; mul.f32 f, f, {$r3}; "
        "cvt.rn.bf16x2.f32 {$w0}, f, e; "
        "cvt.f32.f16 e, c; cvt.f32.f16 f, d; mul.f32 e, e, {$r2}; mul.f32 f, f, {$r3}; "
        "cvt.rn.bf16x2.f32 {$w1}, f, e; "
        "cvt.rn.f16x2.e4m3x2 x, r; cvt.rn.f16x2.e4m3x2 y, s; mov.b32 {a, b}, x; mov.b32 {c, d}, y; "
        "cvt.f32.f16 e, a; cvt.f32.f16 f, b; mul.f32 e, e, {$r2}; mul.f32 f, f, {$r3}; "
        "cvt.rn.bf16x2.f32 {$w2}, f, e; "
        "cvt.f32.f16 e, c; cvt.f32.f16 f, d; mul.f32 e, e, {$r2}; mul.f32 f, f, {$r3}; "
        "cvt.rn.bf16x2.f32 {$w3}, f, e; }}",
        write_only_types=[Uint32] * 4,
        read_only_args=[low, high, low_scale, high_scale],
    )


@cute.jit
def interleave(low: Uint32, high: Uint32):
    """Of two words of two 16-bit numbers: the word of the first ones, and that of the second ones."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, 0x5410; prmt.b32 {$w1}, {$r0}, {$r1}, 0x7632;",
        write_only_types=[Uint32, Uint32],
        read_only_args=[low, high],
    )


@cute.jit
def ue8m0_scale(exponent: Uint32) -> Float32:
    """2^(exponent - 127); NaN for 255."""
    bits = exponent << 23
    if exponent == 0:
        bits = Uint32(0x00400000)
    if exponent == 255:
        bits = Uint32(0x7FFFFFFF)
    return bits.bitcast(Float32)
