"""The up-projections W_UK and W_UV of a head as operands of mma.sync.

An mma multiplies the weights of 16 output channels (M), dequantised from FP8 to bf16, by eight tokens (N). The output
channels are columns of W_UK or rows of W_UV.

A dequantised weight is e4m3 * scale, rounded to fp32 and then to bf16, as `dequantize_per_block` computes it. The order
of the input channels (K) is free, as long as weights and tokens have the same order. The two kernels that use this
module take the channels in the order in which they are stored: mla_absorb_queries_sm90.py and
mla_values_cast_to_fp8_sm90.py.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

OCTET = 8  # tokens of an octet, which are the 8 columns (N) of an mma
BLOCK = 128  # rows and columns of weights that share a scale
VECTOR, WORDS = 16, 4  # FP8 weights and 32-bit words in 16 bytes
BF16_VECTOR = 8  # 16-bit elements in 16 bytes


@cute.jit
def to_bf16(halves: Uint32, scale: Float32) -> Uint32:
    """Multiply two f16 values by the scale, rounding to fp32 and then to bf16."""
    return cute.arch.inline_ptx(
        "{{ .reg .b16 l, h; .reg .f32 x, y; mov.b32 {l, h}, {$r0}; cvt.f32.f16 x, l; cvt.f32.f16 y, h; "
        "mul.rn.f32 x, x, {$r1}; mul.rn.f32 y, y, {$r1}; cvt.rn.bf16x2.f32 {$w0}, y, x; }}",
        write_only_types=[Uint32],
        read_only_args=[halves, scale],
    )


@cute.jit
def zero_behind_loads(zeros: cute.Tensor, warp: Int32, lane: Int32) -> Uint32:
    """Return a zero, read from shared memory after a CTA barrier, so that ptxas does not know that it is zero.

    ptxas moves no load over the barrier, so all loads of weights before it are in flight together. Without the barrier,
    ptxas would place some loads after conversions that wait for the first loads.

    zeros: one word of shared memory per warp
    """
    if lane == 0:
        zeros[warp] = Uint32(0)
    cute.arch.sync_threads()
    return zeros[warp]


@cute.jit
def depending_on(x: Float32, words, zero: Uint32) -> Float32:
    """Return x, computed as x | (words & zero), so that it depends on `words`. `zero` is 0, but ptxas does not know
    this.

    x is the scale of the weights that are converted next, and `words` are the weights that are already converted.
    Without the dependency, ptxas would convert all weights to fp32 before it rounds any of them to bf16. There are not
    enough registers for that.
    """
    of_all = zero
    for word in words:
        of_all &= word
    return (x.bitcast(Uint32) | of_all).bitcast(Float32)


@cute.jit
def multiply_add(acc: cute.Tensor, weights: cute.Tensor, low: Uint32, high: Uint32):
    """Compute acc += A B, where A is 16 rows x 16 channels of weights and B is 16 channels x 8 tokens.

    acc        [4]: results of two adjacent tokens in the lane's first row (0 to 7), then of the same tokens in the
               lane's second row, 8 further
    weights    [4]: words of two channels. Words 0 and 1 are the first and second row, for the channels of `low`. Words
               2 and 3 are the first and second row, for the channels of `high`
    low, high  words of two channels of the lane's token
    """
    made = cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        + "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, "
        + "{{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*[weights[i] for i in range(4)], low, high, *[acc[i] for i in range(4)]],
    )
    for i in cutlass.range_constexpr(4):
        acc[i] = made[i]


@cute.jit
def load_words(row: cute.Tensor, place, target: cute.Tensor):
    """Load 16 bytes of `row` into the four words `target`. place: offset in the row, in units of 16 bytes."""
    source = cute.local_tile(row, (128 // row.element_type.width,), (place,))
    cute.autovec_copy(cute.recast_tensor(source, Uint32), target)


@cute.jit
def in_order(slices: cute.Tensor, sums: cute.Tensor):
    """Set sums [n] to the sum of `slices` [n, number of slices] over the slices, added in order, starting from zero."""
    values = cute.make_rmem_tensor(slices.shape, Float32)
    for i in cutlass.range_constexpr(slices.shape[1]):
        cute.autovec_copy(slices[None, i], values[None, i])
    sums.fill(0.0)
    for i in cutlass.range_constexpr(slices.shape[1]):
        for j in cutlass.range_constexpr(slices.shape[0]):
            sums[j] += values[j, i]
