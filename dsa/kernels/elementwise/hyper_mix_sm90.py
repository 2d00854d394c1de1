"""The projection of DeepSeek-V4's hyper-connections, for many tokens: mix[t, c] = sum_k (high + middle + low)[c, k]
v[t, k], v a token's streams as one vector; 24 outputs.

Plan
- A cluster of 8 CTAs has 128 or 256 tokens; each has all of their outputs and a group of 8 of the 64 slices of the
  channels, one slice after the other.
- Warp roles: 8 consumer warps, with 16 or 32 tokens each and all three parts of the 24 outputs; a producer warp, which
  loads by TMA.
- Pipeline: a ring of stages, each a block of 64 channels of the tokens and of the 72 rows of the matrix.
- mma from registers, and not wgmma: the sums are then those of the kernel for few tokens, bit for bit. A lane reads 16
  bytes of a row, the operands of two of them.
- Epilogue: a lane sends its sums, the CTA's group, to the owners of the results in the cluster, 1/8 of the tokens each,
  which add the 8 groups and store.
Shared memory: barriers; groups received, 96 x rows bytes; stages x (rows + 72) x 128 bytes.
Constraints: the streams of a token one behind the other, channels a multiple of 64 and rows of 16-byte alignment.
Roofline: memory, 2 n D bytes a token; the matrix is read from L2 once for every 128 or 256 tokens. mma: of 256 tokens
and 64 channels 576 of 16 x 8 x 16, about 930 clocks, where memory has 1760.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int32, Uint32
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.copies import tile_load
from dsa.cute.fake_tensors import fake, fake_stream, strides
from dsa.cute.pipeline import Pipeline, pipeline_storage, start
from dsa.cute.shared_memory import load_16
from dsa.cute.sm90 import WARP
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
    send,
    slice_start,
)
from dsa.kernels.elementwise.limits import CHANNEL_MULTIPLE, MIX_BLOCK, MIX_OUTPUTS, MIX_ROWS

CONSUMER_WARPS = 8
THREADS = (CONSUMER_WARPS + 1) * WARP
ROW_BYTES = BLOCK * 2
MATRIX_ROWS = PARTS * MIX_OUTPUTS
OUTPUT_OCTETS, MATRIX_OCTETS = MIX_OUTPUTS // OUTPUTS, MATRIX_ROWS // 8
HALVES = BLOCK // (4 * VECTOR)
WORDS = 4
STAGES = {128: 3, 256: 4}  # of 128 tokens two CTAs fit on an SM
SHARED_MEMORY_PERCENT = 100


class HyperMixSm90:
    def __init__(self, rows: int):
        self.rows, self.stages = rows, STAGES[rows]
        self.octets = rows // (8 * CONSUMER_WARPS)  # of a warp
        self.pairs = rows * 4 * OUTPUT_OCTETS
        self.ctas_per_sm = 256 // rows

    @cute.jit
    def __call__(self, streams: cute.Tensor, parts: cute.Tensor, out: cute.Tensor, stream):
        tile = (self.rows, 8, BLOCK)
        v_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, BFloat16, self.stages)
        # By eights of rows: the DSL has no layout of 72.
        w_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, BFloat16, self.stages * MATRIX_OCTETS)
        v_atom, v_tma = tile_load(streams, v_layout, (self.rows, BLOCK))
        w_atom, w_tma = tile_load(parts, w_layout, (8, BLOCK))

        @cute.struct
        class Storage:
            pipeline: pipeline_storage(self.stages)
            received: cute.struct.Align[cute.struct.MemRange[Float32, self.pairs * 2], 128]
            v: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(v_layout)], 1024]
            w: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(w_layout)], 1024]

        self.storage = Storage
        self.kernel(v_atom, v_tma, w_atom, w_tma, out, v_layout, w_layout).launch(
            grid=(cute.ceil_div(out.shape[0], self.rows) * CTAS, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(CTAS, 1, 1),
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=SHARED_MEMORY_PERCENT,
            stream=stream,
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
        w_layout: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        tile, rank = cta // CTAS, cta % CTAS
        storage = SmemAllocator().allocate(self.storage)
        pipeline = Pipeline.of(storage.pipeline, self.stages)
        sv = storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner)
        sw = storage.w.get_tensor(w_layout.outer, swizzle=w_layout.inner)
        received = storage.received.get_tensor(cute.make_layout((2, self.pairs // CTAS, CTAS)))
        blocks = mv.shape[1] // BLOCK

        if warp == CONSUMER_WARPS:
            with cute.arch.elect_one():
                pipeline.init(consumers=CONSUMER_WARPS)
            cute.nvgpu.cpasync.prefetch_descriptor(v_atom)
            cute.nvgpu.cpasync.prefetch_descriptor(w_atom)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.cluster_arrive_relaxed()

        if warp == CONSUMER_WARPS:
            tvs, tvg = self.tiles_of(v_atom, sv, mv, (self.rows, BLOCK))
            tws, twg = self.tiles_of(w_atom, sw, mw, (8, BLOCK))
            state = start()
            first, end = [slice_start((rank + i) * GROUP_SLICES, blocks) for i in range(2)]
            for block in cutlass.range(first, end, unroll=1):
                pipeline.producer_acquire(state, (self.rows + MATRIX_ROWS) * ROW_BYTES)
                full = pipeline.producer_barrier(state)
                cute.copy(v_atom, tvg[None, tile, block], tvs[None, state.stage], tma_bar_ptr=full)
                for i in cutlass.range_constexpr(MATRIX_OCTETS):
                    target = tws[None, state.stage * MATRIX_OCTETS + i]
                    cute.copy(w_atom, twg[None, i, block], target, tma_bar_ptr=full)
                state = pipeline.advance(state)
            cute.arch.cluster_wait()
        else:
            group = self.multiply(storage, pipeline, rank, blocks, warp, lane)
            cute.arch.cluster_wait()
            for octet in cutlass.range_constexpr(self.octets):
                token = (warp * self.octets + octet) * 8 + octet_row(lane // 4)
                for j in cutlass.range_constexpr(OUTPUT_OCTETS):
                    pair = (token * OUTPUT_OCTETS + j) * 4 + lane % 4
                    send(received, rank, pair, group[0, j, octet], group[1, j, octet])
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        add_groups(received, out, rank, tile * self.rows, Int32(0), OUTPUT_OCTETS, tid, THREADS)

    @cute.jit
    def tiles_of(self, atom, shared: cute.Tensor, x: cute.Tensor, shape: cutlass.Constexpr):
        """What a TMA load of x copies: -> its places in shared memory, and blocks [shape], by row and column."""
        blocks = cute.local_tile(x, shape, (None, None))
        grouped = cute.group_modes(shared, 0, 2), cute.group_modes(blocks, 0, 2)
        return cute.nvgpu.cpasync.tma_partition(atom, 0, cute.make_layout(1), *grouped)

    @cute.jit
    def multiply(self, storage, pipeline: Pipeline, rank, blocks, warp, lane) -> cute.Tensor:
        """The sum of a group's slices, as a lane has it: [2 neighbouring places of outputs, their octet, octet of
        tokens]."""
        place, quad = octet_row(lane // 4), lane % 4
        # Rows are 128 bytes, of which 16 are where their number, exclusive or that of the row in its eight, says.
        columns = [((quad + 4 * half) ^ place) * 16 for half in range(HALVES)]
        tokens = Int32(storage.v.data_ptr().toint()) + (warp * self.octets * 8 + place) * ROW_BYTES
        matrix = Int32(storage.w.data_ptr().toint()) + place * ROW_BYTES
        group = cute.make_rmem_tensor((2, OUTPUT_OCTETS, self.octets), Float32)
        group.fill(0.0)
        acc = cute.make_rmem_tensor((4, self.octets // 2, MATRIX_OCTETS), Float32)
        state = start()
        for i in cutlass.range(GROUP_SLICES, unroll=1):
            index = rank * GROUP_SLICES + i
            first, end = slice_start(index, blocks), slice_start(index + 1, blocks)
            acc.fill(0.0)
            for _ in cutlass.range(first, end, unroll=1):
                pipeline.consumer_wait(state)
                v_stage = tokens + state.stage * (self.rows * ROW_BYTES)
                w_stage = matrix + state.stage * (MATRIX_ROWS * ROW_BYTES)
                for half in cutlass.range_constexpr(HALVES):
                    v = self.load(v_stage + columns[half], self.octets)
                    w = self.load(w_stage + columns[half], MATRIX_OCTETS)
                    for pair in cutlass.range_constexpr(0, WORDS, 2):
                        for j in cutlass.range_constexpr(MATRIX_OCTETS):
                            for m in cutlass.range_constexpr(self.octets // 2):
                                upper, lower = v[None, 2 * m], v[None, 2 * m + 1]
                                multiply_add(acc[None, m, j], upper, lower, w[None, j], pair)
                cute.arch.sync_warp()
                pipeline.consumer_release(state)
                state = pipeline.advance(state)
            for octet in cutlass.range_constexpr(self.octets):
                for j in cutlass.range_constexpr(OUTPUT_OCTETS):
                    for n in cutlass.range_constexpr(2):
                        of = [acc[octet % 2 * 2 + n, octet // 2, p * OUTPUT_OCTETS + j] for p in range(PARTS)]
                        group[n, j, octet] += of[0] + (of[1] + of[2])
        return group

    @cute.jit
    def load(self, address, octets: cutlass.Constexpr) -> cute.Tensor:
        """16 bytes of a row in each of so many octets of rows."""
        words = cute.make_rmem_tensor((WORDS, octets), Uint32)
        for octet in cutlass.range_constexpr(octets):
            own = load_16(address + octet * 8 * ROW_BYTES)
            for i in cutlass.range_constexpr(WORDS):
                words[i, octet] = own[i]
        return words


@cached
def compile_hyper_mix(rows: int):
    """-> f(streams [T, n D], parts [72, n D] bf16, mix [T, 24] fp32); T > 0, n D a multiple of 64, rows of streams and
    parts at multiples of 16 bytes."""
    tokens, width = cute.sym_int(), cute.sym_int(divisibility=MIX_BLOCK)
    return compile_sm90(
        HyperMixSm90(rows),
        fake(BFloat16, (tokens, width), (*strides(1, CHANNEL_MULTIPLE), 1)),
        fake(BFloat16, (MATRIX_ROWS, width), (*strides(1, CHANNEL_MULTIPLE), 1)),
        fake(Float32, (tokens, MIX_OUTPUTS), (*strides(1), 1), 4),
        fake_stream(),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [(compile_hyper_mix, (rows,)) for rows in MIX_ROWS]
