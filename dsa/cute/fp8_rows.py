"""e4m3 numbers with a scale to bf16: 16 bytes of a cached key to 32."""

import cutlass.cute as cute
from cutlass import Float32, Uint32


@cute.jit
def _four(word: Uint32, scale: Float32):
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
def dequantize_16(words, scale: Float32, out: cute.Tensor):
    """out [8] words of two bf16 from four words of four e4m3."""
    for i, word in enumerate(words):
        out[2 * i], out[2 * i + 1] = _four(word, scale)


@cute.jit
def ue8m0_scale(exponent: Uint32) -> Float32:
    """2^(exponent - 127); NaN for 255."""
    bits = exponent << 23
    if exponent == 0:
        bits = Uint32(0x00400000)
    if exponent == 255:
        bits = Uint32(0x7FFFFFFF)
    return bits.bitcast(Float32)
