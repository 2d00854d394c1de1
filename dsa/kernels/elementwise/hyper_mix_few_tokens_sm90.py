"""The projection of DeepSeek-V4's hyper-connections, for few tokens, and for shapes that hyper_mix_sm90.py does not
support: mix[t, c] = sum_k (high + middle + low)[c, k] v[t, k], where v[t] is the concatenation of token t's streams.
high, middle and low are the matrix's three bf16 parts (hyper_mix_sums.py).

Plan
- A cluster of 8 CTAs computes 8 outputs of 16 or 32 tokens. A matrix of 24 outputs takes three clusters, so even with
  one token 24 CTAs share the loads of the matrix. Each of the 64 warps of a cluster computes one of the 64 slices
  (hyper_mix_sums.py).
- A warp loads its slice of tokens and matrix directly into registers, 16 bytes per lane. These bytes are the operands
  of two mma instructions without any rearrangement, so they do not go through shared memory. Several blocks of 64
  channels are in flight at once.
- A CTA adds its slices through shared memory. The sum is called a group. The CTA sends it to the CTAs of the cluster
  that own the results; each CTA owns 1/8 of the tokens. The owners add the 8 groups and store.
- Before it waits for the previous kernel, a warp prefetches its slice of the matrix to L2. It does not load the slice,
  because the previous kernel may still be writing the matrix.
Shared memory: slices, 256 x rows bytes; received groups, 32 x rows bytes. rows is the number of tokens of a cluster, 16
or 32.
Constraints: D a multiple of 8, rows at multiples of 16 bytes. Loads of tokens past the end read the last token instead,
and loads of outputs past the end the last output.
Roofline: bound by memory. The matrix is read once per 16 or 32 tokens, from L2 except for the first time. With few
tokens, bound by the latency of the launch, of one or two rounds of loads, and of two barriers.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Uint32

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake_rows, fake_stream
from dsa.cute.registers import filled
from dsa.cute.slices import slice_start
from dsa.cute.sm90 import WARP, cluster_sync, warp_and_lane
from dsa.cute.small_m_product import send
from dsa.kernels.elementwise.hyper_mix_sums import (
    BLOCK,
    CTAS,
    GROUP_SLICES,
    OUTPUTS,
    PARTS,
    VECTOR,
    add_groups,
    multiply_add,
    octet_row,
    prefetch_slice,
    sum_of_group,
)
from dsa.kernels.elementwise.limits import CHANNEL_MULTIPLE, MIX_FEW_ROWS
from dsa.runtime.compile_cache import Variants, cached, compile_sm90

WORDS = 4  # 32-bit words in 16 bytes
HALVES = BLOCK // (4 * VECTOR)  # 16-byte loads per lane for one row of a block
THREADS = GROUP_SLICES * WARP


class HyperMixFewTokensSm90:
    def __init__(self, rows: int):
        self.rows, self.octets = rows, rows // 8
        self.together = 64 // rows  # blocks in flight: they take 160 registers with 16 tokens, 112 with 32
        self.pairs = 4 * rows

    @cute.jit
    def __call__(self, streams: cute.Tensor, parts: cute.Tensor, out: cute.Tensor, stream):
        tokens = cute.ceil_div(out.shape[0], self.rows)
        self.kernel(streams, parts, out).launch(
            grid=(tokens * CTAS, cute.ceil_div(out.shape[1], OUTPUTS), 1),
            block=(THREADS, 1, 1),
            cluster=(CTAS, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, streams: cute.Tensor, parts: cute.Tensor, out: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        cta, column, _ = cute.arch.block_idx()
        warp, lane = warp_and_lane()
        tile, rank = cta // CTAS, cta % CTAS
        smem = cutlass.memory.SmemAllocator()
        slices = smem.allocate_tensor(Float32, cute.make_layout((2, self.pairs, GROUP_SLICES)), 16)
        received = smem.allocate_tensor(Float32, cute.make_layout((2, self.pairs // CTAS, CTAS)), 16)
        cute.arch.cluster_arrive_relaxed()

        blocks = streams.shape[1] * cute.ceil_div(streams.shape[2], BLOCK)
        index = rank * GROUP_SLICES + warp
        first, end = slice_start(index, blocks), slice_start(index + 1, blocks)
        prefetch_slice(parts, streams.shape[2], column, OUTPUTS, first, end, lane)
        wait_for_prerequisite_grids()
        if lane == 0:
            slices[0, 0, warp] = Float32(0.0)
        sums = self.multiply(streams, parts, tile, column, first, end, slices[None, 0, warp], warp, lane)
        for octet in cutlass.range_constexpr(self.octets):
            pair = (8 * octet + octet_row(lane // 4)) * 4 + lane % 4
            cute.autovec_copy(sums[None, octet], slices[None, pair, warp])
        cute.arch.sync_threads()
        cute.arch.cluster_wait()
        if tid < self.pairs:
            send(received, rank, tid, *sum_of_group(slices, tid))
        cluster_sync()
        add_groups(received, out, rank, tile * self.rows, column * OUTPUTS, 1, tid, THREADS)

    @cute.jit
    def multiply(self, streams, parts, tile, column, first, end, nothing, warp, lane) -> cute.Tensor:
        """-> this lane's sums of a slice: [2 adjacent mma columns, octet of tokens]. The slice is the blocks [first,
        end). nothing: a zero that this warp wrote to shared memory."""
        of_stream, vectors = cute.ceil_div(streams.shape[2], BLOCK), streams.shape[2] // VECTOR
        place, quad = octet_row(lane // 4), lane % 4
        output = cutlass.min(column * OUTPUTS + place, parts.shape[1] - 1)
        acc = filled((4, self.octets // 2, PARTS), 0.0)
        for begin in cutlass.range(first, end, self.together, unroll=1):
            v = filled((WORDS, self.octets, HALVES, self.together), 0, Uint32)
            w = filled((WORDS, PARTS, HALVES, self.together), 0, Uint32)
            for i in cutlass.range_constexpr(self.together):
                block = begin + i
                k = block // of_stream
                for half in cutlass.range_constexpr(HALVES):
                    at = block % of_stream * (BLOCK // VECTOR) + half * 4 + quad
                    if at < (vectors if block < end else 0):
                        for part in cutlass.range_constexpr(PARTS):
                            source = cute.local_tile(parts[part, output, None], (VECTOR,), (k * vectors + at,))
                            cute.autovec_copy(cute.recast_tensor(source, Uint32), w[None, part, half, i])
                        for octet in cutlass.range_constexpr(self.octets):
                            token = cutlass.min(tile * self.rows + octet * 8 + place, streams.shape[0] - 1)
                            source = cute.local_tile(streams[token, k, None], (VECTOR,), (at,))
                            cute.autovec_copy(cute.recast_tensor(source, Uint32), v[None, octet, half, i])
            # All loads must be issued before the first mma waits for its operands. The compiler moves no load across a
            # barrier. It moves no mma before the barrier, because an mma needs the zero that is read after it.
            cute.arch.barrier(barrier_id=1 + warp, number_of_threads=WARP)
            acc.store(acc.load() + nothing[0])
            for i in cutlass.range_constexpr(self.together):
                for half in cutlass.range_constexpr(HALVES):
                    for pair in cutlass.range_constexpr(0, WORDS, 2):
                        for m in cutlass.range_constexpr(self.octets // 2):
                            for part in cutlass.range_constexpr(PARTS):
                                upper, lower = v[None, 2 * m, half, i], v[None, 2 * m + 1, half, i]
                                multiply_add(acc[None, m, part], upper, lower, w[None, part, half, i], pair)
        sums = cute.make_rmem_tensor((2, self.octets), Float32)
        for octet in cutlass.range_constexpr(self.octets):
            for i in cutlass.range_constexpr(2):
                at = octet % 2 * 2 + i
                sums[i, octet] = acc[at, octet // 2, 0] + (acc[at, octet // 2, 1] + acc[at, octet // 2, 2])
        return sums


@cached
def compile_hyper_mix_few_tokens(rows: int):
    """-> f(streams [T, n, D] bf16, parts [3, C, n D] bf16, mix [T, C] fp32); T, n, C, D > 0, rows of streams and parts
    at multiples of 16 bytes."""
    tokens, count = cute.sym_int(), cute.sym_int()
    channels, width = (cute.sym_int(divisibility=CHANNEL_MULTIPLE) for _ in range(2))
    return compile_sm90(
        HyperMixFewTokensSm90(rows),
        fake_rows(BFloat16, tokens, cute.sym_int(), channels),
        fake_rows(BFloat16, PARTS, count, width),
        fake_rows(Float32, tokens, count, align=4),
        fake_stream(),
    )


def shipped_variants() -> Variants:
    return [(compile_hyper_mix_few_tokens, (rows,)) for rows in MIX_FEW_ROWS]
