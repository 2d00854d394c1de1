"""The order of summation that the kernels of hyper_mix and hyper_expand_mix share, so that all of them give a token the
same bits.

The channels of each stream are divided into blocks of 64; a partial last block is padded with zeros. The blocks of all
streams are divided into SLICES slices. The matrix is the sum of three bf16 matrices, the parts high, middle and low.
For each slice and each part, a chain of mma instructions multiplies the streams by the part, 16 channels per
instruction. The chain starts from zero. The slice's sum is
  slice = high + (middle + low)
The sum of HALF_SLICES slices, added in order from zero, is half a group. The sum of two halves is a group. The result
is the sum of the CTAS groups, added in order from zero. In a cluster each CTA computes one group and sends it to the
CTAs that own the results. The owners add the groups. A pair is two results of a token in adjacent mma columns; one lane
has both. All CTAs own the same number of pairs.

An mma needs two words of a row from each lane; a word is two adjacent channels. A lane loads 16 bytes of a row, which
are four words: the first two are for one mma, the last two are for the next mma. The order of channels in an mma does
not matter as long as it is the same for streams and matrix, and both are loaded in this way. Rows are read in the order
`octet_row`, in which a quarter-warp reads all banks of shared memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dsa.cute.copies import prefetch_to_l2
from dsa.cute.registers import sum_in_order
from dsa.cute.slices import SLICES

PARTS = 3  # parts of the matrix: high, middle, low
OUTPUTS = 8  # outputs per mma (its N)
BLOCK = 64  # channels per block
VECTOR = 8  # channels in 16 bytes
CTAS = 8  # per cluster
GROUP_SLICES = SLICES // CTAS
HALF_SLICES = GROUP_SLICES // 2


@cute.jit
def octet_row(i: Int32) -> Int32:
    """Return which token (or output) of an octet is in row (or column) i of an mma: 0, 4, 1, 5, 2, 6, 3, 7 for i = 0
    to 7. An octet is 8 consecutive tokens (or outputs)."""
    return (i >> 1) | ((i & 1) << 2)


@cute.jit
def prefetch_slice(parts: cute.Tensor, channels, column, outputs: cutlass.Constexpr, first, end, lane):
    """Prefetch a slice of the matrix, `parts` [3, C, n * channels], to L2: the blocks [first, end) of `outputs` rows,
    from row `column` * `outputs` on, in all three parts. Each of the first 3 * `outputs` lanes prefetches one row of
    one part."""
    part, row = lane // outputs, column * outputs + lane % outputs
    if part < PARTS and row < parts.shape[1] and first < end:
        of_stream = cute.ceil_div(channels, BLOCK)
        start = first // of_stream * channels + first % of_stream * BLOCK
        stop = end // of_stream * channels + end % of_stream * BLOCK
        source = parts[part, row, None].iterator.toint() + Int64(start) * 2
        prefetch_to_l2(Int64(source), (stop - start) * 2)


@cute.jit
def multiply_add(
    acc: cute.Tensor, upper: cute.Tensor, lower: cute.Tensor, matrix: cute.Tensor, pair: cutlass.Constexpr
):
    """acc += (16 tokens x 16 channels) times (16 channels x 8 outputs), by one mma of the warp.

    acc           [4]: two adjacent mma columns of a token in the upper octet, then of a token in the lower octet
    upper, lower  this lane's 16 bytes of a token in the upper octet, and of a token in the lower octet
    matrix        this lane's 16 bytes of an output's matrix row
    pair          0 or 2: this mma multiplies the words `pair` and `pair` + 1 of the 16 bytes
    """
    given = [upper[pair], lower[pair], upper[pair + 1], lower[pair + 1], matrix[pair], matrix[pair + 1]]
    made = cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {"
        + "{$w0}, {$w1}, {$w2}, {$w3}"
        + "}, {"
        + "{$r0}, {$r1}, {$r2}, {$r3}"
        + "}, {"
        + "{$r4}, {$r5}"
        + "}, {"
        + "{$r6}, {$r7}, {$r8}, {$r9}"
        + "};",
        write_only_types=[Float32] * 4,
        read_only_args=[*given, acc[0], acc[1], acc[2], acc[3]],
    )
    for i in cutlass.range_constexpr(4):
        acc[i] = made[i]


@cute.jit
def sum_of_group(slices: cute.Tensor, pair: Int32):
    """Add up the slices of pair `pair`: first the slices of each half in order, then the two halves. slices: [2, pairs,
    GROUP_SLICES]. -> the pair's two sums for the CTA's group."""
    values = cute.make_rmem_tensor((2, GROUP_SLICES), Float32)
    for i in cutlass.range_constexpr(GROUP_SLICES):
        cute.autovec_copy(slices[None, pair, i], values[None, i])
    group = [Float32(0.0), Float32(0.0)]
    for j in cutlass.range_constexpr(2):
        for begin in cutlass.range_constexpr(0, GROUP_SLICES, HALF_SLICES):
            half = Float32(0.0)
            for i in cutlass.range_constexpr(HALF_SLICES):
                half += values[j, begin + i]
            group[j] += half
    return group


@cute.jit
def add_groups(received: cute.Tensor, out: cute.Tensor, rank: Int32, first_token: Int32, first_output: Int32,
               octets: cutlass.Constexpr, tid: Int32, threads: cutlass.Constexpr):  # fmt: skip
    """Add the groups of the pairs that this CTA owns, and store the results. All `threads` threads call this.

    received                   [2, owned pairs, CTAS]: the groups
    rank                       the CTA's rank in the cluster
    first_token, first_output  the token and the first output of the cluster's pair 0
    octets                     octets of outputs in the cluster; a token has 4 pairs per octet
    """
    owned = received.shape[1]
    for at in cutlass.range(tid, owned, threads, unroll=1):
        pair = rank * owned + at
        values = cute.make_rmem_tensor((2, CTAS), Float32)
        for group in cutlass.range_constexpr(CTAS):
            cute.autovec_copy(received[None, at, group], values[None, group])
        store_sums(values, out, first_token + pair // (4 * octets), first_output, pair % (4 * octets))


@cute.jit
def store_sums(groups: cute.Tensor, out: cute.Tensor, token: Int32, first_output: Int32, place: Int32):
    """Add the groups [2, CTAS] of pair number `place` of a token, and store the pair's two results."""
    for i in cutlass.range_constexpr(2):
        total = sum_in_order(groups[i, None])
        output = first_output + place // 4 * OUTPUTS + octet_row(2 * (place % 4) + i)
        if token < out.shape[0] and output < out.shape[1]:
            out[token, output] = total
