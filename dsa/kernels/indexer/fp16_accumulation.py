"""fp16 accumulation of index scores: the sum over the heads, in fp16. To add the products of two heads to the sum of a
(query, key) pair takes two instructions; with fp32 accumulation it takes four.

An FP8 wgmma can round the products q . k to fp16. A register then has the products of two adjacent columns, which are
two heads of a query. One maximum and one multiply-add, on different pipes, add both products to the sums over the
heads. The tensor cores read and write half as many registers as with fp32. To avoid overflow, queries and weights are
scaled:
- The row q[t, h] of query t and head h is scaled into fp16's range: q' = q 2^-e with the smallest e for which the sum
  of magnitudes |q'|_1 is at most ROW_SUM. No channel of a key exceeds 448, so no product or partial sum overflows,
  whatever the keys are. Rounding has two sources: e4m3 loses bits of q' below 2^-6, and sums are rounded to fp16.
  Rounding can flip the sign of a product q . k only if the product is close to 0. A key whose products with all heads
  are clearly negative still scores exactly 0.
- The weights w[t, h] 2^e of query t are divided by a power of two, so that a sum over 8 heads cannot overflow, and are
  rounded to fp16. The scores are multiplied by that power. This works for |w| 2^e below 2^123 and so, because e is at
  most 10, for |w| below 2^113. With larger weights, scores can be infinite, or NaN where products are not positive.
A lane has at most 16 heads of a query. It sums them in a pair of fp16 numbers, at most 8 terms in each. The sum of the
pair and the sum over the quad's lanes are fp32.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint32

from dsa.cute.shared_memory import load_16, pack, store_4, store_16

# Threads that scale a block's query rows. dim / VECTOR lanes share a row. The number of rows is a multiple of 32. So in
# a step either all lanes of a warp have rows or none. The shuffles need this.
THREADS = 256
VECTOR = 16  # e4m3 numbers of a query row per lane
# |q'|_1 * 448 stays below 65504, the largest fp16 number. The margin of 1.5% covers the rounding of q' to e4m3, of
# |q'|_1, and of products.
ROW_SUM = 144.0
LEAST_EXPONENT, MOST_EXPONENT = -8, 14  # bounds of e; only NaN in a row can give more than 10


@cute.jit
def bring_into_range(queries: Int32, factors: Int32, rows: cutlass.Constexpr, dim: cutlass.Constexpr, thread):
    """Multiply each query row in shared memory by 2^-e, in place, and store 2^e. Whole warps call this, once for each
    `thread` below THREADS. A barrier must follow before other threads read the rows. For wgmma, a fence of the async
    proxy must come before that barrier.

    queries  address in shared memory of the rows, e4m3 [rows, dim]; the order of the channels in a row does not matter
    factors  address in shared memory of the powers 2^e, fp32 [rows]
    """
    lanes = dim // VECTOR  # per row
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
        inverse = Uint32(15 - exponent) * Uint32(0x04000400)  # 2^-e twice, as a pair of fp16
        store_16(at, [_scaled(word, inverse) for word in words])
        if place == 0:
            store_4(factors + row * 4, Uint32((exponent + 127) << 23))


@cute.jit
def pack_weights(weights):
    """Convert a lane's weights of one query to fp16. -> (pairs of fp16, power of two to multiply the scores by). All
    lanes of a quad call this together and get the same power of two.

    weights  [heads / 4] fp32: w 2^e of the query's heads in this lane
    """
    most = Float32(0.0)
    for weight in weights:
        most = cute.arch.fmax(most, cute.math.absf(weight))
    for log in cutlass.range_constexpr(2):
        most = cute.arch.fmax(most, cute.arch.shuffle_sync_bfly(most, offset=1 << log))
    # `exponent` is the biased exponent of `most`, so unless 249 limits it, no |weight| reaches 2^(exponent - 126). The
    # weights are divided by 2^(exponent - 123), which leaves less than 1 / 8. So 8 products with fp16 numbers have a
    # finite sum. Infinity stays infinity.
    exponent = cutlass.min(Int32(most.bitcast(Uint32) >> 23), 249)
    inverse = Uint32((250 - exponent) << 23).bitcast(Float32)
    pairs = [pack(weights[2 * j] * inverse, weights[2 * j + 1] * inverse, Float16) for j in range(len(weights) // 2)]
    return pairs, Uint32((exponent + 4) << 23).bitcast(Float32)


@cute.jit
def head_sum(acc, weights, query: cutlass.Constexpr, heads: cutlass.Constexpr):
    """-> the sums sum_h w[h] relu(acc[key, query * heads + h]) over this lane's heads, for the lane's two keys. The sum
    of a key is a pair of fp16: the sum over the even heads and the sum over the odd heads.

    acc      this thread's accumulators in pairs, flat: [column / 8][key half], where half 1 is 8 keys after half 0
    weights  the weights of this lane's columns in pairs, flat: [column / 8]
    """
    sums = [Uint32(0), Uint32(0)]
    for j in cutlass.range_constexpr(heads // 8):
        column = query * (heads // 8) + j
        for half in cutlass.range_constexpr(2):
            sums[half] = _add_relu(acc[2 * column + half], weights[column], sums[half])
    return sums


@cute.jit
def pair_sum(pair: Uint32) -> Float32:
    """Return the sum of the two numbers of an fp16 pair, added in fp32."""
    return cute.arch.inline_ptx(
        "{{ .reg .b16 l, h; .reg .f32 a, b; mov.b32 {l, h}, {$r0}; cvt.f32.f16 a, l; cvt.f32.f16 b, h; "
        "add.f32 {$w0}, a, b; }}",
        write_only_types=[Float32],
        read_only_args=[pair],
    )


@cute.jit
def _add_relu(x: Uint32, weights: Uint32, sums: Uint32) -> Uint32:
    """Return sums + weights * relu(x), elementwise on pairs of fp16. NaN in x gives NaN."""
    return cute.arch.inline_ptx(
        "{{ .reg .b32 y, z, s; mov.b32 s, {$r2}; mov.b32 z, 0; max.NaN.f16x2 y, {$r0}, z; "
        "fma.rn.f16x2 {$w0}, y, {$r1}, s; }}",
        write_only_types=[Uint32],
        read_only_args=[x, weights, sums],
    )


@cute.jit
def _magnitudes(word: Uint32) -> Uint32:
    """Return (|a| + |c|, |b| + |d|) as a pair of fp16. a, b, c, d: the four e4m3 numbers in `word`."""
    return cute.arch.inline_ptx(
        "{{ .reg .b16 l, h; .reg .b32 x, y; mov.b32 {l, h}, {$r0}; cvt.rn.f16x2.e4m3x2 x, l; "
        "cvt.rn.f16x2.e4m3x2 y, h; abs.f16x2 x, x; abs.f16x2 y, y; add.rn.f16x2 {$w0}, x, y; }}",
        write_only_types=[Uint32],
        read_only_args=[word],
    )


@cute.jit
def _add(a: Uint32, b: Uint32) -> Uint32:
    return cute.arch.inline_ptx("add.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


@cute.jit
def _scaled(word: Uint32, factors: Uint32) -> Uint32:
    """Return the four e4m3 numbers in `word` times one factor, rounded to e4m3. `factors` contains the factor twice, in
    fp16."""
    return cute.arch.inline_ptx(
        "{{ .reg .b16 l, h; .reg .b32 x, y; mov.b32 {l, h}, {$r0}; cvt.rn.f16x2.e4m3x2 x, l; "
        "cvt.rn.f16x2.e4m3x2 y, h; mul.rn.f16x2 x, x, {$r1}; mul.rn.f16x2 y, y, {$r1}; "
        "cvt.rn.satfinite.e4m3x2.f16x2 l, x; cvt.rn.satfinite.e4m3x2.f16x2 h, y; mov.b32 {$w0}, {l, h}; }}",
        write_only_types=[Uint32],
        read_only_args=[word, factors],
    )
