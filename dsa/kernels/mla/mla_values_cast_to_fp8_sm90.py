"""Project attended latents to values with W_UV in FP8, and cast the values to FP8, for small M (few tokens).

y[t, h] = W_UV[h] attended[t, h]

W_UV[h] [V, 512] is the last V rows of head h in kv_b; V is the number of value channels of a head.

- Tiles: a CTA computes 128 value channels of a head, which are rows of W_UV. A token's 128 results share a scale. The
  128 channels are one head of V3.2 or half a head of GLM-5; either model makes 128 CTAs. Each of 16 warps has a block
  of 32 rows x 128 latent channels of W_UV, with one scale.
- Weights: a warp reads its 4 KiB block once, directly to registers, with all loads in flight together. A lane's 16
  adjacent bytes of a row are the input channels of four mma instructions, in the order of memory. The lane scales
  the weights and rounds them to bf16 (up_projection.py).
- Products: tokens are N of the mma, eight (an octet) at a time. The sums of the four quarters of the latent
  channels are added in a fixed order through shared memory. So the bits of a token do not depend on the other
  tokens.
- Epilogue: eight warps handle the even octets, and the other eight handle the odd octets. A warp has one token of the
  octet, with four channels per lane. It rounds y to bf16 and then casts it to e4m3 as `per_token_cast_to_fp8` does.
- Pipeline: octets alternate between two buffers of sums, so one barrier per octet suffices. The products of
  the next octet overlap with the cast. A warp loads the latents of the next octet after it has issued the products
  of the current octet.
- Launch: programmatic dependent launch. Before it waits for the previous kernel, a CTA prefetches its rows
  of W_UV, which are contiguous, into the L2 cache.
Shared memory: two buffers of 16.5 KiB.
Registers per thread: 32 of FP8 weights, 64 of bf16 weights, 16 of latents, 8 of sums.
Constraints: 512 latent channels; the number of value channels per head is a multiple of 128, and the number of rows of
kv_b per head is a multiple of 32.
Roofline: bound by memory: W_UV is read once. For V3.2 this is 8.4 MB, which takes 2.8 us at 3 TB/s. Part of W_UV
arrives in the L2 cache before the wait for the previous kernel ends.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from dsa.cute.copies import prefetch_to_l2
from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake, fake_stream, strides
from dsa.cute.quantize import GROUP, quantize, round_to
from dsa.cute.sm90 import WARP
from dsa.kernels.mla.fp8_kv_convert import four_halves
from dsa.kernels.mla.limits import HEAD_DIM_V
from dsa.kernels.mla.up_projection import (
    BF16_VECTOR,
    BLOCK,
    OCTET,
    VECTOR,
    WORDS,
    depending_on,
    in_order,
    load_words,
    multiply_add,
    to_bf16,
    zero_behind_loads,
)
from dsa.runtime.compile_cache import cached, compile_sm90

QUARTERS = HEAD_DIM_V // BLOCK  # quarters of the latent channels, of 128 channels each
ROWS = 32  # rows of weights per warp
TILES = ROWS // 16  # mma tiles of 16 rows per warp
STEPS = BLOCK // (4 * VECTOR)  # four lanes load a row of a block, each with this many 16-byte loads
WARPS = QUARTERS * (GROUP // ROWS)
THREADS = WARPS * WARP
OF_TOKEN = GROUP + 4  # elements between the sums of adjacent tokens; padding lets a warp's stores use all banks
OF_QUARTER = OCTET * OF_TOKEN


class MlaValuesCastToFp8Sm90:
    def __init__(self, use_ue8m0: bool):
        self.use_ue8m0 = use_ue8m0

    @cute.jit
    def __call__(self, attended, weight, weight_scale, values, scale, stream):
        heads = attended.shape[1]
        of_head = scale.shape[1] // heads
        self.kernel(attended, weight, weight_scale, values, scale, weight.shape[0] // heads, of_head).launch(
            grid=(scale.shape[1], 1, 1),
            block=(THREADS, 1, 1),
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        attended: cute.Tensor,
        weight: cute.Tensor,
        weight_scale: cute.Tensor,
        values: cute.Tensor,
        scale: cute.Tensor,
        rows: Int32,
        of_head: Int32,
    ):
        group, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        head = group // of_head
        start = (head + 1) * rows - (of_head - group % of_head) * GROUP
        quarter, part = warp % QUARTERS, warp // QUARTERS

        @cute.struct
        class Storage:
            sums: cute.struct.Align[cute.struct.MemRange[Float32, 2 * QUARTERS * OF_QUARTER], 16]
            zeros: cute.struct.MemRange[Uint32, WARPS]

        outer = (OF_TOKEN, OF_QUARTER, QUARTERS * OF_QUARTER)
        storage = SmemAllocator().allocate(Storage)
        written = storage.sums.get_tensor(cute.make_layout((GROUP, OCTET, QUARTERS, 2), stride=(1, *outer)))
        read = storage.sums.get_tensor(cute.make_layout((4, WARP, OCTET, QUARTERS, 2), stride=(1, 4, *outer)))
        if lane == 0:
            source = weight[start + warp * (GROUP // WARPS), None].iterator.toint()
            prefetch_to_l2(Int64(source), Int32(GROUP // WARPS * HEAD_DIM_V))
        wait_for_prerequisite_grids()

        first = start + part * ROWS
        raw = cute.make_rmem_tensor((WORDS, STEPS, 2, TILES), Uint32)
        for tile in cutlass.range_constexpr(TILES):
            for half in cutlass.range_constexpr(2):
                row = weight[first + 16 * tile + 8 * half + lane // 4, None]
                for step in cutlass.range_constexpr(STEPS):
                    place = quarter * (BLOCK // VECTOR) + 4 * step + lane % 4
                    load_words(row, place, raw[None, step, half, tile])
        weight_factor = weight_scale[first // BLOCK, quarter]
        latents = cute.make_rmem_tensor((WORDS, 2, STEPS), Uint32)
        self.load(attended, head, Int32(0), latents, quarter, lane)

        zero = zero_behind_loads(storage.zeros.get_tensor(cute.make_layout(WARPS)), warp, lane)
        weights = self.convert(raw, weight_factor, zero)
        acc = cute.make_rmem_tensor((2, 2, TILES), Float32)
        octets = cute.ceil_div(attended.shape[0], OCTET)
        for octet in cutlass.range(octets, unroll=1):
            acc.fill(0.0)
            for step in cutlass.range_constexpr(STEPS):
                for word in cutlass.range_constexpr(WORDS):
                    of_token = latents[None, word // 2, step]
                    low, high = of_token[word % 2 * 2], of_token[word % 2 * 2 + 1]
                    for tile in cutlass.range_constexpr(TILES):
                        numbers = cute.make_tensor(acc[None, None, tile].iterator, cute.make_layout(4))
                        multiply_add(numbers, weights[None, word, step, tile], low, high)
            if octet + 1 < octets:
                self.load(attended, head, octet + 1, latents, quarter, lane)
            for tile in cutlass.range_constexpr(TILES):
                for half in cutlass.range_constexpr(2):
                    for i in cutlass.range_constexpr(2):
                        channel = part * ROWS + 16 * tile + 8 * half + lane // 4
                        written[channel, lane % 4 * 2 + i, quarter, octet % 2] = acc[i, half, tile]
            cute.arch.sync_threads()
            token = octet * OCTET + warp % OCTET
            if warp // OCTET == octet % 2 and token < attended.shape[0]:
                self.store(read[None, lane, warp % OCTET, None, octet % 2], values, scale, token, group, lane)

    @cute.jit
    def load(self, attended, head, octet, latents, quarter, lane):
        """Load the latent channels that multiply this lane's weights, of the lane's token. Past the last token, load
        the last token again.
        """
        token = cutlass.min(octet * OCTET + lane // 4, attended.shape[0] - 1)
        for step in cutlass.range_constexpr(STEPS):
            for i in cutlass.range_constexpr(2):
                place = quarter * (BLOCK // BF16_VECTOR) + 8 * step + lane % 4 * 2 + i
                load_words(attended[token, head, None], place, latents[None, i, step])

    @cute.jit
    def convert(self, raw, factor, zero) -> cute.Tensor:
        """Return the weights `raw`, multiplied by the scale `factor` and rounded to bf16, as mma operands
        [4, word, step, tile]."""
        weights = cute.make_rmem_tensor((4, WORDS, STEPS, TILES), Uint32)
        for tile in cutlass.range_constexpr(TILES):
            for step in cutlass.range_constexpr(STEPS):
                for word in cutlass.range_constexpr(WORDS):
                    for half in cutlass.range_constexpr(2):
                        low, high = four_halves(raw[word, step, half, tile])
                        weights[half, word, step, tile] = to_bf16(low, factor)
                        weights[2 + half, word, step, tile] = to_bf16(high, factor)
                    factor = depending_on(factor, [weights[i, word, step, tile] for i in range(4)], zero)
        return weights

    @cute.jit
    def store(self, quarters, values, scale, token, group, lane):
        """Add up a token's sums over the four quarters of the latent channels. Store the token's 128 results of group
        `group` in e4m3, four per lane, and the group's scale."""
        y = cute.make_rmem_tensor((4,), Float32)
        in_order(quarters, y)
        round_to(y, BFloat16)
        of_group = quantize(y, 4, self.use_ue8m0)
        out = cute.make_rmem_tensor((4,), Float8E4M3FN)
        out.store(y.load().to(Float8E4M3FN))
        cute.autovec_copy(out, cute.local_tile(values[token, None], (4,), (group * (GROUP // 4) + lane,)))
        if lane == 0:
            scale[token, group] = of_group


@cached
def compile_mla_values_cast_to_fp8(use_ue8m0: bool):
    """Compile f(attended [T, H, 512] bf16, weight [H * R, 512] e4m3, weight_scale [ceil(H * R / 128), 4]
    fp32, values [T, H * V] e4m3, scale [T, H * V / 128] fp32).

    weight is kv_b with R rows per head; the last V of them are W_UV. A scale is for 128 x 128 weights. T, H > 0; V is a
    multiple of 128; R is a multiple of 32 and at least V. weight is contiguous. Rows of all but the fp32 tensors start
    at multiples of 16 bytes.
    """
    tokens, heads = cute.sym_int(), cute.sym_int()
    return compile_sm90(
        MlaValuesCastToFp8Sm90(use_ue8m0),
        fake(BFloat16, (tokens, heads, HEAD_DIM_V), (*strides(2, 8), 1)),
        fake(Float8E4M3FN, (cute.sym_int(), HEAD_DIM_V), (HEAD_DIM_V, 1)),
        fake(Float32, (cute.sym_int(), QUARTERS), (*strides(1), 1), 4),
        fake(Float8E4M3FN, (tokens, cute.sym_int(divisibility=GROUP)), (*strides(1, GROUP), 1)),
        fake(Float32, (tokens, cute.sym_int()), (*strides(1), 1), 4),
        fake_stream(),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Return every (compile function, arguments) that the op can ask for."""
    return [(compile_mla_values_cast_to_fp8, (use_ue8m0,)) for use_ue8m0 in (True, False)]
