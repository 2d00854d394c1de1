"""The projection of DeepSeek-V4's hyper-connections, for many tokens (the op uses it above 64) and 24 outputs:
mix[t, c] = sum_k (high + middle + low)[c, k] v[t, k], where v[t] is the concatenation of token t's streams.

Plan
- A tile has `rows` (32, 64, 128 or 256) tokens and all outputs. With tiles of up to 128 tokens, a cluster of 8 CTAs
  computes a tile, and each CTA computes a group, which is 8 of the 64 slices (hyper_mix_sums.py). With tiles of 256
  tokens, CTAs are persistent, and there are no clusters, because clusters would leave some SMs idle. A CTA then
  computes one work unit at a time, which is half a group of a tile. CTAs write the sums of work units to global memory,
  and a second kernel adds them.
- Warp roles: 8 consumer warps, each with 32 tokens and all three parts of the 24 outputs. In tiles of fewer than 256
  tokens, several warps have the same tokens and different slices. One producer warp loads by TMA.
- Pipeline: a ring of stages. A stage is a block of 64 channels of the tile's tokens and of the 72 matrix rows.
  Consecutive stages belong to the slices of different warps. A warp reads the operands of the next half block before it
  multiplies the current half block, because reading and multiplying take about the same time.
- Warps use mma with operands in registers instead of wgmma, so that the sums have the bits of the kernel for few
  tokens. A lane reads 16 bytes of a row, the operands of two mma instructions.
- In tiles of fewer than 256 tokens, warps exchange their slices through shared memory. Then each thread adds the slices
  of some pairs of results.
- Epilogue in a cluster: each lane sends its sums of the CTA's group to the CTAs that own the results; each CTA owns 1/8
  of the tokens. The owners add the 8 groups and store the results.
Shared memory: barriers; stages x (rows + 72) x 128 bytes; slices, 24 KB in tiles of 64 and 128 tokens (in tiles of 32,
they reuse the stages of the streams); in a cluster, the received groups, 96 x rows bytes.
Constraints: a token's n streams are contiguous, D is a multiple of 64 (so that the blocks of hyper_mix_sums.py do not
straddle streams), and rows are aligned to 16 bytes.
Roofline: bound by memory, 2 n D bytes per token. The matrix is read from L2 once per tile. With 1/132 of the memory
bandwidth, an SM loads 64 channels of 256 tokens in 1600 cycles. For these channels and tokens, mma takes 900 to 1150
cycles (576 instructions of 16 x 8 x 16), and the reads of shared memory take 1150.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32, const_expr

from dsa.cute.copies import partition, tile_load
from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake_rows, fake_stream
from dsa.cute.pipeline import Pipeline, PipelineState, pipeline_storage, start
from dsa.cute.registers import loaded
from dsa.cute.shared_memory import load_16
from dsa.cute.slices import SLICES, slice_start
from dsa.cute.sm90 import REGISTERS, WARP, WARPGROUP, cluster_sync, thread_and_cta
from dsa.cute.small_m_product import send
from dsa.cute.wgmma import k_major_layout
from dsa.kernels.elementwise.hyper_mix_sums import (
    BLOCK,
    CTAS,
    GROUP_SLICES,
    HALF_SLICES,
    OUTPUTS,
    PARTS,
    add_groups,
    multiply_add,
    octet_row,
    store_sums,
)
from dsa.kernels.elementwise.limits import (
    MIX_BLOCK,
    MIX_HALVES,
    MIX_OUTPUTS,
    MIX_PERSISTENT_ROWS,
    MIX_ROWS,
)
from dsa.runtime.compile_cache import Variants, cached, compile_sm90

CONSUMER_WARPS = 8
CONSUMERS = CONSUMER_WARPS * WARP
THREADS = CONSUMERS + WARPGROUP
WARP_TOKENS = 32
OCTETS = WARP_TOKENS // 8
ROW_BYTES = BLOCK * 2
MATRIX_ROWS = PARTS * MIX_OUTPUTS
OUTPUT_OCTETS, MATRIX_OCTETS = MIX_OUTPUTS // OUTPUTS, MATRIX_ROWS // 8
TOKEN_PAIRS = 4 * OUTPUT_OCTETS
WORDS = 4  # 32-bit words in 16 bytes
STAGES = {32: 16, 64: 8, 128: 6, 256: 4}
SUM_TOKENS = 16  # per CTA of the second kernel


class HyperMixSm90:
    clustered = True

    def __init__(self, rows: int):
        self.rows, self.stages = rows, STAGES[rows]
        self.token_warps = rows // WARP_TOKENS
        self.slice_warps = CONSUMER_WARPS // self.token_warps
        self.unit_slices = GROUP_SLICES if self.clustered else HALF_SLICES
        self.units = SLICES // self.unit_slices  # per tile
        self.rounds = max(1, HALF_SLICES // self.slice_warps)  # per half group; each warp computes one slice per round
        self.halves = self.unit_slices // (self.rounds * self.slice_warps)  # half groups, or 1 if a round covers both
        self.pairs = rows * TOKEN_PAIRS
        self.own_pairs = -(-self.pairs // CONSUMERS)  # per thread
        self.received_numbers = 2 * self.pairs if self.clustered else 0
        # With one round per CTA, a warp writes its slice to the first stage that it read. No other warp reads that
        # stage, and the producer loads nothing into it any more.
        self.exchange_in_stages = self.clustered and self.halves * self.rounds == 1
        apart = self.slice_warps > 1 and not self.exchange_in_stages
        self.exchanged_numbers = 2 * self.pairs * self.slice_warps if apart else 0

    @cute.jit
    def __call__(self, streams: cute.Tensor, parts: cute.Tensor, out: cute.Tensor, stream):
        self.launch(streams, parts, out, cute.ceil_div(out.shape[0], self.rows) * CTAS, (CTAS, 1, 1), stream)

    @cute.jit
    def launch(self, streams: cute.Tensor, parts: cute.Tensor, out: cute.Tensor, ctas, cluster: cutlass.Constexpr,
               stream):  # fmt: skip
        v_layout = k_major_layout(BFloat16, self.rows, BLOCK, self.stages)
        # The DSL has no shared-memory layout for 72 rows. It aborts if a composed layout of 72 rows and several stages
        # is sliced. So make the layout of one stage here.
        w_layout = cute.make_layout((MATRIX_ROWS, BLOCK), stride=(BLOCK, 1))
        w_one = cute.make_composed_layout(v_layout.inner, 0, w_layout)
        v_atom, v_tma = tile_load(streams, v_layout, (self.rows, BLOCK))
        load = cute.nvgpu.cpasync.CopyBulkTensorTileG2SOp()
        w_info = cute.nvgpu.cpasync.make_tiled_tma_atom(load, parts, w_one, (MATRIX_ROWS, BLOCK))

        @cute.struct
        class Storage:
            pipeline: pipeline_storage(self.stages)
            received: cute.struct.Align[cute.struct.MemRange[Float32, self.received_numbers], 128]
            exchange: cute.struct.Align[cute.struct.MemRange[Float32, self.exchanged_numbers], 128]
            v: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(v_layout)], 1024]
            w: cute.struct.Align[cute.struct.MemRange[BFloat16, self.stages * MATRIX_ROWS * BLOCK], 1024]

        self.storage = Storage
        self.kernel(v_atom, v_tma, w_info[0], w_info[1], out, v_layout).launch(
            grid=(ctas, 1, 1),
            block=(THREADS, 1, 1),
            cluster=cluster,
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        v_atom: cute.CopyAtom,
        mv: cute.Tensor,
        w_atom: cute.CopyAtom,
        mw: cute.Tensor,
        out: cute.Tensor,
        v_layout: cute.ComposedLayout,
    ):
        tid, cta = thread_and_cta()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        pipeline = Pipeline.of(storage.pipeline, self.stages)
        sv = storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner)
        w_layout = cute.make_layout((MATRIX_ROWS, BLOCK, self.stages), stride=(BLOCK, 1, MATRIX_ROWS * BLOCK))
        sw = storage.w.get_tensor(w_layout, swizzle=v_layout.inner)

        if warp == CONSUMER_WARPS:
            with cute.arch.elect_one():
                pipeline.init(consumers=self.token_warps)
            cute.nvgpu.cpasync.prefetch_descriptor(v_atom)
            cute.nvgpu.cpasync.prefetch_descriptor(w_atom)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if const_expr(self.clustered):
            cute.arch.cluster_arrive_relaxed()
        wait_for_prerequisite_grids()

        if warp >= CONSUMER_WARPS:
            cute.arch.setmaxregister_decrease(REGISTERS[2][1])
            if warp == CONSUMER_WARPS:
                v_copy = v_atom, *partition(v_atom, sv, cute.local_tile(mv, (self.rows, BLOCK), (None, None)))
                w_copy = w_atom, *partition(w_atom, sw, cute.local_tile(mw, (MATRIX_ROWS, BLOCK), (None, None)))
                self.load_blocks(pipeline, v_copy, w_copy, mv.shape[0], mv.shape[1] // BLOCK)
            if const_expr(self.clustered):
                cute.arch.cluster_wait()
                cluster_sync()
        else:
            cute.arch.setmaxregister_increase(REGISTERS[2][0])
            self.multiply(storage, pipeline, out, mv.shape[0], mv.shape[1] // BLOCK, warp, tid)
            if const_expr(self.clustered):
                cluster_sync()
                received, rank, token = self.received(storage), cta % CTAS, cta // CTAS * self.rows
                add_groups(received, out, rank, token, Int32(0), OUTPUT_OCTETS, tid, CONSUMERS)

    def received(self, storage) -> cute.Tensor:
        return storage.received.get_tensor(cute.make_layout((2, self.pairs // CTAS, CTAS)))

    def exchange(self, storage) -> cute.Tensor:
        """Return the buffer for the sums of the warps' slices: fp32 [2, pairs, warps with different slices]."""
        shape = 2, self.pairs, self.slice_warps
        if not self.exchange_in_stages:
            return storage.exchange.get_tensor(cute.make_layout(shape))
        memory = cute.recast_ptr(storage.v.data_ptr(), dtype=Float32)
        return cute.make_tensor(memory, cute.make_layout(shape, stride=(1, 2, self.rows * ROW_BYTES // 4)))

    @cute.jit
    def work(self, tokens, blocks):
        """-> (this CTA's first work unit, number of work units of all CTAs, step from one work unit of this CTA to the
        next, number of blocks in the longest slice). A work unit is a group of a tile in a cluster, and half a group
        otherwise."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        return cta, cute.ceil_div(tokens, self.rows) * self.units, ctas, cute.ceil_div(blocks, SLICES)

    @cute.jit
    def load_blocks(self, pipeline: Pipeline, v_copy, w_copy, tokens, blocks):
        """The mainloop of the producer warp. Shorter slices are padded with the block past the end of the channels,
        which TMA fills with zeros. After its last block, a consumer warp reads one more stage without using the data.
        So the producer signals these last stages as full without loading them."""
        v_atom, v_shared, v = v_copy
        w_atom, w_shared, w = w_copy
        first, end, step, longest = self.work(tokens, blocks)
        state = start()
        for unit in cutlass.range(first, end, step, unroll=1):
            tile = unit // self.units
            for round in cutlass.range(self.halves * self.rounds, unroll=1):
                index = unit % self.units * self.unit_slices + round * self.slice_warps
                for i in cutlass.range(longest, unroll=1):
                    for j in cutlass.range_constexpr(self.slice_warps):
                        block = slice_start(index + j, blocks) + i
                        if block >= slice_start(index + j + 1, blocks):
                            block = blocks
                        pipeline.producer_acquire(state, (self.rows + MATRIX_ROWS) * ROW_BYTES)
                        full = pipeline.producer_barrier(state)
                        cute.copy(v_atom, v[None, tile, block], v_shared[None, state.stage], tma_bar_ptr=full)
                        cute.copy(w_atom, w[None, 0, block], w_shared[None, state.stage], tma_bar_ptr=full)
                        state = pipeline.advance(state)
        for _ in cutlass.range_constexpr(self.slice_warps):
            pipeline.producer_wait(state)
            pipeline.producer_commit(state)
            state = pipeline.advance(state)

    @cute.jit
    def multiply(self, storage, pipeline: Pipeline, out: cute.Tensor, tokens, blocks, warp, tid):
        """The role of a consumer warp. Per work unit, run the mainloop. Then send the sums to the CTAs that own the
        results, or without a cluster store them to global memory."""
        lane = tid % WARP
        place, quad = octet_row(lane // 4), lane % 4
        token_warp, slice_warp = warp % self.token_warps, warp // self.token_warps
        # The 128-byte swizzle: 16-byte chunk i of a row is stored at index i ^ (row % 8).
        columns = [((quad + 4 * half) ^ place) * 16 for half in range(2)]
        v_rows = Int32(storage.v.data_ptr().toint()) + (token_warp * WARP_TOKENS + place) * ROW_BYTES
        w_rows = Int32(storage.w.data_ptr().toint()) + place * ROW_BYTES
        group = cute.make_rmem_tensor((2, self.own_pairs), Float32)
        half_group = cute.make_rmem_tensor((2, self.own_pairs), Float32)
        acc = cute.make_rmem_tensor((4, OCTETS // 2, MATRIX_OCTETS), Float32)
        operands = [[cute.make_rmem_tensor((WORDS, n), Uint32) for n in (OCTETS, MATRIX_OCTETS)] for _ in range(2)]

        first, end, step, longest = self.work(tokens, blocks)
        state = PipelineState(Int32(slice_warp), Int32(0))
        pipeline.consumer_wait(state)
        self.read(operands[0], v_rows, w_rows, state, columns[0])
        for unit in cutlass.range(first, end, step, unroll=1):
            group.fill(0.0)
            for _ in cutlass.range(self.halves, unroll=1):
                half_group.fill(0.0)
                for _ in cutlass.range(self.rounds, unroll=1):
                    acc.fill(0.0)
                    for _ in cutlass.range(longest, unroll=1):
                        self.read(operands[1], v_rows, w_rows, state, columns[1])
                        self.multiply_half(acc, operands[0])
                        cute.arch.sync_warp()
                        pipeline.consumer_release(state)
                        state = pipeline.skip(state, self.slice_warps)
                        pipeline.consumer_wait(state)
                        self.read(operands[0], v_rows, w_rows, state, columns[0])
                        self.multiply_half(acc, operands[1])
                    self.add_slices(storage, group, half_group, acc, warp, tid)
                for i in cutlass.range_constexpr(2 * self.own_pairs):
                    group[i] += half_group[i]
            if const_expr(self.clustered):
                cute.arch.cluster_wait()
                self.send_group(self.received(storage), group, tid)
            else:
                self.store_half(out, group, unit, tokens, warp, tid)

    @cute.jit
    def read(self, operands: cutlass.Constexpr, v: Int32, w: Int32, state: PipelineState, column: Int32):
        """Read this lane's `operands` for half a block: from each octet of tokens and of matrix rows, 16 bytes of one
        row, at byte `column`. v, w: addresses, in stage 0, of this lane's row in the first octet."""
        v_stage, w_stage = v + state.stage * (self.rows * ROW_BYTES), w + state.stage * (MATRIX_ROWS * ROW_BYTES)
        for tensor, address in zip(operands, (v_stage + column, w_stage + column)):
            for octet in cutlass.range_constexpr(tensor.shape[1]):
                own = load_16(address + octet * 8 * ROW_BYTES)
                for i in cutlass.range_constexpr(WORDS):
                    tensor[i, octet] = own[i]

    @cute.jit
    def multiply_half(self, acc: cute.Tensor, operands: cutlass.Constexpr):
        v, w = operands
        for pair in cutlass.range_constexpr(0, WORDS, 2):
            for j in cutlass.range_constexpr(MATRIX_OCTETS):
                for m in cutlass.range_constexpr(OCTETS // 2):
                    multiply_add(acc[None, m, j], v[None, 2 * m], v[None, 2 * m + 1], w[None, j], pair)

    @cute.jit
    def add_slices(self, storage, group: cute.Tensor, half_group: cute.Tensor, acc: cute.Tensor, warp, tid):
        """Add a round's slices, which are in `acc` of all consumer warps, to `half_group`. If the round covers both
        halves, the first half is added to `group` before the second half begins."""
        lane, exchange, slice_warp = tid % WARP, None, warp // self.token_warps
        if const_expr(self.slice_warps > 1):
            exchange = self.exchange(storage)
            if const_expr(not self.exchange_in_stages):
                self.sync_consumers()  # wait until all threads have read the previous round's slices
        for octet in cutlass.range_constexpr(OCTETS):
            for j in cutlass.range_constexpr(OUTPUT_OCTETS):
                numbers = cute.make_rmem_tensor((2,), Float32)
                for n in cutlass.range_constexpr(2):
                    of = [acc[octet % 2 * 2 + n, octet // 2, p * OUTPUT_OCTETS + j] for p in range(PARTS)]
                    numbers[n] = of[0] + (of[1] + of[2])
                if const_expr(self.slice_warps > 1):
                    token = self.token_of(warp, lane, octet)
                    cute.autovec_copy(numbers, exchange[None, token * TOKEN_PAIRS + j * 4 + lane % 4, slice_warp])
                else:
                    for n in cutlass.range_constexpr(2):
                        half_group[n, octet * OUTPUT_OCTETS + j] += numbers[n]
        if const_expr(self.slice_warps > 1):
            self.sync_consumers()
            for i in cutlass.range_constexpr(self.own_pairs):
                pair = tid + i * CONSUMERS
                if pair < self.pairs:
                    for k in cutlass.range_constexpr(self.slice_warps):
                        numbers = loaded(exchange[None, pair, k])
                        for n in cutlass.range_constexpr(2):
                            if const_expr(k == HALF_SLICES):
                                group[n, i] += half_group[n, i]
                                half_group[n, i] = Float32(0.0)
                            half_group[n, i] += numbers[n]

    @cute.jit
    def token_of(self, warp, lane, octet: cutlass.Constexpr):
        """Return the index in the tile of the token to which this lane's sums in an octet belong."""
        return warp % self.token_warps * WARP_TOKENS + octet * 8 + octet_row(lane // 4)

    @cute.jit
    def sync_consumers(self):
        cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS)

    @cute.jit
    def send_group(self, received: cute.Tensor, group: cute.Tensor, tid):
        cta, _, _ = cute.arch.block_idx()
        for i in cutlass.range_constexpr(self.own_pairs):
            pair = tid + i * CONSUMERS
            if pair < self.pairs:
                send(received, cta % CTAS, pair, group[0, i], group[1, i])


class HyperMixPersistentSm90(HyperMixSm90):
    clustered = False

    @cute.jit
    def __call__(self, streams: cute.Tensor, parts: cute.Tensor, halves: cute.Tensor, out: cute.Tensor, ctas: Int32,
                 stream):  # fmt: skip
        self.launch(streams, parts, halves, ctas, (1, 1, 1), stream)
        self.add_halves(halves, out).launch(
            grid=(cute.ceil_div(out.shape[0], SUM_TOKENS), 1, 1),
            block=(SUM_TOKENS * TOKEN_PAIRS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.jit
    def store_half(self, halves: cute.Tensor, half: cute.Tensor, unit, tokens, warp, tid):
        lane = tid % WARP
        for octet in cutlass.range_constexpr(OCTETS):
            token = unit // self.units * self.rows + self.token_of(warp, lane, octet)
            if token < tokens:
                for j in cutlass.range_constexpr(OUTPUT_OCTETS):
                    target = cute.local_tile(halves[unit % self.units, token, None], (2,), (j * 4 + lane % 4,))
                    cute.autovec_copy(half[None, octet * OUTPUT_OCTETS + j], target)

    @cute.kernel
    def add_halves(self, halves: cute.Tensor, out: cute.Tensor):
        """The second kernel. For one pair of outputs of a token, a thread adds the two halves of each group, and then
        the groups."""
        tid, cta = thread_and_cta()
        token, place = cta * SUM_TOKENS + tid // TOKEN_PAIRS, tid % TOKEN_PAIRS
        wait_for_prerequisite_grids()
        if token < out.shape[0]:
            values = cute.make_rmem_tensor((2, 2, CTAS), Float32)
            for i in cutlass.range_constexpr(MIX_HALVES):
                source = cute.local_tile(halves[i, token, None], (2,), (place,))
                cute.autovec_copy(source, values[None, i % 2, i // 2])
            groups = cute.make_rmem_tensor((2, CTAS), Float32)
            groups.store(values[None, 0, None].load() + values[None, 1, None].load())
            store_sums(groups, out, token, Int32(0), place)


@cached
def compile_hyper_mix(rows: int):
    """-> f(streams [T, n D], parts [72, n D] bf16, mix [T, 24] fp32); T > 0, rows of streams and parts at multiples of
    16 bytes. mix is the result. n D is a multiple of 64. D must be a multiple of 64, too, if the result must have the
    bits of the kernel for few tokens."""
    return compile_sm90(HyperMixSm90(rows), *_operands(), _result(), fake_stream())


@cached
def compile_hyper_mix_persistent(rows: int):
    """-> f(streams, parts, halves [16, T, 24] fp32, mix, ctas). halves is scratch for the sums of work units; ctas:
    number of persistent CTAs; streams, parts and mix are as in `compile_hyper_mix`."""
    return compile_sm90(
        HyperMixPersistentSm90(rows),
        *_operands(),
        fake_rows(Float32, MIX_HALVES, cute.sym_int(), MIX_OUTPUTS),
        *(_result(), Int32(1), fake_stream()),
    )


def _operands() -> list[cute.Tensor]:
    width = cute.sym_int(divisibility=MIX_BLOCK)
    return [fake_rows(BFloat16, rows, width) for rows in (cute.sym_int(), MATRIX_ROWS)]


def _result() -> cute.Tensor:
    return fake_rows(Float32, cute.sym_int(), MIX_OUTPUTS, align=4)


def shipped_variants() -> Variants:
    return [
        *((compile_hyper_mix, (rows,)) for rows in MIX_ROWS),
        (compile_hyper_mix_persistent, (MIX_PERSISTENT_ROWS,)),
    ]
