"""The logits of a router for few tokens: logits[t, e] = sum_k weight[e, k] x[t, k], in fp32.

Plan
- A cluster of 8 CTAs has 16 experts, the rows of the mma, and a tile of 8 or 32 tokens. Steps of 32 channels are
  divided into 64 slices, one for each warp of the cluster: for one token 8 E / 16 CTAs share the bytes of the matrix.
- A warp reads its slice of both operands straight to registers, 16 bytes of a row a lane, which are the operands of two
  mma instructions as they are: which channels meet in an instruction does not matter as long as both agree. All loads
  of a round are in flight before its first product.
- A slice is one chain of mma instructions from zero on. The slices of a CTA meet in shared memory and are added in
  their order. Their sum, the CTA's group, goes to the owner of the result, which adds the 8 groups in their order. So
  the bits of a logit follow from its two rows alone, whatever the tile and the other tokens.
- Before it waits for the kernel in front, a warp asks for its slice of the matrix to be brought to the L2 cache. It
  does not read it: that may be what the kernel in front writes.
Shared memory: slices, 512 x tokens bytes; groups received, 64 x tokens bytes.
Constraints: channels a multiple of 32, rows of 16-byte alignment. Rows that do not exist are the last one over again.
Roofline: memory, the matrix once a tile of tokens, from L2 but for the first. Latency: launch, one round of loads up to
8192 channels, three barriers.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.copies import prefetch_to_l2
from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.sm90 import WARP

EXPERTS = 16  # rows of an mma
OCTET = 8  # columns of an mma
STEP = 32  # channels of two mma instructions
VECTOR, WORDS = 8, 4  # channels and words of 16 bytes
CTAS = 8  # of a cluster
WARPS = 8
THREADS = WARPS * WARP
SLICES = CTAS * WARPS
ROUND = {8: 4, 32: 3}  # tokens of a tile -> steps whose loads are in flight at once


class RouterLogits:
    def __init__(self, dtype: type[cutlass.Numeric], tokens: int):
        self.dtype, self.tokens, self.octets, self.round = dtype, tokens, tokens // OCTET, ROUND[tokens]
        self.pairs = tokens // 2 * EXPERTS  # of neighbouring tokens of an expert

    @cute.jit
    def launch(self, x: cute.Tensor, weight: cute.Tensor, logits: cute.Tensor, stream):
        self.kernel(x, weight, logits).launch(
            grid=(cute.ceil_div(x.shape[0], self.tokens) * CTAS, cute.ceil_div(weight.shape[0], EXPERTS), 1),
            block=(THREADS, 1, 1),
            cluster=(CTAS, 1, 1),
            min_blocks_per_mp=2,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, weight: cute.Tensor, logits: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        cta, column, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        tile, rank = cta // CTAS, cta % CTAS

        @cute.struct
        class Storage:
            slices: cute.struct.Align[cute.struct.MemRange[Float32, WARPS * self.pairs * 2], 16]
            received: cute.struct.Align[cute.struct.MemRange[Float32, self.pairs * 2], 16]

        storage = SmemAllocator().allocate(Storage)
        slices = storage.slices.get_tensor(cute.make_layout((2, self.pairs, WARPS)))
        received = storage.received.get_tensor(cute.make_layout((2, self.pairs // CTAS, CTAS)))
        cute.arch.cluster_arrive_relaxed()

        steps = x.shape[1] // STEP
        index = rank * WARPS + warp
        first, end = slice_start(index, steps), slice_start(index + 1, steps)
        self.prefetch(weight, column, first, end, lane)
        wait_for_prerequisite_grids()
        if lane == 0:
            slices[0, 0, warp] = Float32(0.0)
        sums = self.multiply(x, weight, tile, column, first, end, slices[None, 0, warp], warp, lane)
        for octet in cutlass.range_constexpr(self.octets):
            for half in cutlass.range_constexpr(2):
                pair = (4 * octet + lane % 4) * EXPERTS + half * OCTET + lane // 4
                cute.autovec_copy(sums[None, half, octet], slices[None, pair, warp])
        cute.arch.sync_threads()
        cute.arch.cluster_wait()
        if tid < self.pairs:
            low, high = in_order(slices[None, tid, None])
            self.send(received, rank, tid, low, high)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if tid < self.pairs // CTAS:
            pair = rank * (self.pairs // CTAS) + tid
            expert, token = column * EXPERTS + pair % EXPERTS, tile * self.tokens + pair // EXPERTS * 2
            totals = in_order(received[None, tid, None])
            for i in cutlass.range_constexpr(2):
                if expert < logits.shape[1] and token + i < logits.shape[0]:
                    logits[token + i, expert] = totals[i]

    @cute.jit
    def prefetch(self, weight, column, first, end, lane):
        """Ask for a slice of the rows of the matrix, one a lane."""
        row = column * EXPERTS + lane
        if lane < EXPERTS and row < weight.shape[0] and first < end:
            source = weight[row, None].iterator.toint() + Int64(first) * (2 * STEP)
            prefetch_to_l2(Int64(source), (end - first) * (2 * STEP))

    @cute.jit
    def multiply(self, x, weight, tile, column, first, end, nothing, warp, lane) -> cute.Tensor:
        """A slice's products, as a lane has them: [2 neighbouring tokens, half of the experts, octet of tokens]."""
        place, quad = lane // 4, lane % 4
        acc = cute.make_rmem_tensor((2, 2, self.octets), Float32)
        acc.fill(0.0)
        for begin in cutlass.range(first, end, self.round, unroll=1):
            w = cute.make_rmem_tensor((WORDS, 2, self.round), Uint32)
            v = cute.make_rmem_tensor((WORDS, self.octets, self.round), Uint32)
            w.fill(0)
            v.fill(0)
            for i in cutlass.range_constexpr(self.round):
                if begin + i < end:
                    at = (begin + i) * (STEP // VECTOR) + quad
                    for half in cutlass.range_constexpr(2):
                        expert = cutlass.min(column * EXPERTS + half * OCTET + place, weight.shape[0] - 1)
                        source = cute.local_tile(weight[expert, None], (VECTOR,), (at,))
                        cute.autovec_copy(cute.recast_tensor(source, Uint32), w[None, half, i])
                    for octet in cutlass.range_constexpr(self.octets):
                        token = cutlass.min(tile * self.tokens + octet * OCTET + place, x.shape[0] - 1)
                        source = cute.local_tile(x[token, None], (VECTOR,), (at,))
                        cute.autovec_copy(cute.recast_tensor(source, Uint32), v[None, octet, i])
            # The compiler would put loads behind products that wait for the first ones. It moves none over a barrier,
            # and no product before it that needs a number read behind it: a zero, from where this warp has put it.
            cute.arch.barrier(barrier_id=1 + warp, number_of_threads=WARP)
            acc.store(acc.load() + nothing[0])
            for i in cutlass.range_constexpr(self.round):
                for word in cutlass.range_constexpr(0, WORDS, 2):
                    for octet in cutlass.range_constexpr(self.octets):
                        self.multiply_add(acc[None, None, octet], w[None, None, i], v[None, octet, i], word)
        return acc

    @cute.jit
    def multiply_add(self, acc: cute.Tensor, w: cute.Tensor, v: cute.Tensor, word: cutlass.Constexpr):
        """acc += 16 experts x 16 channels times 16 channels x 8 tokens, of the operands' words `word` and behind it."""
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
    def send(self, received: cute.Tensor, rank: Int32, pair: Int32, low: Float32, high: Float32):
        """Two numbers of this CTA's group to the CTA that owns them."""
        owned = received.shape[1]
        numbers = cute.make_rmem_tensor((2,), Float32)
        numbers[0], numbers[1] = low, high
        there = cute.arch.map_dsmem_ptr(received[None, pair % owned, rank].iterator, pair // owned)
        cute.autovec_copy(numbers, cute.make_tensor(there, cute.make_layout(2)))


@cute.jit
def slice_start(index: Int32, steps: Int32) -> Int32:
    """The first step of a slice."""
    return index * (steps // SLICES) + index * (steps % SLICES) // SLICES


@cute.jit
def in_order(parts: cute.Tensor):
    """The sums of parts [2, n] from zero on, in their order."""
    values = cute.make_rmem_tensor(parts.shape, Float32)
    for i in cutlass.range_constexpr(parts.shape[1]):
        cute.autovec_copy(parts[None, i], values[None, i])
    totals = [Float32(0.0), Float32(0.0)]
    for j in cutlass.range_constexpr(2):
        for i in cutlass.range_constexpr(parts.shape[1]):
            totals[j] += values[j, i]
    return totals[0], totals[1]
