"""Small-M products with one block-scaled FP8 matrix or several:
out[m, n] = sum_g (sum_{k in block g} a[m, k] b[e, n, k]) * a_scale[m, g] * b_scale[e, n // 128, g],
where e is the matrix of row m, and block g is 128 channels.

Plan
- The rows of b are M of the wgmma, and the rows of a are N (swap A/B): a work tile is 64 columns of the result by 8 to
  64 rows. In fp8_gemm_sm90.py the rows of a are M, at least 64. So for a single row, which needs a tile of 8 rows, this
  kernel multiplies an eighth as much as that kernel. The order of a sum is the same in both kernels, so the bits are
  equal.
- Most work tiles have 64 columns. With one matrix, tiles of 32 columns are used where they occupy more SMs; half of the
  M rows of their wgmma are unused. If there are more rows than one tile has, the tiles with the same columns are
  consecutive, so that b is read from memory once. The time of a block of channels grows with the rows of the tile. The
  tile is chosen by fp8_gemm_choice.py for one matrix, and by fp8_gemm_few_rows_config.py for several.
- Warp roles: one consumer warpgroup, and one producer warp that loads everything by TMA. 160 threads have enough
  registers without setmaxnreg.
- Pipeline: a ring of stages, each with SCALES blocks of 128 channels of a and of b, and their scales. The ring
  continues across work tiles, and is as deep as shared memory allows.
- Mainloop: the wgmma of all blocks of a stage are issued back to back, each block into separate accumulators, and the
  scales are read while the wgmma run. Then the blocks are scaled and added in order. With one block at a time, every
  block would expose the latency of wgmma, of the wait and of the scales' loads.
- Before a CTA waits for the previous kernel, it prefetches b of the first work tile to L2: the first blocks, as many as
  fit in the ring. The CTA does not load b yet, since the previous kernel may write b. Grouped products skip the
  prefetch, because the work tile's matrix depends on `ends`, which the CTA cannot read yet.
- Epilogue: the accumulators contain the transposed result. stmatrix transposes 16-bit results. A warp has 16 columns,
  so it then stores 32 bytes per row. fp32 results are stored from registers; eight lanes store 32 contiguous bytes of a
  row.
- Scheduler: static persistent. Grouped products find their work tiles by prefix sums (grouped_tiles.py).
- A matrix with few columns has fewer work tiles than there are SMs. For a product with one such matrix, split-K can be
  faster (fp8_gemm_split_channels_sm90.py). It is used if the chosen tile has `ctas` > 1.
Shared memory: barriers; prefix sums with several matrices; 32 bytes per row and warp for results; stages x SCALES x
((64 + rows) x 128 + 4 x (rows + 1)) bytes.
Registers: SCALES x rows / 2 accumulators, rows / 2 sums and `rows` scales per consumer thread.
Roofline: bound by memory if the work tiles occupy all SMs: b is read once. Otherwise bound by the SM: the mainloop
takes about 80 cycles per block of channels, and 3.4 more per row of the tile. With 8 rows, an SM's loads take longer
than the mainloop: (64 + 8) x 128 bytes per block at about 75 bytes per cycle.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32

from dsa.cute.copies import bulk_load, tile_load
from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake_contiguous, fake_rows, fake_stream
from dsa.cute.pipeline import Pipeline, PipelineState, pipeline_storage, start
from dsa.cute.sm90 import WARP, opaque, warp_and_lane
from dsa.cute.wgmma import k_major_layout, multiply
from dsa.cute.work_tile import static_persistent_scheduler
from dsa.kernels.gemm.fp8_gemm_few_rows_config import (
    COLUMNS,
    CONFIGS,
    CONSUMER_WARPS,
    GROUPED_CONFIGS,
    SCALES,
    FewRowsConfig,
)
from dsa.kernels.gemm.fp8_gemm_split_channels_sm90 import Fp8GemmSplitChannelsSm90
from dsa.kernels.gemm.grouped_tiles import OneMatrixTiles, tiles_of_matrices, tiles_storage
from dsa.kernels.gemm.limits import GROUP, OUT_DTYPES
from dsa.kernels.gemm.operand_loads import (
    SMALL_M_THREADS,
    fragments,
    load_blocks,
    operand_layouts,
    prefetch_blocks,
    tiles_of,
)
from dsa.kernels.gemm.swap_ab_tile import add_scaled, store_swap_ab
from dsa.runtime.compile_cache import Variants, cached, compile_sm90


class GroupedFp8GemmSmallMSm90:
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
        # With 32 columns, only 32 of the 64 rows of b in a block are loaded. The results of the others are not used.
        b_box = b_layout if self.columns == COLUMNS else k_major_layout(Float8E4M3FN, self.columns, GROUP, 1)
        b_atom, b_tma = tile_load(b, b_box, (self.columns, GROUP))
        s_atom, s_tma = tile_load(a_scale, s_layout, (self.rows, SCALES))

        @cute.struct
        class Storage:
            pipeline: pipeline_storage(self.stages)
            b_scale: cute.struct.Align[cute.struct.MemRange[Float32, SCALES * self.stages], 16]
            a_scale: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(s_layout)], 128]
            tiles: tiles_storage(self.grouped)
            out: cute.struct.Align[cute.struct.MemRange[Int32, CONSUMER_WARPS * self.rows * 8], 128]
            a: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(a_layout)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(b_layout)], 1024]

        self.storage = Storage
        self.kernel(
            a_atom, a_tma, b_atom, b_tma, s_atom, s_tma, b_scale, out, ends, a_layout, b_layout, s_layout
        ).launch(grid=(ctas, 1, 1), block=(SMALL_M_THREADS, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True)

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
        warp, lane = warp_and_lane()
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        pipeline = Pipeline.of(storage.pipeline, self.stages)
        sa = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        sb = storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        ss = storage.a_scale.get_tensor(s_layout)
        s_of_b = storage.b_scale.get_tensor(cute.make_layout((SCALES, self.stages)))
        groups = b_scale.shape[2] // SCALES

        across = cute.ceil_div(out.shape[1], self.columns)
        tiles = tiles_of_matrices(storage.tiles, ends, out.shape[0], across, self.rows, self.columns)
        if warp == CONSUMER_WARPS:
            with cute.arch.elect_one():
                pipeline.init(consumers=CONSUMER_WARPS)
            cute.nvgpu.cpasync.prefetch_descriptor(b_atom)
            cute.nvgpu.cpasync.prefetch_descriptor(a_atom)
            cute.nvgpu.cpasync.prefetch_descriptor(s_atom)
            if cutlass.const_expr(not self.grouped):
                self.prefetch(b_atom, mb, tiles, groups, sb, lane)
        cute.arch.mbarrier_init_fence()
        if tid < WARP:
            tiles.clear(tid)
        cute.arch.sync_threads()
        wait_for_prerequisite_grids()
        total = tiles.count(SMALL_M_THREADS, tid, lane, warp)

        if warp == CONSUMER_WARPS:
            atoms = (b_atom, a_atom, s_atom)
            self.produce(atoms, ma, mb, ms, b_scale, tiles, total, groups, sa, sb, ss, s_of_b, pipeline, lane)
        else:
            staged = storage.out.data_ptr().toint() + warp * (self.rows * 32)
            self.consume(out, tiles, total, groups, sa, sb, ss, s_of_b, pipeline, staged, warp, lane)

    def filled(self, sb: cute.Tensor) -> cute.Tensor:
        """Return the part of `sb` into which b is loaded: the first `columns` rows of each block."""
        return cute.local_tile(sb, (self.columns, GROUP, SCALES * self.stages), (0, 0, 0))

    @cute.jit
    def prefetch(self, b_atom, mb, tiles: OneMatrixTiles, groups, sb, lane):
        """Prefetch as much of b of the CTA's first work tile as fits in the ring. The producer warp calls this."""
        column = tiles.rows_first(static_persistent_scheduler().first, Int32(0), lane).column
        _, tbg = tiles_of(b_atom, self.filled(sb), mb, (self.columns, GROUP), column)
        prefetch_blocks(b_atom, tbg, 0, cutlass.min(groups, self.stages), 1, SCALES)

    @cute.jit
    def produce(self, atoms, ma, mb, ms, b_scale, tiles, total, groups, sa, sb, ss, s_of_b, pipeline: Pipeline, lane):
        b_atom, a_atom, s_atom = atoms
        size = SCALES * ((self.columns + self.rows) * GROUP + 4 * (self.rows + 1))
        filled = self.filled(sb)
        scheduler = static_persistent_scheduler()
        state, e = start(), Int32(0)
        matrix_rows = mb.shape[0] // b_scale.shape[0]
        for index in cutlass.range(scheduler.first, total, scheduler.step, unroll=1):
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
                    # Without `opaque`, the compiler would derive each block's descriptors from the first block's, in
                    # vector registers. Every wgmma would then need four moves before it.
                    block = opaque(SCALES * state.stage + i)
                    multiply(mma, acc[i], rb, ra, block, block)
                scales = self.scales(ss, s_of_b, state, lane)
                for i in cutlass.range_constexpr(SCALES):
                    cute.nvgpu.warpgroup.wait_group(SCALES - 1 - i)
                    add_scaled(sums, acc[i], [of_row[i] for of_row in scales])
                cute.arch.sync_warp()
                pipeline.consumer_release(state)
                state = pipeline.advance(state)
            # With 32 columns, two of the four warps have no results.
            if warp * 16 < self.columns:
                store_swap_ab(sums, out, row, cutlass.min(row + self.rows, end), column + warp * 16, staged, lane)

    @cute.jit
    def scales(self, ss, s_of_b, state: PipelineState, lane):
        """Return the scales of the stage's blocks: a tensor [SCALES] for each of this thread's rows, which are `rows` /
        8 pairs of adjacent rows. A scale is the row's scale times the columns' scale."""
        of_columns = cute.make_rmem_tensor((SCALES,), Float32)
        cute.autovec_copy(s_of_b[None, state.stage], of_columns)
        scales = [cute.make_rmem_tensor((SCALES,), Float32) for _ in range(self.rows // 4)]
        for j in cutlass.range_constexpr(self.rows // 4):
            cute.autovec_copy(ss[j // 2 * 8 + lane % 4 * 2 + j % 2, None, state.stage], scales[j])
            for i in cutlass.range_constexpr(SCALES):
                scales[j][i] = scales[j][i] * of_columns[i]
        return scales


class Fp8GemmSmallMSm90(GroupedFp8GemmSmallMSm90):
    grouped = False

    @cute.jit
    def __call__(self, a: cute.Tensor, a_scale: cute.Tensor, b: cute.Tensor, b_scale: cute.Tensor, out, ctas, stream):
        tiles = cute.ceil_div(out.shape[1], self.columns) * cute.ceil_div(out.shape[0], self.rows)
        operands = a, a_scale, b, b_scale, out, None
        GroupedFp8GemmSmallMSm90.__call__(self, *operands, cutlass.min(ctas, tiles), stream)


def fake_operands(out_dtype: str, matrices: Any = 1) -> tuple[cute.Tensor, ...]:
    rows, columns, channels = (cute.sym_int() for _ in range(3))
    of_all = columns if matrices == 1 else cute.sym_int()
    blocks = cute.sym_int(divisibility=SCALES)
    return (
        fake_rows(Float8E4M3FN, rows, channels),
        fake_rows(Float32, rows, blocks),
        fake_rows(Float8E4M3FN, of_all, channels),
        fake_rows(Float32, matrices, cute.sym_int(), blocks),
        fake_rows(cute_dtype(out_dtype), rows, columns),
    )


@cached
def compile_fp8_gemm_few_rows(out_dtype: str, config: FewRowsConfig):
    """-> f(a [M, K] e4m3, a_scale [M, G] fp32, b [N, K] e4m3, b_scale [1, ceil(N / 128), G] fp32, out [M, N] out_dtype,
    ctas).

    M, N, K > 0; K is a multiple of 16, N of 8. G is ceil(K / 128), rounded up to a multiple of 4, and at most 64 with
    split-K; the padding of the scales must be finite. Rows are aligned to 16 bytes. ctas: upper limit on the number of
    CTAs; callers pass the number of SMs. Split-K ignores it and launches one cluster per work tile.
    """
    split = Fp8GemmSplitChannelsSm90(cute_dtype(out_dtype), config) if config.ctas > 1 else None
    return compile_sm90(split or Fp8GemmSmallMSm90(config), *fake_operands(out_dtype), Int32(1), fake_stream())


@cached
def compile_grouped_fp8_gemm_few_rows(out_dtype: str, config: FewRowsConfig):
    """-> f(a [M, K], a_scale [M, G], b [E * N, K], b_scale [E, ceil(N / 128), G], out [M, N], ends [E] int32 ascending,
    ctas), with the dtypes and rules of `compile_fp8_gemm_few_rows`; E up to 1024."""
    matrices = cute.sym_int()
    operands = *fake_operands(out_dtype, matrices), fake_contiguous(Int32, matrices)
    return compile_sm90(GroupedFp8GemmSmallMSm90(config), *operands, Int32(1), fake_stream())


def shipped_variants() -> Variants:
    one = [(compile_fp8_gemm_few_rows, (dtype, config)) for dtype in OUT_DTYPES for config in CONFIGS]
    return one + [
        (compile_grouped_fp8_gemm_few_rows, (dtype, config)) for dtype in OUT_DTYPES for config in GROUPED_CONFIGS
    ]
