"""Arithmetic shared by the hyper-connection kernels, so that all of them give the same bits.

Here, Sinkhorn normalisation of a 4 x 4 matrix A leaves A unchanged and updates two vectors of factors: r for the rows
and c for the columns. The result is comb_ij = r_i A_ij c_j. The sum of row i is r_i (A c)_i. A step updates the four
factors r or the four factors c. Per factor, a step costs five multiply-adds, a product and a reciprocal. That is less
than dividing 16 numbers, and the rounding errors of the steps do not add up. `_balance` interleaves the four sums of a
step. If the code computed them one after the other, the compiler would keep that order, and a step would take twice as
long.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Uint32, const_expr

from dsa.cute.registers import converted, filled, loaded
from dsa.cute.sm90 import LOG2E
from dsa.kernels.elementwise.limits import HYPER_STREAMS

COUNT = (2 + HYPER_STREAMS) * HYPER_STREAMS  # elements of mix per token: 4 of pre, 4 of post, 16 of comb
INDEPENDENT_COUNT = 2 * HYPER_STREAMS  # the same for independent streams, which have no comb
WORDS = 4  # 32-bit words in 16 bytes


@cute.jit
def sigmoid(z: Float32) -> Float32:
    return cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(z * -LOG2E))


@cute.jit
def numbers_of(word: Uint32, dtype: cutlass.Constexpr) -> cute.Tensor:
    """Return the one or two elements of `dtype` in a 32-bit word, as fp32."""
    packed = 32 // dtype.width
    v = cute.make_rmem_tensor((packed,), Float32)
    if const_expr(dtype is BFloat16):
        # Two instructions; the compiler's conversion takes three.
        v[0], v[1] = (word << 16).bitcast(Float32), (word & Uint32(0xFFFF0000)).bitcast(Float32)
    else:
        own = cute.make_rmem_tensor((packed,), dtype)
        cute.recast_tensor(own, Uint32)[0] = word
        v.store(own.load().to(Float32))
    return v


@cute.jit
def add_squares(total: Float32, word: Uint32, dtype: cutlass.Constexpr) -> Float32:
    """Return total plus the squares of the elements of `dtype` in a 32-bit word."""
    v = numbers_of(word, dtype)
    for i in cutlass.range_constexpr(cute.size(v)):
        total = cute.math.fma(v[i], v[i], total)
    return total


@cute.jit
def weighted_sum(words: cute.Tensor, pre: cute.Tensor, dtype: cutlass.Constexpr, zero: Uint32) -> cute.Tensor:
    """Return sum_k pre[k] X_k for 16 bytes of each stream X_k, computed in fp32 and rounded to `dtype`.

    words  [4, streams]: the 16 bytes of each stream
    zero   0, as a value that the compiler does not know: see the comment in the loop
    """
    packed = 32 // dtype.width
    out = filled((WORDS * packed,), 0.0)
    for w in cutlass.range_constexpr(WORDS):
        for k in cutlass.range_constexpr(HYPER_STREAMS):
            # The caller has already converted these words once, for the mean square. XOR with `zero` forces a second
            # conversion. Otherwise the compiler keeps the fp32 values until here, which take twice as many registers.
            v = numbers_of(words[w, k] ^ zero, dtype)
            for i in cutlass.range_constexpr(packed):
                out[w * packed + i] = cute.math.fma(pre[k], v[i], out[w * packed + i])
    return converted(out, dtype)


@cute.jit
def shared_by_shuffles(own: Float32) -> cute.Tensor:
    """Return the four elements of pre, in all lanes of the warp. Each of the first four lanes has one in `own`."""
    pre = cute.make_rmem_tensor((HYPER_STREAMS,), Float32)
    for k in cutlass.range_constexpr(HYPER_STREAMS):
        pre[k] = cute.arch.shuffle_sync(own, k)
    return pre


@cute.jit
def independent_stream(y: cute.Tensor, stream: cute.Tensor, given: Float32) -> cute.Tensor:
    """Return given * y + stream in fp32, for the channels [width] of y. given: the token's element of post."""
    acc = cute.make_rmem_tensor((cute.size(y),), Float32)
    for i in cutlass.range_constexpr(cute.size(y)):
        acc[i] = cute.math.fma(given, y[i].to(Float32), stream[i].to(Float32))
    return acc


@cute.jit
def new_stream(y: cute.Tensor, streams: cute.Tensor, given: Float32, weights: cute.Tensor) -> cute.Tensor:
    """Return given * y + sum_j weights[j] streams[:, j], j < 4, in fp32, for the channels [width] of y. given: the
    token's element of post for the new stream. weights: the token's column of comb for the new stream."""
    acc = cute.make_rmem_tensor((cute.size(y),), Float32)
    for i in cutlass.range_constexpr(cute.size(y)):
        acc[i] = given * y[i].to(Float32)
        for j in cutlass.range_constexpr(HYPER_STREAMS):
            acc[i] = cute.math.fma(weights[j], streams[i, j].to(Float32), acc[i])
    return acc


@cute.jit
def post_and_comb(mix: cute.Tensor, base: cute.Tensor, scale: cute.Tensor, inverse, iterations, hc_eps):
    """-> (post [4], comb [16]) of one token, by the formulas of `dsa.hyper_collapse`. Each calling thread computes one
    token. mix [24]: the token's row. base [24]; scale [3]. inverse: 1 / sqrt(mean square of the token's streams +
    eps)."""
    given = _logits(mix, base, 1, inverse * scale[1])
    for k in cutlass.range_constexpr(HYPER_STREAMS):
        given[k] = Float32(2.0) * sigmoid(given[k])
    a = cute.make_rmem_tensor((HYPER_STREAMS, HYPER_STREAMS), Float32)
    for i in cutlass.range_constexpr(HYPER_STREAMS):
        z = _logits(mix, base, 2 + i, inverse * scale[2])
        row_max = cute.arch.fmax(cute.arch.fmax(z[0], z[1]), cute.arch.fmax(z[2], z[3]))
        total = Float32(0.0)
        for j in cutlass.range_constexpr(HYPER_STREAMS):
            a[i, j] = cute.math.exp2((z[j] - row_max) * LOG2E)
            total += a[i, j]
        share = cute.arch.rcp_approx(total)
        for j in cutlass.range_constexpr(HYPER_STREAMS):
            a[i, j] = a[i, j] * share + hc_eps

    rows, columns = [filled((HYPER_STREAMS,), 1.0) for _ in range(2)]
    _balance(a, rows, columns, True, hc_eps)
    for _ in cutlass.range(iterations - 1, unroll=1):
        _balance(a, columns, rows, False, hc_eps)
        _balance(a, rows, columns, True, hc_eps)
    out = cute.make_rmem_tensor((HYPER_STREAMS * HYPER_STREAMS,), Float32)
    for i in cutlass.range_constexpr(HYPER_STREAMS):
        for j in cutlass.range_constexpr(HYPER_STREAMS):
            out[i * HYPER_STREAMS + j] = rows[i] * a[i, j] * columns[j]
    return given, out


@cute.jit
def independent_post(mix: cute.Tensor, base: cute.Tensor, scale: cute.Tensor, inverse, magnitude, hc_eps):
    """-> post [4] of one token, by the formula of `dsa.hyper_collapse_independent`. mix [8]: the token's row. base [8];
    scale [2]. inverse: as in `post_and_comb`."""
    given = _logits(mix, base, 1, inverse * scale[1])
    for k in cutlass.range_constexpr(HYPER_STREAMS):
        given[k] = cute.math.fma(magnitude, sigmoid(given[k]), hc_eps)
    return given


@cute.jit
def _logits(mix: cute.Tensor, base: cute.Tensor, part: cutlass.Constexpr, factor) -> cute.Tensor:
    z, bias = [loaded(cute.local_tile(x, (HYPER_STREAMS,), (part,))) for x in (mix, base)]
    z.store(z.load() * factor + bias.load())
    return z


@cute.jit
def _balance(a: cute.Tensor, across: cute.Tensor, scales: cute.Tensor, of_columns: cutlass.Constexpr, hc_eps):
    """Divide each of `scales` by the sum of the column (if `of_columns`) or row of comb plus hc_eps. `scales` are the
    factors of the columns or rows, and `across` those of the other dimension."""
    totals = filled((HYPER_STREAMS,), 0.0)
    for m in cutlass.range_constexpr(HYPER_STREAMS):
        for n in cutlass.range_constexpr(HYPER_STREAMS):
            totals[n] = cute.math.fma(a[m, n] if of_columns else a[n, m], across[m], totals[n])
    for n in cutlass.range_constexpr(HYPER_STREAMS):
        totals[n] = cute.math.fma(scales[n], totals[n], hc_eps)
    for n in cutlass.range_constexpr(HYPER_STREAMS):
        scales[n] = scales[n] * cute.arch.rcp_approx(totals[n])
