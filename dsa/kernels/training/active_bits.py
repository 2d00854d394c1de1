"""Active bits: one for each index score, whether q_h[t] . k[j] > 0, which is all that the gradients need of it; and
the wgmma operands that are made of them, dI where a head is active and 0 elsewhere.

A word has the 32 bits of what one thread holds of 64 keys x 64 (query, head) columns, the accumulators of a wgmma: keys
r and r + 8, r = 16 * warp + lane / 4, and columns 8 j + 2 (lane % 4) + e. Byte 2 * half + e of the word is of key
r + 8 * half and of the columns with this e; its highest bit is that of j = 0, its lowest that of j = 7.

A block's 128 words lie so that a warp's 32 are together, at `word_place`, where those of two neighbouring keys are
neighbours: a thread whose rows are columns and whose pairs are keys, the other way round, reads both at once.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32


@cute.jit
def word_place(lane: Int32) -> Int32:
    """Where the word of a lane is among its warp's: keys 2 a + b of 8, columns of lane % 4 = c: (a, c, b)."""
    return ((lane >> 3) << 3) | ((lane & 3) << 1) | ((lane >> 2) & 1)


@cute.jit
def sign_bits(acc, block: cutlass.Constexpr) -> Uint32:
    """The word of signs of accumulators [column / 8][half][e], block `block` of 64 columns: 1 for what is below 0.

    Accumulators hold -q . k, so that a product of 0, whose sign is +, is not active.
    """
    word = Uint32(0)
    for byte in (3, 2, 1, 0):
        for j in range(8):
            word = push_sign(word, acc[4 * (8 * block + j) + byte])
    return word


@cute.jit
def push_sign(word: Uint32, x: Float32) -> Uint32:
    """word * 2 + (x < 0)."""
    return cute.arch.inline_ptx(
        "shf.l.wrap.b32 {$w0}, {$r0}, {$r1}, 1;", write_only_types=[Uint32], read_only_args=[x, word]
    )


@cute.jit
def permute(a: Uint32, b: Uint32, selector) -> Uint32:
    """Four of the eight bytes of a, the lower ones, and b; a selector's digit of 8 or more spreads a byte's sign."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Uint32], read_only_args=[a, b, Uint32(selector)]
    )


@cute.jit
def multiply_pairs(a: Uint32, b: Uint32) -> Uint32:
    """Products of two pairs of bf16, rounded."""
    return cute.arch.inline_ptx("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


@cute.jit
def negated_head_sum(acc, weights, query: cutlass.Constexpr, heads: cutlass.Constexpr):
    """Halves of sum_h w[h] relu(-acc[key, query * heads + h]) over this lane's heads: [keys row, keys row + 8].

    acc      this thread's accumulators, flat: [column / 8][key half][2 neighbouring columns]
    weights  w / 2 of this lane's columns, flat: [column / 8][2]
    """
    sums = [Float32(0.0), Float32(0.0)]
    for j in cutlass.range_constexpr(heads // 8):
        column = query * (heads // 8) + j
        for c in cutlass.range_constexpr(2):
            for half in cutlass.range_constexpr(2):
                # |x| - x = 2 relu(-x), exactly; w is halved. It runs on the FMA pipe, at twice a maximum's rate.
                x = acc[4 * column + 2 * half + c]
                sums[half] = cute.math.fma(cute.math.absf(x) - x, weights[2 * column + c], sums[half])
    return sums
