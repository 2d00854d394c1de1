"""Half scores: the sum over heads of an index-score tile with fp16 accumulators, one instruction an accumulator.

An FP8 wgmma can round its sums to fp16 and hands them out in pairs of neighbouring columns, which are two heads of a
query. A maximum and a multiply-add, on different pipes, take a pair an instruction each, and the accumulators are half
as many registers for the tensor cores to read and write. For that
- a row of queries q[t, h] is brought into range: q' = q 2^-e with the smallest e for which |q'|_1 <= ROW_SUM. As no
  key is above 448, no product or partial sum overflows then, whatever the keys. What e4m3 loses below 2^-6
  and what fp16 rounds away can turn the sign of a product that is next to 0, and of no other: a key whose products are
  clearly negative still scores exactly 0;
- the weights w[t, h] 2^e of a query are divided by a power of two, so that a sum over 8 heads cannot overflow, and
  rounded to fp16. The scores are multiplied by it. That holds below 2^123, of weights below 2^113: from there on scores
  may be infinite, or NaN where products are not positive.
A lane's sums over heads, of 8 at most, are fp16; those over the quad are fp32.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint32

from dsa.cute.shared_memory import load_16, pack, store_4, store_16

THREADS = 256  # that bring a tile of queries into range: they divide into its rows
VECTOR = 16  # numbers of a row of queries that a lane has
# |q'|_1 448 is below fp16's 65504, with 1.5% for what is rounded: numbers to e4m3, the row's sum, products.
ROW_SUM = 144.0
LEAST_EXPONENT, MOST_EXPONENT = -8, 14  # of e: 10 at most for finite numbers


@cute.jit
def bring_into_range(queries: Int32, factors: Int32, rows: cutlass.Constexpr, dim: cutlass.Constexpr, thread):
    """Multiply each of the rows in shared memory by its 2^-e, in place, and store 2^e. THREADS threads call it; a
    barrier must follow before anyone reads, and for wgmma a fence of the asynchronous proxy before that.

    queries, factors  addresses of e4m3 [rows, dim], in any order within a row, and fp32 [rows]
    """
    lanes = dim // VECTOR  # of a row
    first, place = thread // lanes, thread % lanes
    for row in cutlass.range(first, rows, THREADS // lanes, unroll=1):
        at = queries + row * dim + place * VECTOR
        words = load_16(at)
        a, b, c, d = (_magnitudes(word) for word in words)
        total = pair_sum(_add(_add(a, b), _add(c, d)))
        for log in cutlass.range_constexpr((dim // VECTOR).bit_length() - 1):
            total += cute.arch.shuffle_sync_bfly(total, offset=1 << log)
        exponent = Int32(((total * (1 / ROW_SUM)).bitcast(Uint32) + 0x7FFFFF) >> 23) - 127
        exponent = cutlass.max(cutlass.min(exponent, MOST_EXPONENT), LEAST_EXPONENT)
        inverse = Uint32(15 - exponent) * Uint32(0x04000400)  # as a pair of fp16
        store_16(at, [_scaled(word, inverse) for word in words])
        if place == 0:
            store_4(factors + row * 4, Uint32((exponent + 127) << 23))


@cute.jit
def pack_weights(weights):
    """A lane's weights of one query as pairs of fp16, and the power of two to multiply the scores by.

    weights  [heads / 4] fp32, w 2^e of the lane's columns; the quad's lanes call this together
    """
    most = Float32(0.0)
    for weight in weights:
        most = cute.arch.fmax(most, cute.math.absf(weight))
    for log in cutlass.range_constexpr(2):
        most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, offset=1 << log))
    # |w| < 2^(exponent - 126), so that |w| / scale <= 1 / 8. Infinity stays infinity.
    exponent = cutlass.min(Int32(most.bitcast(Uint32) >> 23), 249)
    inverse = Uint32((250 - exponent) << 23).bitcast(Float32)
    pairs = [pack(weights[2 * j] * inverse, weights[2 * j + 1] * inverse, Float16) for j in range(len(weights) // 2)]
    return pairs, Uint32((exponent + 4) << 23).bitcast(Float32)


@cute.jit
def head_sum(acc, weights, query: cutlass.Constexpr, heads: cutlass.Constexpr):
    """sum_h w[h] relu(acc[key, query * heads + h]) over this lane's heads, for the keys [row, row + 8]: of each a
    pair of fp16, the sums over even and odd heads.

    acc      this thread's accumulators in pairs, flat: [column / 8][key half]
    weights  of this lane's columns in pairs, flat: [column / 8]
    """
    sums = [Uint32(0), Uint32(0)]
    for j in cutlass.range_constexpr(heads // 8):
        column = query * (heads // 8) + j
        for half in cutlass.range_constexpr(2):
            sums[half] = _add_relu(acc[2 * column + half], weights[column], sums[half])
    return sums


@cute.jit
def pair_sum(pair: Uint32) -> Float32:
    """The sum of two fp16 in fp32."""
    return cute.arch.inline_ptx(
        "{{ .reg .b16 l, h; .reg .f32 a, b; mov.b32 {l, h}, {$r0}; cvt.f32.f16 a, l; cvt.f32.f16 b, h; "
        "add.f32 {$w0}, a, b; }}",
        write_only_types=[Float32],
        read_only_args=[pair],
    )


@cute.jit
def _add_relu(x: Uint32, weights: Uint32, sums: Uint32) -> Uint32:
    """sums + weights relu(x), of pairs of fp16; NaN for NaN."""
    return cute.arch.inline_ptx(
        "{{ .reg .b32 y, z, s; mov.b32 s, {$r2}; mov.b32 z, 0; max.NaN.f16x2 y, {$r0}, z; "
        "fma.rn.f16x2 {$w0}, y, {$r1}, s; }}",
        write_only_types=[Uint32],
        read_only_args=[x, weights, sums],
    )


@cute.jit
def _magnitudes(word: Uint32) -> Uint32:
    """|a| + |c| and |b| + |d| of four e4m3 numbers, in fp16."""
    return cute.arch.inline_ptx(
        "{{ .reg .b16 l, h; .reg .b32 x, y; mov.b32 {l, h}, {$r0}; cvt.rn.f16x2.e4m3x2 x, l; "
        "cvt.rn.f16x2.e4m3x2 y, h; abs.f16x2 x, x; abs.f16x2 y, y; add.rn.f16x2 {$w0}, x, y; }}",
        write_only_types=[Uint32],
        read_only_args=[word],
    )


@cute.jit
def _add(a: Uint32, b: Uint32) -> Uint32:
    """The sums of two pairs of fp16."""
    return cute.arch.inline_ptx("add.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


@cute.jit
def _scaled(word: Uint32, factors: Uint32) -> Uint32:
    """Four e4m3 numbers times a factor, which is given twice in fp16."""
    return cute.arch.inline_ptx(
        "{{ .reg .b16 l, h; .reg .b32 x, y; mov.b32 {l, h}, {$r0}; cvt.rn.f16x2.e4m3x2 x, l; "
        "cvt.rn.f16x2.e4m3x2 y, h; mul.rn.f16x2 x, x, {$r1}; mul.rn.f16x2 y, y, {$r1}; "
        "cvt.rn.satfinite.e4m3x2.f16x2 l, x; cvt.rn.satfinite.e4m3x2.f16x2 h, y; mov.b32 {$w0}, {l, h}; }}",
        write_only_types=[Uint32],
        read_only_args=[word, factors],
    )
