"""Hyper-connections between two sublayers, for few tokens: the new streams and their projection. DeepSeek-V4's mix the
streams by a matrix, comb; Hy4's streams are independent and have no comb.

Plan
- As in `hyper_mix_few_tokens_sm90`, a cluster of 8 CTAs computes some of the outputs, and each of the cluster's 64
  warps computes one of the 64 slices. The sums are added in the order of that kernel, so the bits are equal. There are
  at most 8 tokens (the op uses this kernel for up to 4). They are the upper octet of the mma's 16 rows; the lower octet
  is zeros.
- A warp computes its slice of the new streams, 256 channels at a time, with 8 channels per lane and token. The warp
  writes these channels to shared memory, and only the same warp reads them back as mma operands. All clusters compute
  the same new streams, and the cluster with the first outputs stores them.
- A cluster has 2 outputs, so that 24 outputs occupy 96 CTAs. With one token, loading the matrix determines the time: an
  SM loads 90 KB per microsecond, so more CTAs load the matrix faster. The other 6 columns of an mma repeat these two
  outputs.
- Without comb, a new stream needs only the old stream with its number, so a lane loads that one instead of four.
- A warp loads the matrix by cp.async while it computes the new streams. cp.async needs no registers, so the registers
  are free for the loads of several tokens. Before it waits for the previous kernel, a warp prefetches its slice of the
  matrix to L2.
Shared memory: new streams, 4 KB per token; matrix, 25 KB; slices and groups as in `hyper_mix_few_tokens_sm90` with 8
rows.
Constraints: four streams, D a multiple of 8, rows at multiples of 16 bytes.
Roofline: bound by memory: the matrix is read once. Latency: launch, one round of loads (D = 4096), two barriers. With D
= 4096, each token adds 20 KB that every CTA reads, and 100 instructions per lane.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32, const_expr

from dsa.cute.copies import gather_16
from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake_rows, fake_stream
from dsa.cute.pipeline import Mbarriers, expect_bytes
from dsa.cute.registers import converted, filled, loaded
from dsa.cute.slices import slice_start
from dsa.cute.sm90 import WARP, warp_and_lane
from dsa.kernels.elementwise.hyper_arithmetic import WORDS, independent_stream, new_stream
from dsa.kernels.elementwise.hyper_mix_sums import (
    BLOCK,
    CTAS,
    GROUP_SLICES,
    PARTS,
    VECTOR,
    add_groups,
    multiply_add,
    octet_row,
    prefetch_slice,
    sum_of_group,
)
from dsa.kernels.elementwise.limits import CHANNEL_MULTIPLE, EXPAND_MIX_TOKENS, HYPER_STREAMS
from dsa.runtime.compile_cache import Variants, cached, compile_sm90

AT_ONCE = 4  # tokens whose loads are in flight together
OWN_OUTPUTS = 2  # outputs per cluster
TOGETHER = 4  # blocks per iteration, in which each lane has one vector per token
THREADS = GROUP_SLICES * WARP
PAIRS = 4 * 8  # pairs of adjacent mma columns: 4 per token, 8 tokens
ROW = TOGETHER * BLOCK + VECTOR  # stride of rows in shared memory, padded so that a quarter-warp reads all banks


class HyperExpandMixSm90:
    """most: upper limit on the number of tokens. It is at most 8. mixed: whether the streams are mixed, else comb is
    None."""

    def __init__(self, most: int, mixed: bool):
        self.most, self.at_once, self.mixed = most, min(most, AT_ONCE), mixed
        self.old = HYPER_STREAMS if mixed else 1  # old streams that a new stream needs

    @cute.jit
    def __call__(
        self,
        y: cute.Tensor,
        streams: cute.Tensor,
        post: cute.Tensor,
        comb: cute.Tensor | None,
        parts: cute.Tensor,
        new: cute.Tensor,
        mix: cute.Tensor,
        stream,
    ):
        self.kernel(y, streams, post, comb, parts, new, mix).launch(
            grid=(CTAS, cute.ceil_div(mix.shape[1], OWN_OUTPUTS), 1),
            block=(THREADS, 1, 1),
            cluster=(CTAS, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        y: cute.Tensor,
        streams: cute.Tensor,
        post: cute.Tensor,
        comb: cute.Tensor | None,
        parts: cute.Tensor,
        new: cute.Tensor,
        mix: cute.Tensor,
    ):
        tid, _, _ = cute.arch.thread_idx()
        rank, column, _ = cute.arch.block_idx()
        warp, lane = warp_and_lane()

        @cute.struct
        class Storage:
            new: cute.struct.Align[cute.struct.MemRange[BFloat16, GROUP_SLICES * self.most * ROW], 16]
            matrix: cute.struct.Align[cute.struct.MemRange[BFloat16, GROUP_SLICES * PARTS * OWN_OUTPUTS * ROW], 16]
            slices: cute.struct.Align[cute.struct.MemRange[Float32, GROUP_SLICES * PAIRS * 2], 16]
            received: cute.struct.Align[cute.struct.MemRange[Float32, PAIRS * 2], 16]
            groups: cute.struct.MemRange[Int64, 1]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        kept = storage.new.get_tensor(cute.make_layout((ROW, self.most, GROUP_SLICES)))
        matrix = storage.matrix.get_tensor(cute.make_layout((ROW, OWN_OUTPUTS, PARTS, GROUP_SLICES)))
        slices = storage.slices.get_tensor(cute.make_layout((2, PAIRS, GROUP_SLICES)))
        received = storage.received.get_tensor(cute.make_layout((2, PAIRS // CTAS, CTAS)))
        groups = Mbarriers(storage.groups.data_ptr(), 1)
        if tid == 0:
            groups.init(1)
            cute.arch.mbarrier_init_fence()
            expect_bytes(groups.barrier(), PAIRS * 2 * 4)
        cute.arch.cluster_arrive_relaxed()

        blocks = HYPER_STREAMS * cute.ceil_div(streams.shape[2], BLOCK)
        index = rank * GROUP_SLICES + warp
        first, end = slice_start(index, blocks), slice_start(index + 1, blocks)
        prefetch_slice(parts, streams.shape[2], column, OWN_OUTPUTS, first, end, lane)
        wait_for_prerequisite_grids()
        zero = cute.recast_tensor(slices[None, 0, warp], Uint32)
        if lane == 0:
            zero[0] = Uint32(0)
        sums = self.multiply(
            *(y, streams, post, comb, parts, new, kept[None, None, warp], matrix[None, None, None, warp]),
            *(zero, column, first, end, warp, lane),
        )
        cute.autovec_copy(sums, slices[None, octet_row(lane // 4) * 4 + lane % 4, warp])
        cute.arch.sync_threads()
        cute.arch.cluster_wait()
        if tid < PAIRS:
            self.send(received, groups.barrier(), rank, tid, sum_of_group(slices, tid))
        groups.wait(0)
        first_output = column * OWN_OUTPUTS
        own = (mix.shape[0], cutlass.min(first_output + OWN_OUTPUTS, mix.shape[1]))
        own_mix = cute.make_tensor(mix.iterator, cute.make_layout(own, stride=mix.stride))
        add_groups(received, own_mix, rank, 0, first_output, 1, tid, THREADS)

    @cute.jit
    def send(self, received, barrier, rank, pair, group):
        """Send `group`, this CTA's two sums of pair `pair`, to the CTA of the cluster that owns the pair. That CTA's
        mbarrier counts their bytes. A cluster barrier would also wait for the stores of the new streams."""
        owned = received.shape[1]
        there = cute.arch.map_dsmem_ptr(received[None, pair % owned, rank].iterator, pair // owned)
        counted = cute.arch.map_dsmem_ptr(barrier, pair // owned)
        cute.arch.inline_ptx(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [{$r0}], "
            + "{"
            + "{$r1}, {$r2}"
            + "}, [{$r3}];",
            read_only_args=[Int32(there.toint()), group[0], group[1], Int32(counted.toint())],
        )

    @cute.jit
    def channel(self, channels, begin, end, lane):
        """Find this lane's vector in the TOGETHER blocks from `begin` on. -> (the vector's stream, its index in the
        stream, whether it exists). A vector outside the stream, or from block `end` on, does not exist."""
        of_stream = cute.ceil_div(channels, BLOCK)
        block = begin + lane // (BLOCK // VECTOR)
        stream = Int32(0)
        for k in cutlass.range_constexpr(1, HYPER_STREAMS):
            stream += Int32(1) if block >= k * of_stream else Int32(0)
        at = (block - stream * of_stream) * (BLOCK // VECTOR) + lane % (BLOCK // VECTOR)
        return stream, at, block < end and at < channels // VECTOR

    @cute.jit
    def multiply(self, y, streams, post, comb, parts, new, kept, matrix, zero, column, first, end, warp, lane):
        """-> this lane's two sums of a slice, for two adjacent mma columns and one token. The slice is the blocks
        [first, end). `kept` and `matrix` are this warp's shared memory for new streams and matrix. `zero` is a zero
        that this warp wrote to shared memory."""
        tokens, channels = streams.shape[0], streams.shape[2]
        place, quad = octet_row(lane // 4), lane % 4
        row, output = cutlass.min(place, tokens - 1), place % OWN_OUTPUTS
        acc, nothing = filled((4, PARTS), 0.0), filled((WORDS,), 0, Uint32)
        for begin in cutlass.range(first, end, TOGETHER, unroll=1):
            stream, at, exists = self.channel(channels, begin, end, lane)
            own = Int64((stream * (channels // VECTOR) + at) * VECTOR * 2) if exists else Int64(0)
            for part in cutlass.range_constexpr(PARTS):
                for i in cutlass.range_constexpr(OWN_OUTPUTS):
                    c = column * OWN_OUTPUTS + i
                    source = parts[part, cutlass.min(c, parts.shape[1] - 1), None].iterator.toint()
                    target = cute.local_tile(matrix[None, i, part], (VECTOR,), (lane,)).iterator.toint()
                    gather_16(Int32(target), Int64(source) + own, exists and c < parts.shape[1])
            cute.arch.cp_async_commit_group()
            for t in cutlass.range(0, tokens, self.at_once, unroll=1):
                raw, weights = self.load(y, streams, post, comb, t, stream, at, exists)
                # All loads must be issued before the first product waits for its operands. The compiler moves no load
                # across a barrier. It moves no product before the barrier, because a product needs the zero that is
                # read after it.
                cute.arch.barrier(barrier_id=1 + warp, number_of_threads=WARP)
                for i in cutlass.range_constexpr(self.at_once):
                    words = cute.recast_tensor(raw[None, self.old, i], Uint32)
                    words.store(words.load() ^ zero[0])
                self.expand(raw, weights, new, kept, t, stream, at, exists and column == 0, lane)
            cute.arch.cp_async_wait_group(0)
            cute.arch.barrier(barrier_id=1 + warp, number_of_threads=WARP)
            for i in cutlass.range_constexpr(0, TOGETHER * BLOCK // VECTOR, 4):
                v = self.operand(kept[None, row], i + quad)
                w = [self.operand(matrix[None, output, part], i + quad) for part in range(PARTS)]
                for pair in cutlass.range_constexpr(0, WORDS, 2):
                    for part in cutlass.range_constexpr(PARTS):
                        multiply_add(acc[None, part], v, nothing, w[part], pair)
            cute.arch.barrier(barrier_id=1 + warp, number_of_threads=WARP)
        sums = cute.make_rmem_tensor((2,), Float32)
        for i in cutlass.range_constexpr(2):
            sums[i] = acc[i, 0] + (acc[i, 1] + acc[i, 2])
        return sums

    @cute.jit
    def operand(self, row: cute.Tensor, at: Int32) -> cute.Tensor:
        return loaded(cute.recast_tensor(cute.local_tile(row, (VECTOR,), (at,)), Uint32))

    @cute.jit
    def load(self, y, streams, post, comb, first, stream, at, exists: Boolean):
        """Load operands of `at_once` tokens from `first` on. -> (the old streams that new stream `stream` needs, and
        then y, at this lane's vector, bf16 [8, old + 1, tokens]; their weights in the new stream, fp32 [old + 1,
        tokens], of which an independent old stream needs none). If the vector does not exist, all results are
        zeros."""
        raw = filled((VECTOR, self.old + 1, self.at_once), 0.0, BFloat16)
        weights = filled((self.old + 1, self.at_once), 0.0)
        if exists:
            for i in cutlass.range_constexpr(self.at_once):
                t = cutlass.min(first + i, streams.shape[0] - 1)
                for j in cutlass.range_constexpr(self.old):
                    source = j if const_expr(self.mixed) else stream
                    cute.autovec_copy(cute.local_tile(streams[t, source, None], (VECTOR,), (at,)), raw[None, j, i])
                    if const_expr(self.mixed):
                        weights[j, i] = comb[t, j * HYPER_STREAMS + stream]
                cute.autovec_copy(cute.local_tile(y[t, None], (VECTOR,), (at,)), raw[None, self.old, i])
                weights[self.old, i] = post[t, stream]
        return raw, weights

    @cute.jit
    def expand(self, raw, weights, new, kept, first: Int32, stream, at, stores: Boolean, lane):
        """Compute new stream `stream` at this lane's vector for `at_once` tokens from `first` on. Write it to `kept`
        (shared memory) and, if `stores`, to `new` (global memory)."""
        for i in cutlass.range_constexpr(self.at_once):
            t = cutlass.min(first + i, new.shape[0] - 1)
            if const_expr(self.mixed):
                acc = new_stream(raw[None, self.old, i], raw[None, None, i], weights[self.old, i], weights[None, i])
            else:
                acc = independent_stream(raw[None, self.old, i], raw[None, 0, i], weights[self.old, i])
            packed = converted(acc, BFloat16)
            cute.autovec_copy(packed, cute.local_tile(kept[None, t], (VECTOR,), (lane,)))
            if stores:
                cute.autovec_copy(packed, cute.local_tile(new[t, stream, None], (VECTOR,), (at,)))


@cached
def compile_hyper_expand_mix(most: int, mixed: bool):
    """-> f(y [T, D], streams [T, 4, D] bf16, post [T, 4], comb [T, 16] fp32, parts [3, C, 4 D], new [T, 4, D] bf16, mix
    [T, C] fp32); T from 1 to `most`, C, D > 0. new and mix are results. Rows of all tensors but mix start at multiples
    of 16 bytes. mixed: whether there is a comb, else f takes None."""
    tokens, count = cute.sym_int(), cute.sym_int()
    channels, width = (cute.sym_int(divisibility=CHANNEL_MULTIPLE) for _ in range(2))
    return compile_sm90(
        HyperExpandMixSm90(most, mixed),
        fake_rows(BFloat16, tokens, channels),
        fake_rows(BFloat16, tokens, HYPER_STREAMS, channels),
        fake_rows(Float32, tokens, HYPER_STREAMS),
        fake_rows(Float32, tokens, HYPER_STREAMS * HYPER_STREAMS) if mixed else None,
        fake_rows(BFloat16, PARTS, count, width),
        fake_rows(BFloat16, tokens, HYPER_STREAMS, channels),
        fake_rows(Float32, tokens, count, align=4),
        fake_stream(),
    )


def shipped_variants() -> Variants:
    return [(compile_hyper_expand_mix, (most, mixed)) for most in EXPAND_MIX_TOKENS for mixed in (True, False)]
