"""Products of a few rows with a block-scaled FP8 matrix, or with several, e the matrix of row m:
out[m, n] = sum_g (sum_{k in block g} a[m, k] b[e, n, k]) * a_scale[m, g] * b_scale[e, n // 128, g].

Plan
- The matrix's rows are those of the wgmma (its operands are swapped): 64 columns of the result by 8 to 64 rows. So one
  row costs an eighth of the products, shared memory and registers that it costs in `fp8_gemm_sm90`, whose rows are the
  64 of a wgmma. The order of a sum is the same there, and so are the bits.
- Work tiles are of 64 columns, or of 32, whose wgmma have 32 rows of nothing, where these fill more SMs. More rows than
  a tile has make more tiles, which are next to each other, so that b comes from memory once. Their heights are what
  fills the SMs, since a block of channels takes as long as its rows are many: its wgmma, and then the multiply-adds.
- Warp roles: one consumer warpgroup, and one warp that is the producer, which loads everything by TMA. 160 threads have
  registers enough without moving any between them.
- Pipeline: a ring of stages, each SCALES blocks of 128 channels of a and of b with their scales, that runs on over work
  tile after work tile. It is as deep as shared memory allows.
- Mainloop: the wgmma of a stage's blocks are issued one behind the other, each block's into accumulators of its own,
  and the scales are read while they run. Then the blocks are scaled and added in their order. One block at a time the
  latency of wgmma, of the wait and of the scales would be that of every block.
- Before it waits for the kernel in front, a CTA asks for as much of b as its ring holds to be brought to the L2 cache.
  It does not read it: that may be what the kernel in front writes. Of several matrices it does not know yet which.
- Epilogue: accumulators have the result transposed. 16-bit results are turned by stmatrix, a warp's 16 columns at a
  time, and stored 32 bytes in a row. A warp stores fp32 results at once, as eight lanes have 32 bytes of a row.
- Scheduler: static persistent. Of several matrices the work tiles are found by prefix sums (grouped_tiles.py).
- A matrix of few columns has fewer work tiles than there are SMs: its channels may be split, see
  `fp8_gemm_split_channels_sm90`. fp8_gemm_few_rows_config.py says when.
Shared memory: barriers, 32 bytes a row and warp for results, stages x SCALES x ((64 + rows) x 128 + 4 x (rows + 1)).
Registers: SCALES x rows / 2 accumulators, rows / 2 sums and rows scales a consumer thread.
Roofline: memory, b once; else the mainloop, about 80 clocks and 3.4 for each row of the tile a block of channels; or,
with 8 rows, what an SM can load, (64 + rows) x 128 bytes a block at about 75 bytes a clock.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.copies import bulk_load, tile_load
from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake, fake_stream, strides
from dsa.cute.pipeline import Pipeline, PipelineState, pipeline_storage, start
from dsa.cute.sm90 import opaque
from dsa.cute.wgmma import multiply
from dsa.cute.work_tile import static_persistent_scheduler
from dsa.kernels.gemm.few_rows_tile import THREADS, fragments, load_blocks, operand_layouts, prefetch_blocks, tiles_of
from dsa.kernels.gemm.fp8_gemm_choice import choose_for_one_matrix as choose_for_one_matrix
from dsa.kernels.gemm.fp8_gemm_few_rows_config import (
    COLUMNS,
    CONFIGS,
    CONSUMER_WARPS,
    GROUPED_CONFIGS,
    SCALES,
    FewRowsConfig,
)
from dsa.kernels.gemm.fp8_gemm_few_rows_config import choose_grouped_config as choose_grouped_config
from dsa.kernels.gemm.fp8_gemm_split_channels_sm90 import Fp8GemmSplitChannelsSm90
from dsa.kernels.gemm.grouped_tiles import PREFIX_SUMS, GroupedTiles, OneMatrixTiles
from dsa.kernels.gemm.limits import GROUP, OUT_DTYPES
from dsa.kernels.gemm.turned_tile import store_turned
from dsa.runtime.compile_cache import cached, compile_sm90


class GroupedFp8GemmFewRowsSm90:
    grouped = True

    def __init__(self, cfg: FewRowsConfig):
        self.rows, self.stages, self.columns = cfg.rows, cfg.stages, cfg.columns

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        a_scale: cute.Tensor,
        b: cute.Tensor,
        b_scale: cute.Tensor,
        out: cute.Tensor,
        ends: cute.Tensor | None,
        ctas: Int32,
        stream,
    ):
        a_layout, b_layout = operand_layouts(self.rows, SCALES * self.stages)
        s_layout = cute.make_layout((self.rows, SCALES, self.stages), stride=(SCALES, 1, self.rows * SCALES))
        a_atom, a_tma = tile_load(a, a_layout, (self.rows, GROUP))
        # The rows of a wgmma beyond a tile of 32 columns are never loaded.
        b_atom, b_tma = tile_load(b, self.loaded(b_layout), (self.columns, GROUP))
        s_atom, s_tma = tile_load(a_scale, s_layout, (self.rows, SCALES))

        @cute.struct
        class Storage:
            pipeline: pipeline_storage(self.stages)
            b_scale: cute.struct.Align[cute.struct.MemRange[Float32, SCALES * self.stages], 16]
            a_scale: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(s_layout)], 128]
            sums: cute.struct.MemRange[Int32, 32 if self.grouped else 1]
            prefix: cute.struct.MemRange[Int32, PREFIX_SUMS if self.grouped else 1]
            out: cute.struct.Align[cute.struct.MemRange[Int32, CONSUMER_WARPS * self.rows * 8], 128]
            a: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(a_layout)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(b_layout)], 1024]

        self.storage = Storage
        self.kernel(
            a_atom, a_tma, b_atom, b_tma, s_atom, s_tma, b_scale, out, ends, a_layout, b_layout, s_layout
        ).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True)

    @cute.kernel
    def kernel(
        self,
        a_atom: cute.CopyAtom,
        ma: cute.Tensor,
        b_atom: cute.CopyAtom,
        mb: cute.Tensor,
        s_atom: cute.CopyAtom,
        ms: cute.Tensor,
        b_scale: cute.Tensor,
        out: cute.Tensor,
        ends: cute.Tensor | None,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        s_layout: cute.Layout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        storage = SmemAllocator().allocate(self.storage)
        pipeline = Pipeline.of(storage.pipeline, self.stages)
        sa = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        sb = storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        ss = storage.a_scale.get_tensor(s_layout)
        s_of_b = storage.b_scale.get_tensor(cute.make_layout((SCALES, self.stages)))
        groups = b_scale.shape[2] // SCALES

        across = cute.ceil_div(out.shape[1], self.columns)
        if warp == CONSUMER_WARPS:
            with cute.arch.elect_one():
                pipeline.init(consumers=CONSUMER_WARPS)
            cute.nvgpu.cpasync.prefetch_descriptor(b_atom)
            cute.nvgpu.cpasync.prefetch_descriptor(a_atom)
            cute.nvgpu.cpasync.prefetch_descriptor(s_atom)
            if cutlass.const_expr(not self.grouped):
                one_matrix = OneMatrixTiles(out.shape[0], across, self.rows, self.columns)
                self.prefetch(b_atom, mb, one_matrix, groups, sb, lane)
        cute.arch.mbarrier_init_fence()
        sums = storage.sums.get_tensor(cute.make_layout(32 if self.grouped else 1))
        if cutlass.const_expr(self.grouped):
            if tid < 32:
                sums[tid] = 0
        cute.arch.sync_threads()
        wait_for_prerequisite_grids()
        if cutlass.const_expr(self.grouped):
            prefix = storage.prefix.get_tensor(cute.make_layout(PREFIX_SUMS))
            tiles = GroupedTiles(ends, out.shape[0], across, prefix, self.rows, self.columns)
            total = tiles.count(sums, THREADS, tid, lane, warp)
        else:
            tiles = OneMatrixTiles(out.shape[0], across, self.rows, self.columns)
            total = tiles.count()

        if warp == CONSUMER_WARPS:
            atoms = (b_atom, a_atom, s_atom)
            self.produce(atoms, ma, mb, ms, b_scale, tiles, total, groups, sa, sb, ss, s_of_b, pipeline, lane)
        else:
            staged = storage.out.data_ptr().toint() + warp * (self.rows * 32)
            self.consume(out, tiles, total, groups, sa, sb, ss, s_of_b, pipeline, staged, warp, lane)

    def loaded(self, b_layout):
        """The layout of what a load of b fills: the first rows of a stage's block."""
        if self.columns == COLUMNS:
            return b_layout
        return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (self.rows, self.columns, GROUP), Float8E4M3FN, 1)

    def filled(self, sb: cute.Tensor) -> cute.Tensor:
        """What loads of b fill of the ring's blocks."""
        return cute.local_tile(sb, (self.columns, GROUP, SCALES * self.stages), (0, 0, 0))

    @cute.jit
    def prefetch(self, b_atom, mb, tiles: OneMatrixTiles, groups, sb, lane):
        """Ask for what the ring will hold first of b. The producer warp's work."""
        column = tiles.rows_first(static_persistent_scheduler().first, Int32(0), lane).column
        _, tbg = tiles_of(b_atom, self.filled(sb), mb, (self.columns, GROUP), column)
        prefetch_blocks(b_atom, tbg, 0, cutlass.min(groups, self.stages), 1, SCALES)

    @cute.jit
    def produce(self, atoms, ma, mb, ms, b_scale, tiles, total, groups, sa, sb, ss, s_of_b, pipeline: Pipeline, lane):
        """The producer warp."""
        b_atom, a_atom, s_atom = atoms
        size = SCALES * ((self.columns + self.rows) * GROUP + 4 * (self.rows + 1))
        filled = self.filled(sb)
        scheduler = static_persistent_scheduler()
        state, e = start(), Int32(0)
        matrix_rows = mb.shape[0] // b_scale.shape[0]
        for index in cutlass.range(scheduler.first, total, scheduler.step, unroll=1):
            # Neighbours have the same columns: b comes from memory once.
            e, row, _, column = tiles.rows_first(index, e, lane)
            tas, tag = tiles_of(a_atom, sa, ma, (self.rows, GROUP), row)
            tss, tsg = tiles_of(s_atom, ss, ms, (self.rows, SCALES), row)
            tbs, tbg = tiles_of(b_atom, filled, mb, (self.columns, GROUP), e * matrix_rows + column)
            of_columns = cute.local_tile(b_scale[e, column // GROUP, None], (SCALES,), (None,))
            for group in cutlass.range(groups, unroll=1):
                pipeline.producer_acquire(state, size)
                full = pipeline.producer_barrier(state)
                load_blocks(b_atom, tbg, tbs, group, state.stage, SCALES, full)
                load_blocks(a_atom, tag, tas, group, state.stage, SCALES, full)
                cute.copy(s_atom, tsg[None, group], tss[None, state.stage], tma_bar_ptr=full)
                with cute.arch.elect_one():
                    bulk_load(s_of_b[None, state.stage].iterator, of_columns[None, group].iterator, Int32(16), full)
                state = pipeline.advance(state)

    @cute.jit
    def consume(self, out, tiles, total, groups, sa, sb, ss, s_of_b, pipeline: Pipeline, staged, warp, lane):
        """The mainloop of the consumer warpgroup."""
        mma, acc, rb, ra = fragments(self.rows, SCALES, sb, sa)
        sums = cute.make_rmem_tensor((self.rows // 2,), Float32)
        scheduler = static_persistent_scheduler()
        state, e = start(), Int32(0)
        for index in cutlass.range(scheduler.first, total, scheduler.step, unroll=1):
            e, row, end, column = tiles.rows_first(index, e, lane)
            sums.fill(0.0)
            for _ in cutlass.range(groups, unroll=1):
                pipeline.consumer_wait(state)
                for i in cutlass.range_constexpr(SCALES):
                    # Hidden, so that each block's descriptors are computed by themselves: as offsets from the first
                    # block's they are in vector registers, and four moves before every wgmma.
                    block = opaque(SCALES * state.stage + i)
                    multiply(mma, acc[i], rb, ra, block, block)
                scales = self.scales(ss, s_of_b, state, lane)
                for i in cutlass.range_constexpr(SCALES):
                    cute.nvgpu.warpgroup.wait_group(SCALES - 1 - i)
                    add_scaled(sums, acc[i], scales, i)
                cute.arch.sync_warp()
                pipeline.consumer_release(state)
                state = pipeline.advance(state)
            # The products of warps beyond a tile of 32 columns are nobody's.
            if warp * 16 < self.columns:
                store_turned(sums, out, row, cutlass.min(row + self.rows, end), column + warp * 16, staged, lane)

    @cute.jit
    def scales(self, ss, s_of_b, state: PipelineState, lane):
        """The products of the scales of this thread's rows, rows / 8 pairs, and the columns', of the stage's blocks:
        [SCALES] of each row."""
        of_columns = cute.make_rmem_tensor((SCALES,), Float32)
        cute.autovec_copy(s_of_b[None, state.stage], of_columns)
        scales = [cute.make_rmem_tensor((SCALES,), Float32) for _ in range(self.rows // 4)]
        for j in cutlass.range_constexpr(self.rows // 4):
            cute.autovec_copy(ss[j // 2 * 8 + lane % 4 * 2 + j % 2, None, state.stage], scales[j])
            for i in cutlass.range_constexpr(SCALES):
                scales[j][i] = scales[j][i] * of_columns[i]
        return scales


class Fp8GemmFewRowsSm90(GroupedFp8GemmFewRowsSm90):
    """Of one matrix."""

    grouped = False

    @cute.jit
    def __call__(self, a: cute.Tensor, a_scale: cute.Tensor, b: cute.Tensor, b_scale: cute.Tensor, out, ctas, stream):
        tiles = cute.ceil_div(out.shape[1], self.columns) * cute.ceil_div(out.shape[0], self.rows)
        operands = a, a_scale, b, b_scale, out, None
        GroupedFp8GemmFewRowsSm90.__call__(self, *operands, cutlass.min(ctas, tiles), stream)


@cute.jit
def add_scaled(sums, acc, scales, block: cutlass.Constexpr):
    """sums += acc, scaled. Four accumulators are two rows of one column, and of the column 8 further on."""
    products = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
    for i in cutlass.range_constexpr(cute.size(acc)):
        sums[i] += products[i] * scales[i // 4 * 2 + i % 2][block]


def fake_operands(out_dtype: str, matrices: Any = 1) -> tuple[cute.Tensor, ...]:
    """a, a_scale, b, b_scale and out, as the compile functions document them."""
    rows, columns, channels = (cute.sym_int() for _ in range(3))
    of_all = columns if matrices == 1 else cute.sym_int()
    blocks = cute.sym_int(divisibility=SCALES)
    out_type = cute_dtype(out_dtype)
    a = fake(Float8E4M3FN, (rows, channels), (*strides(1, 16), 1))
    a_scale = fake(Float32, (rows, blocks), (*strides(1, SCALES), 1))
    b = fake(Float8E4M3FN, (of_all, channels), (*strides(1, 16), 1))
    b_scale = fake(Float32, (matrices, cute.sym_int(), blocks), (*strides(2, SCALES), 1))
    return a, a_scale, b, b_scale, fake(out_type, (rows, columns), (*strides(1, 128 // out_type.width), 1))


@cached
def compile_fp8_gemm_few_rows(out_dtype: str, config: FewRowsConfig):
    """-> f(a [M, K] e4m3, a_scale [M, G], b [N, K] e4m3, b_scale [1, ceil(N / 128), G], out [M, N], ctas); M, N, K >
    0. K is a multiple of 16, N of 8; G is ceil(K / 128), rounded up to a multiple of 4 with finite scales, and if the
    config splits channels at most 64; rows start at multiples of 16 bytes."""
    split = Fp8GemmSplitChannelsSm90(cute_dtype(out_dtype), config) if config.ctas > 1 else None
    return compile_sm90(split or Fp8GemmFewRowsSm90(config), *fake_operands(out_dtype), Int32(1), fake_stream())


@cached
def compile_grouped_fp8_gemm_few_rows(out_dtype: str, config: FewRowsConfig):
    """-> f(a [M, K], a_scale [M, G], b [E * N, K], b_scale [E, ceil(N / 128), G], out [M, N], ends [E] int32 ascending,
    ctas): as `compile_fp8_gemm_few_rows`; E up to 1024."""
    kernel = GroupedFp8GemmFewRowsSm90(config)
    matrices = cute.sym_int()
    ends = fake(Int32, (matrices,), (1,), 4)
    return compile_sm90(kernel, *fake_operands(out_dtype, matrices), ends, Int32(1), fake_stream())


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    one = [(compile_fp8_gemm_few_rows, (dtype, config)) for dtype in OUT_DTYPES for config in CONFIGS]
    return one + [
        (compile_grouped_fp8_gemm_few_rows, (dtype, config)) for dtype in OUT_DTYPES for config in GROUPED_CONFIGS
    ]
