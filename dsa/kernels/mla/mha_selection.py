"""Apply selection bits to a lane's scores in registers, for the softmax of multi-head attention.

The bits are words of selection_bits_sm90.py, one bit per key.

A separate mask would cost one instruction per score, in the pipe that the maxima also use. Here the max
instructions are predicated, so masking them is free. ptxas extracts seven predicates from a word with one
instruction (R2P) if adjacent bits are used consecutively. So a row's scores are processed eight at a time,
one byte of the word.
"""

import functools

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64


def places(byte: int, r: int) -> list[int]:
    """Return the indices in a wgmma accumulator of row r's eight scores for that byte of the row's word."""
    return [(8 * byte + bit) // 2 * 4 + 2 * r + bit % 2 for bit in range(8)]


def bit_mask(byte: int, bit: int) -> int:
    """Return an int32 with only that bit of that byte set."""
    mask = 1 << 8 * byte + bit
    return mask - (mask >> 31 << 32)


def load_word(address: Int64, key: Int32, known: Int32, bits: int) -> Int32:
    """Load a word of `bits` bits, 16 or 32, from global memory if 0 <= key < known; otherwise return -1.

    The load is predicated, not branched, so that ptxas can place it between other instructions. It is not
    ld.global.nc, which ptxas would move over barriers, down to the first use of the word.
    """
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.lt.u32 p, {$r1}, {$r2}; mov.b32 {$w0}, -1; "
        f"@p ld.global.u{bits} {{$w0}}, [{{$r0}}]; }}",
        write_only_types=[Int32],
        read_only_args=[address, key, known],
    )


def low_bits(count: Int32) -> Int32:
    """Return a word whose lowest `count` bits are set; all bits if count exceeds 31."""
    return cute.arch.inline_ptx(
        "shl.b32 {$w0}, 1, {$r0}; sub.s32 {$w0}, {$w0}, 1;", write_only_types=[Int32], read_only_args=[count]
    )


def after(word: Int32, x: Float32, zero: Int32) -> Int32:
    """Return `word`, made dependent on x: word + x * zero."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 t; mov.b32 t, {$r1}; mad.lo.s32 {$w0}, t, {$r2}, {$r0}; }",
        write_only_types=[Int32],
        read_only_args=[word, x, zero],
    )


def max_all(before: tuple[Float32, ...], eight: list[Float32]) -> tuple[Float32, Float32]:
    """Return the maxima of the even and of the odd elements of eight scores, and of the two maxima `before`
    if given.
    """
    even, odd = ([*before[i : i + 1], *eight[i::2]] for i in range(2))
    return functools.reduce(cute.arch.fmax, even), functools.reduce(cute.arch.fmax, odd)


def max_selected(before: tuple[Float32, ...], eight: list[Float32], word: Int32, byte: int) -> tuple[Float32, Float32]:
    """As `max_all`, over the scores whose bits in that byte of the word are set; -inf if none is set."""
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
