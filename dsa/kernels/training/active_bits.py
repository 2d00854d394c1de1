"""Active bits: one bit per (query, head, key), 1 if q_h[t] . k[j] > 0. The indexer's gradients need only this bit of
the product.

A word contains the bits of one thread's 32 wgmma accumulators in a block of 64 keys x 64 (query, head) columns. The
accumulators are those of keys r and r + 8 with r = 16 * warp + lane / 4 (warp: 0 to 3, index in the warpgroup), and of
columns 8 j + 2 (lane % 4) + e with j from 0 to 7 and e 0 or 1. Byte 2 * half + e of the word, with half 0 or 1, belongs
to key r + 8 * half and to the columns with this e. In a byte, the highest bit belongs to j = 0, and the lowest bit to j
= 7.

A block of 64 x 64 has 128 words, 32 adjacent words per warp. `word_place` orders a warp's words so that the words of
keys r and r + 1, with r even, are adjacent. In the query gradient (indexer_query_grad_sm90.py), operand A has (query,
head) columns as rows and two adjacent keys in each register, so a lane reads the words of both keys with one load.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32


@cute.jit
def word_place(lane: Int32) -> Int32:
    """Return the position of a lane's word among the warp's 32 words. Let lane / 4 = 2 a + b (b 0 or 1) and lane % 4 =
    c. The words are in the order of (a, c, b); b changes fastest."""
    return ((lane >> 3) << 3) | ((lane & 3) << 1) | ((lane >> 2) & 1)


@cute.jit
def sign_bits(acc, block: cutlass.Constexpr) -> Uint32:
    """Return this thread's word of active bits for the 64 columns from 64 * `block` on. acc: the thread's accumulators,
    flat: [column / 8][half][e], where half and e are those of the module's docstring.

    The accumulators contain -q . k, so the sign bit is 1 for an active head. A product of 0 is +0, so its bit is 0.
    """
    word = Uint32(0)
    for byte in (3, 2, 1, 0):
        for j in range(8):
            # Shift the word left by one and append the accumulator's sign bit.
            word = cute.arch.inline_ptx(
                "shf.l.wrap.b32 {$w0}, {$r0}, {$r1}, 1;",
                write_only_types=[Uint32],
                read_only_args=[acc[4 * (8 * block + j) + byte], word],
            )
    return word


@cute.jit
def permute(a: Uint32, b: Uint32, selector) -> Uint32:
    """Return a word of four selected bytes. Hex digit i of `selector` selects byte i of the word, where digit 0 and
    byte 0 are the lowest: values 0 to 3 are the bytes of a, 4 to 7 the bytes of b. A value with 8 added gives a byte
    that is filled with the sign bit of the selected byte."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Uint32], read_only_args=[a, b, Uint32(selector)]
    )


@cute.jit
def multiply_pairs(a: Uint32, b: Uint32) -> Uint32:
    """Multiply two pairs of bf16 elementwise, and round the products to bf16."""
    return cute.arch.inline_ptx("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


@cute.jit
def negated_head_sum(acc, weights, query: cutlass.Constexpr, heads: cutlass.Constexpr):
    """Return a list with the sums for the lane's two keys. The sum for a key is sum_h w[h] relu(-acc[key, query * heads
    + h]) over this lane's heads h.

    acc      this thread's accumulators, flat: [column / 8][key half][2 adjacent columns]
    weights  w / 2 of this lane's columns, flat: [column / 8][2]
    """
    sums = [Float32(0.0), Float32(0.0)]
    for j in cutlass.range_constexpr(heads // 8):
        column = query * (heads // 8) + j
        for c in cutlass.range_constexpr(2):
            for half in cutlass.range_constexpr(2):
                # |x| - x is exactly 2 relu(-x), and w is halved. These instructions run on the FMA pipe, at twice the
                # rate of a maximum.
                x = acc[4 * column + 2 * half + c]
                sums[half] = cute.math.fma(cute.math.absf(x) - x, weights[2 * column + c], sums[half])
    return sums
