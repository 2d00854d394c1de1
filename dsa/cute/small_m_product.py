"""A small-M product of 16-bit x and weight (the matrix), accumulated and stored in fp32.

y[t, o] = s[o] sum_k weight[o, k] x[t, k],  s[o] = `scale` for o >= `scaled_from`, otherwise 1

Plan
- A work tile is 16 rows of the matrix (M of the mma) by 8, 16 or 32 tokens. The k-steps of 32 channels are divided into
  64 slices, and the slices are divided into 8 groups. With `ctas` = 8, for few work tiles, a cluster of 8 CTAs computes
  a work tile: a CTA computes a group, and each of the CTA's 8 warps computes a slice. So all SMs share the loads of a
  small matrix. With `ctas` = 1, for enough work tiles to fill the GPU, one CTA computes a work tile, and each of the
  CTA's 8 warps computes a group.
- A warp loads its channels of both operands directly into registers, 16 bytes of a row per lane and k-step. These
  registers are the operands of two mma instructions: the order of channels within a k-step does not matter as long as
  both operands have the same order. A round is up to ROUND k-steps. All loads of a round are in flight before the
  round's first mma.
- A slice is one chain of mma instructions that starts at zero. The slices of a group are added in order: by the warp
  that computes all of them, or in a cluster through shared memory. The groups are added in order, too; in a cluster
  each CTA receives all groups' partial sums of the results that it stores. So the bits of a result depend only on its
  row of x and its row of the matrix. They do not depend on the tile, on other tokens and rows, or on whether a cluster
  or a single CTA computes the result.
- Before a warp waits for the previous kernel, it prefetches its channels of the matrix to L2. It does not load them to
  registers, since the previous kernel may write the matrix. If all CTAs are resident, the CTAs request the whole matrix
  at once, however many rounds of loads follow.
Shared memory: 512 bytes per token of a work tile; in a cluster 64 bytes more per token.
Constraints: channels a multiple of 32; rows aligned to 16 bytes. Without a cluster at least 2048 channels, because a
warp with several slices expects at least one k-step in each slice. Loads of a row past the end of x or of the matrix
read the last row instead.
Roofline: bound by memory. The matrix is read once per tile of tokens (from L2 after the first tile). The tokens are
read once per 16 rows of the matrix. Latency in a cluster: launch, three barriers, and the rounds of loads. One round is
enough up to 8192 channels. With 32 tokens per tile it is enough up to 6144 channels.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr

from dsa.cute.copies import prefetch_to_l2
from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.registers import filled, sum_in_order
from dsa.cute.slices import SLICES, slice_start
from dsa.cute.sm90 import WARP, cluster_sync, warp_and_lane

ROWS = 16  # rows of the matrix per mma (its M)
OCTET = 8  # tokens per mma (its N)
STEP = 32  # channels per k-step: two mma instructions
VECTOR, WORDS = 8, 4  # channels and 32-bit words in 16 bytes
CTAS = 8  # per cluster
WARPS = 8
THREADS = WARPS * WARP
# {(CTAs per work tile, tokens of a tile): k-steps per round}. The loads of a round are in flight at once, so a round
# has as many k-steps as the registers allow with two CTAs per SM.
ROUND = {(CTAS, 8): 4, (CTAS, 16): 4, (CTAS, 32): 3, (1, 8): 8, (1, 16): 4, (1, 32): 2}


class SmallMProduct:
    def __init__(self, dtype: type[cutlass.Numeric], tokens: int, ctas: int = CTAS):
        self.dtype, self.tokens, self.octets = dtype, tokens, tokens // OCTET
        self.ctas, self.round = ctas, ROUND[ctas, tokens]
        self.slices = SLICES // (ctas * WARPS)  # per warp
        self.pairs = tokens // 2 * ROWS  # result pairs of a tile; a pair is one matrix row for two adjacent tokens

    @cute.jit
    def __call__(self, x: cute.Tensor, weight: cute.Tensor, y: cute.Tensor, scale: Float32, scaled_from: Int32, stream):
        """Compute y [T, O] fp32 from x [T, K] and weight [O, K], both of `dtype`. Columns of y from `scaled_from` on
        are multiplied by `scale`."""
        self.kernel(x, weight, y, scale, scaled_from).launch(
            grid=(cute.ceil_div(x.shape[0], self.tokens) * self.ctas, cute.ceil_div(weight.shape[0], ROWS), 1),
            block=(THREADS, 1, 1),
            cluster=(self.ctas, 1, 1),
            min_blocks_per_mp=2,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, weight: cute.Tensor, y: cute.Tensor, scale: Float32, scaled_from: Int32):
        tid, _, _ = cute.arch.thread_idx()
        cta, column, _ = cute.arch.block_idx()
        warp, lane = warp_and_lane()
        tile, rank = cta // self.ctas, cta % self.ctas
        smem = cutlass.memory.SmemAllocator()
        sums = smem.allocate_tensor(Float32, cute.make_layout((2, self.pairs, WARPS)), 16)
        owned = self.pairs // CTAS if self.ctas > 1 else 1
        received = smem.allocate_tensor(Float32, cute.make_layout((2, owned, CTAS if self.ctas > 1 else 2)), 16)
        if const_expr(self.ctas > 1):
            cute.arch.cluster_arrive_relaxed()

        steps = x.shape[1] // STEP
        index = (rank * WARPS + warp) * self.slices
        first, end = slice_start(index, steps), slice_start(index + self.slices, steps)
        self.prefetch(weight, column, first, end, lane)
        wait_for_prerequisite_grids()
        if lane == 0:
            sums[0, 0, warp] = Float32(0.0)
        own = self.multiply(x, weight, tile, column, index, first, end, sums[None, 0, warp], warp, lane)
        for octet in cutlass.range_constexpr(self.octets):
            for half in cutlass.range_constexpr(2):
                pair = (4 * octet + lane % 4) * ROWS + half * OCTET + lane // 4
                cute.autovec_copy(own[None, half, octet], sums[None, pair, warp])
        cute.arch.sync_threads()
        if const_expr(self.ctas > 1):
            cute.arch.cluster_wait()
            if tid < self.pairs:
                low, high = in_order(sums[None, tid, None])
                send(received, rank, tid, low, high)
            cluster_sync()
            if tid < owned:
                totals = in_order(received[None, tid, None])
                self.store(y, tile, column, rank * owned + tid, totals, scale, scaled_from)
        else:
            if tid < self.pairs:
                self.store(y, tile, column, tid, in_order(sums[None, tid, None]), scale, scaled_from)

    @cute.jit
    def prefetch(self, weight, column, first, end, lane):
        row = column * ROWS + lane
        if lane < ROWS and row < weight.shape[0] and first < end:
            source = weight[row, None].iterator.toint() + Int64(first) * (2 * STEP)
            prefetch_to_l2(Int64(source), (end - first) * (2 * STEP))

    @cute.jit
    def multiply(self, x, weight, tile, column, index, first, end, nothing, warp, lane) -> cute.Tensor:
        """Return the sum of a warp's slices, from slice `index` on, in the layout of the accumulators: [2 adjacent
        tokens, half of the 16 rows, octet of tokens].

        first, end  the warp computes k-steps `first` to `end` - 1
        nothing     one element of shared memory that is zero; ptxas does not know this"""
        place, quad = lane // 4, lane % 4
        acc, total = filled((2, 2, self.octets), 0.0), filled((2, 2, self.octets), 0.0)
        steps, number = x.shape[1] // STEP, index + 1
        bound = slice_start(number, steps)
        for begin in cutlass.range(first, end, self.round, unroll=1):
            w = filled((WORDS, 2, self.round), 0, Uint32)
            v = filled((WORDS, self.octets, self.round), 0, Uint32)
            for i in cutlass.range_constexpr(self.round):
                if begin + i < end:
                    at = (begin + i) * (STEP // VECTOR) + quad
                    for half in cutlass.range_constexpr(2):
                        row = cutlass.min(column * ROWS + half * OCTET + place, weight.shape[0] - 1)
                        source = cute.local_tile(weight[row, None], (VECTOR,), (at,))
                        cute.autovec_copy(cute.recast_tensor(source, Uint32), w[None, half, i])
                    for octet in cutlass.range_constexpr(self.octets):
                        token = cutlass.min(tile * self.tokens + octet * OCTET + place, x.shape[0] - 1)
                        source = cute.local_tile(x[token, None], (VECTOR,), (at,))
                        cute.autovec_copy(cute.recast_tensor(source, Uint32), v[None, octet, i])
            # Keep all loads before the first mma. Otherwise ptxas would move loads after mma instructions that wait for
            # earlier loads. ptxas moves no load across a barrier. It moves no mma before it either, because every mma
            # needs the zero that is read after it.
            cute.arch.barrier(barrier_id=1 + warp, number_of_threads=WARP)
            acc.store(acc.load() + nothing[0])
            for i in cutlass.range_constexpr(self.round):
                for word in cutlass.range_constexpr(0, WORDS, 2):
                    for octet in cutlass.range_constexpr(self.octets):
                        self.multiply_add(acc[None, None, octet], w[None, None, i], v[None, octet, i], word)
                if const_expr(self.slices > 1):
                    if begin + i + 1 == bound:
                        total.store(total.load() + acc.load())
                        acc.fill(0.0)
                        number += 1
                        bound = slice_start(number, steps)
        return total if const_expr(self.slices > 1) else acc

    @cute.jit
    def multiply_add(self, acc: cute.Tensor, w: cute.Tensor, v: cute.Tensor, word: cutlass.Constexpr):
        """acc += (16 rows x 16 channels of the matrix) times (16 channels x 8 tokens of x). The 16 channels are in
        words `word` and `word` + 1 of the lanes."""
        kind = "bf16" if const_expr(self.dtype is BFloat16) else "f16"
        given = [w[word, 0], w[word, 1], w[word + 1, 0], w[word + 1, 1], v[word], v[word + 1]]
        made = cute.arch.inline_ptx(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
            + "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, "
            + "{{$r6}, {$r7}, {$r8}, {$r9}};",
            write_only_types=[Float32] * 4,
            read_only_args=[*given, acc[0, 0], acc[1, 0], acc[0, 1], acc[1, 1]],
        )
        for half in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(2):
                acc[i, half] = made[2 * half + i]

    @cute.jit
    def store(self, y: cute.Tensor, tile, column, pair, totals, scale: Float32, scaled_from: Int32):
        """Store the results of a matrix row for two adjacent tokens. Tokens and rows past the end are skipped."""
        row, token = column * ROWS + pair % ROWS, tile * self.tokens + pair // ROWS * 2
        factor = scale if row >= scaled_from else Float32(1.0)
        for i in cutlass.range_constexpr(2):
            if row < y.shape[1] and token + i < y.shape[0]:
                y[token + i, row] = totals[i] * factor


@cute.jit
def send(received: cute.Tensor, rank: Int32, pair: Int32, low: Float32, high: Float32):
    """Send two partial sums of this CTA's group to the CTA that adds the sums of all groups.
    received  [2, pairs that a CTA stores, sending CTA] in each CTA's shared memory"""
    owned = received.shape[1]
    numbers = cute.make_rmem_tensor((2,), Float32)
    numbers[0], numbers[1] = low, high
    there = cute.arch.map_dsmem_ptr(received[None, pair % owned, rank].iterator, pair // owned)
    cute.autovec_copy(numbers, cute.make_tensor(there, cute.make_layout(2)))


@cute.jit
def in_order(parts: cute.Tensor):
    """-> the two sums over n of parts [2, n], added in order, starting from zero."""
    values = cute.make_rmem_tensor(parts.shape, Float32)
    for i in cutlass.range_constexpr(parts.shape[1]):
        cute.autovec_copy(parts[None, i], values[None, i])
    return sum_in_order(values[0, None]), sum_in_order(values[1, None])
