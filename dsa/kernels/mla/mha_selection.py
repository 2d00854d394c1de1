"""Which keys are selected, a bit a key, beside a lane's scores of them in registers: what the softmax of multi-head
attention does with a word of selection_bits_sm90.py.

A mask of its own is an instruction a score on the pipe that the maxima need, too. Here it is none for the maxima, which
are predicated. ptxas takes seven predicates from a word with one instruction (R2P) where bits that lie beside each
other are used one after the other: so a row's scores come eight at a time, a byte of its word.
"""

import functools

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64


def places(byte: int, r: int) -> list[int]:
    """Where in a wgmma's accumulators a lane has its row r's eight scores of that byte of the row's word."""
    return [(8 * byte + bit) // 2 * 4 + 2 * r + bit % 2 for bit in range(8)]


def bit_mask(byte: int, bit: int) -> int:
    """A word of which that bit of that byte is set, as an int32."""
    mask = 1 << 8 * byte + bit
    return mask - (mask >> 31 << 32)


def load_word(address: Int64, key: Int32, known: Int32, bits: int) -> Int32:
    """A word in global memory of 16 or 32 bits if 0 <= key < known, else -1. Without a branch, so that it is free
    between other instructions, and not by ld.global.nc, which ptxas moves over barriers to where the word is used."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.lt.u32 p, {$r1}, {$r2}; mov.b32 {$w0}, -1; "
        f"@p ld.global.u{bits} {{$w0}}, [{{$r0}}]; }}",
        write_only_types=[Int32],
        read_only_args=[address, key, known],
    )


def low_bits(count: Int32) -> Int32:
    """A word whose lowest `count` bits are set; all, if that is more than there are."""
    return cute.arch.inline_ptx(
        "shl.b32 {$w0}, 1, {$r0}; sub.s32 {$w0}, {$w0}, 1;", write_only_types=[Int32], read_only_args=[count]
    )


def after(word: Int32, x: Float32, zero: Int32) -> Int32:
    """The word, once x is there: word + x * 0."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 t; mov.b32 t, {$r1}; mad.lo.s32 {$w0}, t, {$r2}, {$r0}; }",
        write_only_types=[Int32],
        read_only_args=[word, x, zero],
    )


def max_all(before: tuple[Float32, ...], eight: list[Float32]) -> tuple[Float32, Float32]:
    """Maxima of the even and of the odd ones of eight scores, and of the two maxima before, if there are any."""
    even, odd = ([*before[i : i + 1], *eight[i::2]] for i in range(2))
    return functools.reduce(cute.arch.fmax, even), functools.reduce(cute.arch.fmax, odd)


def max_selected(before: tuple[Float32, ...], eight: list[Float32], word: Int32, byte: int) -> tuple[Float32, Float32]:
    """The same of the scores whose bits in that byte of the word are set; -inf if there is none."""
    code = ""
    for i in range(8):
        highest, score = f"{{$w{i % 2}}}", f"{{$r{i}}}"
        code += f"{{ .reg .pred p; .reg .b32 t; and.b32 t, {{$r8}}, {bit_mask(byte, i)}; setp.ne.s32 p, t, 0; "
        if i < 2 and not before:
            code += f"selp.f32 {highest}, {score}, 0fFF800000, p; }}"
        else:
            start = f"mov.f32 {highest}, {{$r{9 + i}}}; " if i < 2 else ""
            code += f"{start}@p max.f32 {highest}, {highest}, {score}; }}"
    return cute.arch.inline_ptx(code, write_only_types=[Float32, Float32], read_only_args=[*eight, word, *before])
