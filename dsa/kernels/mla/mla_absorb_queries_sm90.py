"""Absorb W_UK, which is in FP8, into the queries, for small M (few tokens).

q[t, h] = [q_nope[t, h] W_UK[h] | rope(q_pe[t, h])]

W_UK[h] [nope, 512] is the first `nope` rows of head h in kv_b.

- Tiles: a CTA computes 128 of the 512 latent channels of one head. A warp has 32 of the head's nope
  channels, which are rows of W_UK: a block of 32 x 128 weights with one scale. The 128 heads of V3.2 make 512
  CTAs, four per SM, in one wave.
- Weights: a warp reads its 4 KiB block once, directly to registers, with all loads in flight together. A lane loads 16
  adjacent latent channels of 8 rows. So a load instruction of the warp reads 128 bytes of each of four rows, which are
  whole cache lines. The rows are input channels (K) of an mma, and a register of an mma operand has the values of two
  input channels. So the lane interleaves the weights of two rows, scales them and rounds them to bf16
  (up_projection.py).
- Products: tokens are N of the mma, eight (an octet) at a time. A lane then has sums for 16 latent channels of two
  tokens. The warps' sums, each over 32 nope channels, are added in a fixed order through shared memory. So the bits of
  a token do not depend on the other tokens.
- Pipeline: the sums of octets alternate between two buffers, so one barrier per octet suffices. A warp loads the
  queries of the next octet after it has issued the products of the current octet.
- Rope: of a head's four CTAs, CTA c rotates q_pe of the tokens t with t % 4 = c, while the weights load. A warp rotates
  one token at a time, one pair of channels per lane.
- Launch: programmatic dependent launch. Before it waits for the previous kernel, a CTA prefetches its
  quarter of W_UK[h], which is contiguous, into the L2 cache.
Shared memory: two buffers of (nope / 32) x 4736 bytes.
Registers per thread: 32 of FP8 weights, 64 of bf16 weights, 32 of sums.
Constraints: 512 latent and 64 rope channels; the numbers of nope channels and of rows of kv_b per head are multiples
of 32.
Roofline: bound by memory: W_UK is read once. For V3.2 this is 8.4 MB, which takes 2.8 us at 3 TB/s. Part of W_UK
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
from dsa.cute.rounded import rotate_pair
from dsa.cute.sm90 import WARP
from dsa.kernels.mla.fp8_kv_convert import halves_of_two
from dsa.kernels.mla.limits import ABSORBED_NOPE, HEAD_DIM, HEAD_DIM_V
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

COLUMNS = HEAD_DIM_V // BLOCK  # CTAs per head
ROWS = 32  # rows of weights per warp
OWN_ROWS = ROWS // 4  # rows of weights per lane
PAIRS = (HEAD_DIM - HEAD_DIM_V) // 2  # rope pairs per head
# A slice is the rows of weights of one warp. A warp computes the sums over its slice.
READERS = OCTET // 2  # number of warps that add the slices' sums, for two tokens each
# Strides, in elements, of an octet's sums in shared memory: between chunks of 16 channels of two tokens, between pairs
# of tokens, and between slices. The padding lets the 16-byte accesses of eight lanes use all banks.
CHUNK = 2 * VECTOR + 4
OF_PAIR = BLOCK // VECTOR * CHUNK + 8
OF_SLICE = READERS * OF_PAIR


class MlaAbsorbQueriesSm90:
    def __init__(self, nope: int):
        self.slices = nope // ROWS
        self.threads = self.slices * WARP

    @cute.jit
    def __call__(self, q_nope, q_pe, cos, sin, weight, weight_scale, q, stream):
        self.kernel(q_nope, q_pe, cos, sin, weight, weight_scale, q, weight.shape[0] // q.shape[1]).launch(
            grid=(q.shape[1] * COLUMNS, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=512 // self.threads,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        q_nope: cute.Tensor,
        q_pe: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        weight: cute.Tensor,
        weight_scale: cute.Tensor,
        q: cute.Tensor,
        rows: Int32,
    ):
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        head, column = block // COLUMNS, block % COLUMNS

        @cute.struct
        class Storage:
            sums: cute.struct.Align[cute.struct.MemRange[Float32, 2 * self.slices * OF_SLICE], 16]
            zeros: cute.struct.MemRange[Uint32, self.slices]

        storage = SmemAllocator().allocate(Storage)
        written, read = (storage.sums.get_tensor(layout) for layout in self.layouts())
        self.prefetch(weight, head * rows, column, warp, lane)
        wait_for_prerequisite_grids()

        first = head * rows + warp * ROWS
        raw = cute.make_rmem_tensor((WORDS, OWN_ROWS), Uint32)
        for i in cutlass.range_constexpr(OWN_ROWS):
            row = weight[first + lane % 4 * OWN_ROWS + i, None]
            load_words(row, column * (BLOCK // VECTOR) + lane // 4, raw[None, i])
        scale = weight_scale[first // BLOCK, column]
        queries = cute.make_rmem_tensor((WORDS,), Uint32)
        self.load(q_nope, head, Int32(0), queries, warp, lane)
        zero = zero_behind_loads(storage.zeros.get_tensor(cute.make_layout(self.slices)), warp, lane)
        self.rotate(q_pe, cos, sin, q, head, column, warp, lane)

        weights = self.convert(raw, scale, zero)
        acc = cute.make_rmem_tensor((4, 2 * WORDS), Float32)
        octets = cute.ceil_div(q.shape[0], OCTET)
        for octet in cutlass.range(octets, unroll=1):
            acc.fill(0.0)
            for step in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(2 * WORDS):
                    multiply_add(acc[None, i], weights[None, i, step], queries[2 * step], queries[2 * step + 1])
            if octet + 1 < octets:
                self.load(q_nope, head, octet + 1, queries, warp, lane)
            for i in cutlass.range_constexpr(2 * WORDS):
                cute.autovec_copy(acc[None, i], written[None, i, lane // 4, lane % 4, warp, octet % 2])
            cute.arch.sync_threads()
            if warp < READERS:
                slices = read[None, lane % 4, lane // 4, warp, None, octet % 2]
                self.store(slices, q, head, column, octet * OCTET + 2 * warp, lane)

    def layouts(self):
        """Return two layouts of the same sums in shared memory: one for writing, one for reading.

        written  [a lane's 4 results of an mma, mma, lane / 4, lane % 4 (pair of tokens), slice, buffer]
        read     [sums of 4 channels x 2 tokens, quarter of a chunk, chunk of 16 channels, pair of tokens, slice,
                 buffer]
        """
        outer = (CHUNK, OF_PAIR, OF_SLICE, self.slices * OF_SLICE)
        shape = (BLOCK // VECTOR, READERS, self.slices, 2)
        return [cute.make_layout((*s, *shape), stride=(1, s[0], *outer)) for s in ((4, 2 * WORDS), (8, 4))]

    @cute.jit
    def prefetch(self, weight, first, column, warp, lane):
        """Prefetch this CTA's quarter of the head's W_UK into the L2 cache, an equal part per warp. first: index of
        W_UK's first row in `weight`."""
        rows = ROWS // COLUMNS
        if lane == 0:
            source = weight[first + (column * self.slices + warp) * rows, None].iterator.toint()
            prefetch_to_l2(Int64(source), Int32(rows * HEAD_DIM_V))

    @cute.jit
    def load(self, q_nope, head, octet, queries, warp, lane):
        """Load the nope channels that multiply this lane's rows of weights, of the lane's token. Past the last token,
        load the last token again.
        """
        token = cutlass.min(octet * OCTET + lane // 4, q_nope.shape[0] - 1)
        load_words(q_nope[token, head, None], (warp * ROWS + lane % 4 * OWN_ROWS) // BF16_VECTOR, queries)

    @cute.jit
    def rotate(self, q_pe, cos, sin, q, head, column, warp, lane):
        for token in cutlass.range(column + COLUMNS * warp, q.shape[0], COLUMNS * self.slices, unroll=1):
            pair = cute.make_rmem_tensor((2,), BFloat16)
            cute.autovec_copy(cute.local_tile(q_pe[token, head, None], (2,), (lane,)), pair)
            first, second = rotate_pair(Float32(pair[0]), Float32(pair[1]), cos[token, lane], sin[token, lane])
            pair[0], pair[1] = BFloat16(first), BFloat16(second)
            cute.autovec_copy(pair, cute.local_tile(q[token, head, None], (2,), (HEAD_DIM_V // 2 + lane,)))

    @cute.jit
    def convert(self, raw, scale, zero) -> cute.Tensor:
        """Return the weights as mma operands [4, i, step] in bf16. An operand has the lane's latent channels 2 i and
        2 i + 1, for four of the lane's eight rows: 4 `step` to 4 `step` + 3."""
        weights = cute.make_rmem_tensor((4, 2 * WORDS, 2), Uint32)
        for step in cutlass.range_constexpr(2):
            for word in cutlass.range_constexpr(WORDS):
                for pair in cutlass.range_constexpr(2):
                    row = 4 * step + 2 * pair
                    halves = halves_of_two(raw[word, row], raw[word, row + 1])
                    for i in cutlass.range_constexpr(4):
                        weights[2 * pair + i % 2, 2 * word + i // 2, step] = to_bf16(halves[i], scale)
                scale = depending_on(scale, [weights[i % 4, 2 * word + i // 4, step] for i in range(8)], zero)
        return weights

    @cute.jit
    def store(self, slices, q, head, column, token, lane):
        """For tokens `token` and `token` + 1, add up the slices' sums in order, and store the totals in q as bf16. A
        lane has four latent channels of each token."""
        total = cute.make_rmem_tensor((8,), Float32)
        in_order(slices, total)
        out = cute.make_rmem_tensor((4,), BFloat16)
        for i in cutlass.range_constexpr(2):
            if token + i < q.shape[0]:
                for c in cutlass.range_constexpr(4):
                    out[c] = BFloat16(total[2 * c + i])
                target = cute.local_tile(q[token + i, head, None], (4,), (column * (BLOCK // 4) + lane,))
                cute.autovec_copy(out, target)


@cached
def compile_mla_absorb_queries(nope: int):
    """Compile f(q_nope [T, H, nope] bf16, q_pe [T, H, 64] bf16, cos, sin [T, 32] fp32, weight [H * R, 512]
    e4m3, weight_scale [ceil(H * R / 128), 4] fp32, q [T, H, 576] bf16).

    weight is kv_b with R rows per head; the first `nope` of them are W_UK. A scale is for 128 x 128 weights. T, H > 0;
    R is a multiple of 32 and at least nope. weight is contiguous. Rows of all but the fp32 tensors start at multiples
    of 16 bytes.
    """
    tokens, heads, rows = (cute.sym_int() for _ in range(3))
    q_nope, q_pe, q = (fake(BFloat16, (tokens, heads, n), (*strides(2, 8), 1)) for n in (nope, 2 * PAIRS, HEAD_DIM))
    return compile_sm90(
        MlaAbsorbQueriesSm90(nope),
        *(q_nope, q_pe),
        *(fake(Float32, (tokens, PAIRS), (*strides(1), 1), 4) for _ in range(2)),
        fake(Float8E4M3FN, (rows, HEAD_DIM_V), (HEAD_DIM_V, 1)),
        fake(Float32, (cute.sym_int(), COLUMNS), (*strides(1), 1), 4),
        *(q, fake_stream()),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Return every (compile function, arguments) that the op can ask for."""
    return [(compile_mla_absorb_queries, (nope,)) for nope in ABSORBED_NOPE]
