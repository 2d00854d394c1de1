"""Products of a few rows with a block-scaled FP8 matrix:
out[m, n] = sum_g (sum_{k in block g} a[m, k] b[n, k]) * a_scale[m, g] * b_scale[n // 128, g], m up to 64.

Plan
- The matrix's rows are those of the wgmma (its operands are swapped): 64 columns of the result by 8 to 64 rows. So one
  row costs an eighth of the products, shared memory and registers that it costs in `fp8_gemm_sm90`, whose rows are the
  64 of a wgmma. The order of a sum is the same there, and so are the bits.
- Warp roles: one consumer warpgroup owns the work tile, one warp is the producer, which loads everything by TMA. The
  160 threads have registers enough without moving any between them.
- Pipeline: a ring of stages, each SCALES blocks of 128 channels of a and of b with their scales, that runs on over work
  tile after work tile. It is as deep as shared memory allows.
- Mainloop: the wgmma of a stage's blocks are issued one behind the other, each block's into accumulators of its own,
  and the scales are read while they run. Then the blocks are scaled and added in their order. One block at a time the
  latency of wgmma, of the wait and of the scales would be that of every block.
- Epilogue: accumulators have the result transposed. 16-bit results are turned by stmatrix, a warp's 16 columns at a
  time, and stored 32 bytes in a row. A warp stores fp32 results at once, as eight lanes have 32 bytes of a row.
- Scheduler: static persistent.
- A matrix of few columns has fewer work tiles than there are SMs: its channels may be split, see
  `fp8_gemm_split_channels_sm90`. `choose_config` says when.
Shared memory: barriers, 32 bytes a row and warp for results, stages x SCALES x ((64 + rows) x 128 + 4 x (rows + 1)).
Registers: SCALES x rows / 2 accumulators, rows / 2 sums and rows scales a consumer thread.
Roofline: memory, b once; where a matrix has fewer work tiles than SMs, what an SM can load, about 64 bytes a clock.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Uint32
from cutlass.memory import SmemAllocator

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.copies import bulk_load, tile_load
from dsa.cute.fake_tensors import cute_dtype, fake, fake_stream, strides
from dsa.cute.pipeline import Pipeline, PipelineState, pipeline_storage, start
from dsa.cute.shared_memory import load_16, pack, store_transposed
from dsa.cute.wgmma import multiply
from dsa.cute.work_tile import static_persistent_scheduler
from dsa.kernels.gemm.few_rows_tile import (
    COLUMNS,
    CONSUMER_WARPS,
    MAX_SPLIT_BLOCKS,
    SCALES,
    THREADS,
    FewRowsConfig,
    fragments,
    load_blocks,
    operand_layouts,
    tiles_of,
)
from dsa.kernels.gemm.fp8_gemm_split_channels_sm90 import Fp8GemmSplitChannelsSm90
from dsa.kernels.gemm.limits import GROUP, OUT_DTYPES

WHOLE_CONFIGS = FewRowsConfig(8, 6), FewRowsConfig(16, 5), FewRowsConfig(32, 4), FewRowsConfig(64, 3)
# Those of up to 113 KiB let two CTAs share an SM: clusters of four do not fill the SMs otherwise.
SPLIT_CONFIGS = (
    *(FewRowsConfig(8, 6, 2), FewRowsConfig(8, 4, 4), FewRowsConfig(8, 5, 8)),
    *(FewRowsConfig(16, 2, 4), FewRowsConfig(16, 3, 8)),
    *(FewRowsConfig(32, 3, 4), FewRowsConfig(32, 5, 8), FewRowsConfig(64, 2, 8)),
)
CONFIGS = WHOLE_CONFIGS + SPLIT_CONFIGS
MAX_ROWS = max(config.rows for config in CONFIGS)
# The cost model of `choose_config`: bytes a microsecond from memory, and to one SM; microseconds of an exchange's
# barriers.
MEMORY_RATE, SM_RATE, EXCHANGE = 4.2e6, 50e3, 1.2
ROOM = 0.8  # of the CTAs that multiprocessors have room for, those in clusters


class Fp8GemmFewRowsSm90:
    def __init__(self, out_dtype: type[cutlass.Numeric], cfg: FewRowsConfig):
        self.out_dtype, self.rows, self.stages = out_dtype, cfg.rows, cfg.stages

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        a_scale: cute.Tensor,
        b: cute.Tensor,
        b_scale: cute.Tensor,
        out: cute.Tensor,
        ctas: Int32,
        stream,
    ):
        a_layout, b_layout = operand_layouts(self.rows, SCALES * self.stages)
        s_layout = cute.make_layout((self.rows, SCALES, self.stages), stride=(SCALES, 1, self.rows * SCALES))
        a_atom, a_tma = tile_load(a, a_layout, (self.rows, GROUP))
        b_atom, b_tma = tile_load(b, b_layout, (COLUMNS, GROUP))
        s_atom, s_tma = tile_load(a_scale, s_layout, (self.rows, SCALES))

        @cute.struct
        class Storage:
            pipeline: pipeline_storage(self.stages)
            b_scale: cute.struct.Align[cute.struct.MemRange[Float32, SCALES * self.stages], 16]
            a_scale: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(s_layout)], 128]
            out: cute.struct.Align[cute.struct.MemRange[Int32, CONSUMER_WARPS * self.rows * 8], 128]
            a: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(a_layout)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(b_layout)], 1024]

        self.storage = Storage
        tiles = cute.ceil_div(out.shape[1], COLUMNS)
        self.kernel(a_atom, a_tma, b_atom, b_tma, s_atom, s_tma, b_scale, out, a_layout, b_layout, s_layout).launch(
            grid=(cutlass.min(ctas, tiles), 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1
        )

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
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        s_layout: cute.Layout,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        storage = SmemAllocator().allocate(self.storage)
        pipeline = Pipeline.of(storage.pipeline, self.stages)
        sa = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        sb = storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        ss = storage.a_scale.get_tensor(s_layout)
        s_of_b = storage.b_scale.get_tensor(cute.make_layout((SCALES, self.stages)))
        groups = b_scale.shape[2] // SCALES

        if warp == CONSUMER_WARPS:
            with cute.arch.elect_one():
                pipeline.init(consumers=CONSUMER_WARPS)
            cute.nvgpu.cpasync.prefetch_descriptor(b_atom)
            cute.nvgpu.cpasync.prefetch_descriptor(a_atom)
            cute.nvgpu.cpasync.prefetch_descriptor(s_atom)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp == CONSUMER_WARPS:
            atoms = (b_atom, a_atom, s_atom)
            self.produce(atoms, ma, mb, ms, b_scale, out, groups, sa, sb, ss, s_of_b, pipeline)
        else:
            staged = storage.out.data_ptr().toint() + warp * (self.rows * 32)
            self.consume(out, groups, sa, sb, ss, s_of_b, pipeline, staged, warp, lane)

    @cute.jit
    def produce(self, atoms, ma, mb, ms, b_scale, out, groups, sa, sb, ss, s_of_b, pipeline: Pipeline):
        """The producer warp."""
        b_atom, a_atom, s_atom = atoms
        size = SCALES * ((COLUMNS + self.rows) * GROUP + 4 * (self.rows + 1))
        tas, tag = tiles_of(a_atom, sa, ma, (self.rows, GROUP), 0)
        tss, tsg = tiles_of(s_atom, ss, ms, (self.rows, SCALES), 0)
        scheduler = static_persistent_scheduler()
        state = start()
        tiles = cute.ceil_div(out.shape[1], COLUMNS)
        for index in cutlass.range(scheduler.first, tiles, scheduler.step, unroll=1):
            tbs, tbg = tiles_of(b_atom, sb, mb, (COLUMNS, GROUP), index)
            of_columns = cute.local_tile(b_scale[0, index * COLUMNS // GROUP, None], (SCALES,), (None,))
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
    def consume(self, out, groups, sa, sb, ss, s_of_b, pipeline: Pipeline, staged, warp, lane):
        """The mainloop of the consumer warpgroup."""
        mma, acc, rb, ra = fragments(self.rows, SCALES, sb, sa)
        sums = cute.make_rmem_tensor((self.rows // 2,), Float32)
        scheduler = static_persistent_scheduler()
        state = start()
        tiles = cute.ceil_div(out.shape[1], COLUMNS)
        for index in cutlass.range(scheduler.first, tiles, scheduler.step, unroll=1):
            sums.fill(0.0)
            for _ in cutlass.range(groups, unroll=1):
                pipeline.consumer_wait(state)
                for i in cutlass.range_constexpr(SCALES):
                    block = SCALES * state.stage + i
                    multiply(mma, acc[i], rb, ra, block, block)
                scales = self.scales(ss, s_of_b, state, lane)
                for i in cutlass.range_constexpr(SCALES):
                    cute.nvgpu.warpgroup.wait_group(SCALES - 1 - i)
                    add_scaled(sums, acc[i], scales, i)
                cute.arch.sync_warp()
                pipeline.consumer_release(state)
                state = pipeline.advance(state)
            column = index * COLUMNS + warp * 16
            if cutlass.const_expr(self.out_dtype.width == 16):
                self.store_turned(sums, out, column, staged, lane)
            else:
                self.store(sums, out, column, lane)

    @cute.jit
    def scales(self, ss, s_of_b, state: PipelineState, lane):
        """The products of the scales of this thread's rows, rows / 8 pairs, and the columns': [SCALES] of each row."""
        of_columns = cute.make_rmem_tensor((SCALES,), Float32)
        cute.autovec_copy(s_of_b[None, state.stage], of_columns)
        scales = [cute.make_rmem_tensor((SCALES,), Float32) for _ in range(self.rows // 4)]
        for j in cutlass.range_constexpr(self.rows // 4):
            cute.autovec_copy(ss[j // 2 * 8 + lane % 4 * 2 + j % 2, None, state.stage], scales[j])
            for i in cutlass.range_constexpr(SCALES):
                scales[j][i] = scales[j][i] * of_columns[i]
        return scales

    @cute.jit
    def store_turned(self, sums, out, column, staged, lane):
        """A warp's 16 columns from `column` on, through its part of shared memory, which has 32 bytes of each row."""
        matrices = min(4, self.rows // 4)
        for first in cutlass.range_constexpr(0, self.rows // 4, matrices):
            # Matrix i of 8 rows and 8 columns: rows from i / 2 * 8 on, columns from i % 2 * 8 on.
            words = [pack(sums[2 * i], sums[2 * i + 1], self.out_dtype) for i in range(first, first + matrices)]
            matrix = first + lane // 8 % matrices
            store_transposed(staged + (matrix // 2 * 8 + lane % 8) * 32 + matrix % 2 * 16, words)
        cute.arch.sync_warp()
        eight = cute.make_rmem_tensor((4,), Uint32)
        for first in cutlass.range_constexpr(0, 2 * self.rows, 32):
            row, chunk = (first + lane) // 2, lane % 2
            at = column + 8 * chunk
            if row < cutlass.min(self.rows, out.shape[0]) and at < out.shape[1]:
                loaded = load_16(staged + row * 32 + chunk * 16)
                for k in cutlass.range_constexpr(4):
                    eight[k] = loaded[k]
                target = cute.local_tile(out[row, None], (8,), (at // 8,))
                cute.autovec_copy(cute.recast_tensor(eight, self.out_dtype), target)
        cute.arch.sync_warp()

    @cute.jit
    def store(self, sums, out, column, lane):
        """A warp's 16 columns, straight from registers."""
        for i in cutlass.range_constexpr(self.rows // 2):
            row, at = i // 4 * 8 + lane % 4 * 2 + i % 2, column + i // 2 % 2 * 8 + lane // 4
            if row < out.shape[0] and at < out.shape[1]:
                out[row, at] = sums[i]


@cute.jit
def add_scaled(sums, acc, scales, block: cutlass.Constexpr):
    """sums += acc, scaled. Four accumulators are two rows of one column, and of the column 8 further on."""
    products = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
    for i in cutlass.range_constexpr(cute.size(acc)):
        sums[i] += products[i] * scales[i // 4 * 2 + i % 2][block]


def fake_operands(out_dtype: str) -> tuple[cute.Tensor, ...]:
    """a, a_scale, b, b_scale and out, as the compile functions document them."""
    rows, columns, channels = (cute.sym_int() for _ in range(3))
    blocks = cute.sym_int(divisibility=SCALES)
    out_type = cute_dtype(out_dtype)
    a = fake(Float8E4M3FN, (rows, channels), (*strides(1, 16), 1))
    a_scale = fake(Float32, (rows, blocks), (*strides(1, SCALES), 1))
    b = fake(Float8E4M3FN, (columns, channels), (*strides(1, 16), 1))
    b_scale = fake(Float32, (1, cute.sym_int(), blocks), (*strides(2, SCALES), 1))
    return a, a_scale, b, b_scale, fake(out_type, (rows, columns), (*strides(1, 128 // out_type.width), 1))


@cached
def compile_fp8_gemm_few_rows(out_dtype: str, config: FewRowsConfig):
    """-> f(a [M, K] e4m3, a_scale [M, G], b [N, K] e4m3, b_scale [1, ceil(N / 128), G], out [M, N], ctas); M up to the
    config's rows; M, N, K > 0. K is a multiple of 16, N of 8; G is ceil(K / 128), rounded up to a multiple of 4 with
    finite scales, and if the config splits channels at most 64; rows start at multiples of 16 bytes."""
    kernel = Fp8GemmFewRowsSm90 if config.ctas == 1 else Fp8GemmSplitChannelsSm90
    return compile_sm90(kernel(cute_dtype(out_dtype), config), *fake_operands(out_dtype), Int32(1), fake_stream())


def choose_config(rows: int, columns: int, channels: int, multiprocessors: int) -> FewRowsConfig:
    """The narrowest tile that has all rows; and as many CTAs for it, of those that can run all at once, as take the
    shortest time: the longer of what all bytes take from memory and what those of an SM's CTAs take to it; and that of
    the exchange of products, if there is one."""
    blocks = -(-channels // (SCALES * GROUP)) * SCALES
    tile_rows = min(config.rows for config in CONFIGS if rows <= config.rows)
    tiles = -(-columns // COLUMNS)

    def possible(config: FewRowsConfig) -> bool:
        # A cluster has to fit into a group of SMs, and groups have different numbers of them.
        at_once = tiles * config.ctas <= ROOM * multiprocessors * config.ctas_per_sm()
        return config.rows == tile_rows and (config.ctas == 1 or (blocks <= MAX_SPLIT_BLOCKS and at_once))

    def microseconds(config: FewRowsConfig) -> float:
        stages = -(-blocks // (config.span * config.ctas))
        of_cta = stages * config.span * (COLUMNS + config.rows) * GROUP
        of_sm = -(-tiles * config.ctas // multiprocessors) * of_cta
        exchange = 0.0
        if config.ctas > 1:
            exchange = EXCHANGE + blocks * COLUMNS * config.rows * 4 / config.ctas / SM_RATE
        return max(columns * channels / MEMORY_RATE, of_sm / SM_RATE) + exchange

    return min(filter(possible, CONFIGS), key=microseconds)


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [(compile_fp8_gemm_few_rows, (dtype, config)) for dtype in OUT_DTYPES for config in CONFIGS]
