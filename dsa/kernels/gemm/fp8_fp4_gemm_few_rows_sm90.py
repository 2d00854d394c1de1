"""Grouped product of FP8 activations with FP4 weights, for few rows a weight (decoding):
out[m, n] = w[m] * sum_g (sum_{k in block g} a[rows[m], k] b8[e, n, k]) * a_scale[rows[m], g] * b_scale[e, n // 128, g],
e the matrix of row m, b8 = e2m1[e, n, k] * 2^(e8m0[e, n, k // 32] - 127) / b_scale[e, n // 128, k // 128], which e4m3
holds exactly. The bits are those of the FP8 product with b8.

Plan
- Weights are the rows of the wgmma, m64 nT k32, and T rows of the product its columns. A consumer warpgroup owns 64
  weights; its lanes read FP4 by ldmatrix, widen it in registers (fp4_operand.py) and multiply from there: only FP4
  goes through shared memory.
- Warp roles: the producer warpgroup's first warp loads weights, codes by TMA and their scales by cp.async, and waits
  for nothing else; its other three gather the rows of activations and their scales. One or two consumer warpgroups;
  with one, two or three CTAs share a multiprocessor. The weights' warp alone finds work tiles, and passes them on.
- Pipeline: one ring of STAGES stages of 512 channels, four blocks: codes (two boxes of 256 channels, 128 bytes a row),
  e8m0 scales (16 bytes a row), activations (T x 128 bytes a block) and the scales of activations and blocks (16 bytes a
  row). It runs on over work tile after work tile. 100 to 170 KB of FP4 are on their way.
- Mainloop: per block of 128 channels four wgmma into accumulators of its own, T / 2 registers. The next block is
  widened while they run: behind the fourth block of a stage the first one of the next, also if that is of the next work
  tile. So wgmma's latency, the wait for a stage and its fence stand beside arithmetic. Then the products are scaled and
  added in fp32 in their order.
- Activations' words are copied in the order in which lanes have the weights' channels, 4 bytes a copy: few rows make
  few copies. Rows beyond the matrix's end are not copied: they are columns of their own, which nobody stores. Channels
  beyond K are zeros.
- Epilogue: 16-bit results are transposed by stmatrix, 16 rows of weights a warp, and stored 32 bytes in a row.
- Scheduler: static persistent. The work tiles of a matrix come together, and its tiles of rows innermost: a tile of
  weights comes from memory once. Neighbouring CTAs have neighbouring weights.
Shared memory: barriers, prefix sums, tables, T x 32 bytes a consumer warp for results, and the ring.
Registers: 64 of widened weights, or 32 where four blocks do not fit, 2 T of accumulators and T / 2 sums a consumer
thread; see REGISTERS.
Instructions: 18 a lane and 8 weights in all; 10 are the ALU's, which issues 2 a clock and multiprocessor: 320 clocks a
block of 128 x 128.
Roofline: memory, 8.5 KB a block of 128 x 128: 480 clocks or more at 4.2 TB/s.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.copies import arrive_when_gathered, gather_16, tile_load
from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake, fake_stream, strides
from dsa.cute.pipeline import Pipeline, PipelineState, pipeline_storage, start
from dsa.cute.shared_memory import load_16, load_matrices
from dsa.cute.sm90 import SHARED_BYTES, WARP, WARPGROUP
from dsa.cute.work_tile import WorkTilePipeline, static_persistent_scheduler, work_tile_storage
from dsa.kernels.gemm.fp4_operand import (
    TABLE_BYTES,
    gather_4,
    load_table,
    ordered_place,
    table_places,
    widen,
    write_tables,
)
from dsa.kernels.gemm.grouped_tiles import PREFIX_SUMS, GroupedTiles, WorkTileInfo, expected_tiles
from dsa.kernels.gemm.limits import GROUP, OUT_DTYPES
from dsa.kernels.gemm.turned_tile import store_turned
from dsa.runtime.compile_cache import cached, compile_sm90

BLOCKS = 4  # of GROUP channels a stage
STEPS = GROUP // 32  # wgmma a block
BOX = 128  # bytes per row of a TMA box: 256 FP4 channels
BOXES = BLOCKS * GROUP // 2 // BOX
SCALE_BYTES = 16  # of a row and stage: four e8m0 bytes a block, or one fp32
OWN_ROWS = 16  # of weights, of a warp
GATHER_WARPS = 3
INFO_BYTES = 64  # of the ring of work tiles
# Registers of consumers' and of producers' threads, by consumer warpgroups and CTAs a multiprocessor.
REGISTERS = {(1, 2): (208, 48), (1, 3): (120, 40), (2, 1): (232, 40)}


@dataclass(frozen=True)
class Fp8Fp4GemmFewRowsConfig:
    """groups: consumer warpgroups, of 64 weights each; rows: of the product, 8, 16 or 32; stages: of 512 channels;
    resident: CTAs a multiprocessor."""

    groups: int
    rows: int
    stages: int
    resident: int

    @property
    def columns(self) -> int:
        """Weights of a work tile."""
        return 64 * self.groups

    @property
    def threads(self) -> int:
        return (self.groups + 1) * WARPGROUP

    def ctas(self, multiprocessors: int) -> int:
        """What a launch is given: all that are resident at once."""
        return self.resident * multiprocessors

    def fits(self) -> bool:
        """Whether shared memory holds it; each resident CTA takes 1 KiB more."""
        stage = self.columns * (BOXES * BOX + SCALE_BYTES) + self.rows * BLOCKS * GROUP + (self.rows + 1) * SCALE_BYTES
        barriers = 16 * self.stages + 16 + INFO_BYTES
        others = 4 * (PREFIX_SUMS + 32) + TABLE_BYTES + barriers + self.groups * WARPGROUP * self.rows + 1024
        return self.stages * stage + others <= (SHARED_BYTES + 1024) // self.resident - 1024


# A token's few work tiles are shared out best by three small CTAs a multiprocessor; of many, two warpgroups are faster.
CONFIGS = (
    *(Fp8Fp4GemmFewRowsConfig(1, *sizes) for sizes in ((8, 3, 3), (16, 4, 2), (32, 3, 2))),
    *(Fp8Fp4GemmFewRowsConfig(2, *sizes, 1) for sizes in ((8, 5), (16, 5), (32, 4))),
)


class Ring(NamedTuple):
    """Addresses of the stages' parts in shared memory."""

    codes: Int32
    scales: Int32
    rows: Int32
    row_scales: Int32


class StageScales(NamedTuple):
    """Of a stage, in registers. of_rows: the e8m0 bytes of a lane's two rows of weights, [2, 4] words; of_blocks: the
    scales of its blocks, [4] as bits."""

    of_rows: cute.Tensor
    of_blocks: cute.Tensor


class Fp8Fp4GemmFewRowsSm90:
    def __init__(self, out_dtype: type[cutlass.Numeric], cfg: Fp8Fp4GemmFewRowsConfig):
        self.out_dtype, self.cfg = out_dtype, cfg
        self.rows, self.columns, self.stages = cfg.rows, cfg.columns, cfg.stages
        self.consumer_warps, self.threads = 4 * cfg.groups, cfg.threads
        # Of widened blocks: those of a stage, if there are registers for so many.
        self.buffers = BLOCKS if cfg.resident <= 2 and cfg.rows <= 16 else 2

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        a_scale: cute.Tensor,
        rows: cute.Tensor,
        b: cute.Tensor,
        b_scale_32: cute.Tensor,
        b_scale: cute.Tensor,
        ends: cute.Tensor,
        weights: cute.Tensor,
        out: cute.Tensor,
        ctas: Int32,
        stream,
    ):
        tile = (self.columns, self.rows, BOX)
        b_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, Uint8, BOXES * self.stages)
        a_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, Float8E4M3FN, BLOCKS * self.stages)
        b_atom, b_tma = tile_load(b, b_layout, (self.columns, BOX))

        @cute.struct
        class Storage:
            pipeline: pipeline_storage(self.stages)
            work_tiles: work_tile_storage(WorkTileInfo)
            sums: cute.struct.MemRange[Int32, 32]
            prefix: cute.struct.MemRange[Int32, PREFIX_SUMS]
            tables: cute.struct.Align[cute.struct.MemRange[Uint8, TABLE_BYTES], TABLE_BYTES]
            out: cute.struct.Align[cute.struct.MemRange[Uint8, self.consumer_warps * self.rows * 2 * OWN_ROWS], 16]
            row_scales: cute.struct.Align[cute.struct.MemRange[Uint8, self.stages * (self.rows + 1) * SCALE_BYTES], 16]
            scales: cute.struct.Align[cute.struct.MemRange[Uint8, self.stages * self.columns * SCALE_BYTES], 128]
            b: cute.struct.Align[cute.struct.MemRange[Uint8, cute.cosize(b_layout)], 1024]
            a: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(a_layout)], 1024]

        self.storage = Storage
        self.kernel(
            a, a_scale, rows, b_atom, b_tma, b_scale_32, b_scale, ends, weights, out, b_layout, a_layout
        ).launch(
            grid=(ctas, 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.cfg.resident,
            preferred_smem_carveout=100,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        a: cute.Tensor,
        a_scale: cute.Tensor,
        rows: cute.Tensor,
        b_atom: cute.CopyAtom,
        mb: cute.Tensor,
        b_scale_32: cute.Tensor,
        b_scale: cute.Tensor,
        ends: cute.Tensor,
        weights: cute.Tensor,
        out: cute.Tensor,
        b_layout: cute.ComposedLayout,
        a_layout: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        storage = SmemAllocator().allocate(self.storage)
        pipeline = Pipeline.of(storage.pipeline, self.stages)
        work_tiles = WorkTilePipeline.of(storage.work_tiles, WorkTileInfo)
        sb = storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        sa = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        prefix = storage.prefix.get_tensor(cute.make_layout(PREFIX_SUMS))
        across = cute.ceil_div(out.shape[1], self.columns)
        tiles = GroupedTiles(ends, out.shape[0], across, prefix, self.rows, self.columns)
        sums = storage.sums.get_tensor(cute.make_layout(32))
        tables = Int32(storage.tables.data_ptr().toint())
        places = storage.b, storage.scales, storage.a, storage.row_scales
        ring = Ring(*(Int32(place.data_ptr().toint()) for place in places))

        if warp == self.consumer_warps:
            cute.nvgpu.cpasync.prefetch_descriptor(b_atom)
        if tid == 0:
            # The announcement of the codes' bytes, and a lane each for what it copies.
            pipeline.init(consumers=self.consumer_warps, producers=1 + (1 + GATHER_WARPS) * WARP)
            work_tiles.init(consumers=self.consumer_warps + GATHER_WARPS)
        cute.arch.mbarrier_init_fence()
        if tid < 32:
            sums[tid] = 0
            write_tables(tables, lane)
        cute.arch.sync_threads()
        wait_for_prerequisite_grids()
        total = tiles.count(sums, self.threads, tid, lane, warp)

        consumer_registers, producer_registers = REGISTERS[self.cfg.groups, self.cfg.resident]
        if warp >= self.consumer_warps:
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp == self.consumer_warps:
                operands = b_atom, mb, b_scale_32, b_scale
                self.load_weights(*operands, tiles, total, sb, ring, pipeline, work_tiles, lane)
            else:
                number = warp - self.consumer_warps - 1
                self.gather_rows(a, a_scale, rows, total, ring, pipeline, work_tiles, number, lane)
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            groups = a_scale.shape[1] // BLOCKS
            staged = Int32(storage.out.data_ptr().toint()) + warp * (self.rows * 2 * OWN_ROWS)
            rings = pipeline, work_tiles
            self.consume(groups, weights, out, total, sa, ring, tables, *rings, staged, tid, warp, lane)

    @cute.jit
    def load_weights(
        self,
        b_atom,
        mb,
        b_scale_32,
        b_scale,
        tiles: GroupedTiles,
        total,
        sb,
        ring: Ring,
        pipeline: Pipeline,
        work_tiles: WorkTilePipeline,
        lane,
    ):
        """The warp that loads the weights' codes and scales, and the blocks' scales; it tells the others where work
        tiles are."""
        scheduler = static_persistent_scheduler()
        state, told, e = start(), start(), Int32(0)
        columns = b_scale_32.shape[1]
        pitch = Int64(b_scale_32.stride[1])
        for index in cutlass.range(scheduler.first, total, scheduler.step, unroll=1):
            info = tiles.rows_first(index, e, lane)
            told = work_tiles.publish(told, info)
            e, column = info.matrix, info.column
            gb = cute.local_tile(cute.domain_offset((e * columns + column, 0), mb), (self.columns, BOX), (0, None))
            tbs, tbg = cute.nvgpu.cpasync.tma_partition(
                b_atom, 0, cute.make_layout(1), cute.group_modes(sb, 0, 2), cute.group_modes(gb, 0, 2)
            )
            # What lies beyond the columns is not stored: it may have any scale, as zeros.
            of_rows = b_scale_32[e, cutlass.min(column + lane, columns - 1), None].iterator.toint()
            of_block = b_scale[e, column // GROUP, None].iterator.toint()
            for group in cutlass.range(b_scale.shape[2] // BLOCKS, unroll=1):
                pipeline.producer_acquire(state, self.columns * BOXES * BOX)
                for box in cutlass.range_constexpr(BOXES):
                    full = pipeline.producer_barrier(state)
                    target = tbs[None, BOXES * state.stage + box]
                    cute.copy(b_atom, tbg[None, BOXES * group + box], target, tma_bar_ptr=full)
                target = ring.scales + (state.stage * self.columns + lane) * SCALE_BYTES
                for i in cutlass.range_constexpr(0, self.columns, WARP):
                    valid = column + i + lane < columns
                    source = of_rows + i * pitch if valid else of_rows
                    gather_16(target + i * SCALE_BYTES, source + group * SCALE_BYTES, valid)
                if lane == 0:
                    target = ring.row_scales + (state.stage * (self.rows + 1) + self.rows) * SCALE_BYTES
                    gather_16(target, of_block + group * SCALE_BYTES, True)
                arrive_when_gathered(pipeline.producer_barrier(state))
                state = pipeline.advance(state)

    @cute.jit
    def gather_rows(
        self,
        a,
        a_scale,
        rows,
        total,
        ring: Ring,
        pipeline: Pipeline,
        work_tiles: WorkTilePipeline,
        number: Int32,
        lane,
    ):
        """Gathering warp `number`: every third row of activations, a word a lane; the first one their scales, too."""
        scheduler = static_persistent_scheduler()
        state, told = start(), start()
        sources, channels = a.shape
        place = ordered_place(lane)
        chunk, word = place // 4, place % 4
        for _ in cutlass.range(scheduler.first, total, scheduler.step, unroll=1):
            info = work_tiles.current(told)
            told = work_tiles.release(told)
            row, end = info.row, info.end
            count = cutlass.min(end - row, self.rows)
            own = cutlass.min(row + lane, end - 1)
            if rows.shape[0] > 0:
                own = rows[own]
            # Whatever `rows` says, what is read is there.
            own = cutlass.max(cutlass.min(own, sources - 1), 0)
            own_scales = a_scale[own, None].iterator.toint()
            for group in cutlass.range(a_scale.shape[1] // BLOCKS, unroll=1):
                pipeline.producer_wait(state)
                for r in cutlass.range(number, count, GATHER_WARPS, unroll=1):
                    source = a[cute.arch.shuffle_sync(own, r), None].iterator.toint()
                    target = ring.rows + (state.stage * BLOCKS * self.rows + r) * GROUP
                    target += (chunk ^ (r % 8)) * 16 + word * 4
                    for block in cutlass.range_constexpr(BLOCKS):
                        channel = (group * BLOCKS + block) * GROUP + 4 * lane
                        valid = channel < channels
                        gather_4(target + block * (self.rows * GROUP), source + (channel if valid else 0), valid)
                if number == 0 and lane < count:
                    target = ring.row_scales + (state.stage * (self.rows + 1) + lane) * SCALE_BYTES
                    gather_16(target, own_scales + group * SCALE_BYTES, True)
                arrive_when_gathered(pipeline.producer_barrier(state))
                state = pipeline.advance(state)

    @cute.jit
    def consume(
        self,
        groups,
        weights,
        out,
        total,
        sa,
        ring: Ring,
        tables,
        pipeline: Pipeline,
        work_tiles: WorkTilePipeline,
        staged,
        tid,
        warp,
        lane,
    ):
        """The mainloop of a consumer warp, of whose warpgroup all take the same way."""
        major, registers = cute.nvgpu.OperandMajorMode.K, cute.nvgpu.warpgroup.OperandSource.RMEM
        mma = sm90.make_trivial_tiled_mma(
            *(Float8E4M3FN, Float8E4M3FN, major, major, Float32, (1, 1, 1), (64, self.rows), registers)
        )
        thr = mma.get_slice(tid % WARPGROUP)
        activations = mma.make_fragment_B(thr.partition_B(sa))
        widened = [cute.make_rmem_tensor(thr.partition_shape_A((64, GROUP)), Float8E4M3FN) for _ in range(self.buffers)]
        shape = thr.partition_shape_C((64, self.rows))
        acc = [cute.make_rmem_tensor(shape, Float32) for _ in range(BLOCKS)]
        sums = cute.make_rmem_tensor((self.rows // 2,), Float32)
        factors = cute.make_rmem_tensor((self.rows // 4,), Float32)
        scales = StageScales(*(cute.make_rmem_tensor((count,), Uint32) for count in (2 * BLOCKS, BLOCKS)))
        own_row = lane % 4 * 2
        scheduler = static_persistent_scheduler()
        state, told = start(), start()
        if scheduler.first < total:
            self.await_stage(scales, ring, pipeline, state, warp, lane)
            self.widen_block(0, widened[0], scales, ring, tables, state, warp, lane)
        for index in cutlass.range(scheduler.first, total, scheduler.step, unroll=1):
            info = work_tiles.current(told)
            told = work_tiles.release(told)
            row, end = info.row, info.end
            sums.fill(0.0)
            factors.fill(1.0)
            if weights.shape[0] > 0:
                for i in cutlass.range_constexpr(self.rows // 4):
                    factors[i] = weights[cutlass.min(row + i // 2 * 8 + own_row + i % 2, end - 1)]
            for group in cutlass.range(groups, unroll=1):
                # Behind the last stage of all, its first block is widened once more, in vain.
                following = pipeline.advance(state)
                is_last = group == groups - 1 and index + scheduler.step >= total
                following = PipelineState(
                    state.stage if is_last else following.stage, state.phase if is_last else following.phase
                )
                self.add_stage(
                    mma, acc, widened, activations, sums, scales, ring, tables, pipeline, state, following, warp, lane
                )
                state = following
            for i in cutlass.range_constexpr(self.rows // 2):
                sums[i] = sums[i] * factors[i // 4 * 2 + i % 2]
            rows_end = cutlass.min(row + self.rows, end)
            store_turned(sums, out, row, rows_end, info.column + warp * OWN_ROWS, staged, lane)

    @cute.jit
    def add_stage(
        self,
        mma,
        acc,
        widened,
        activations,
        sums,
        scales: StageScales,
        ring: Ring,
        tables,
        pipeline: Pipeline,
        state: PipelineState,
        following: PipelineState,
        warp,
        lane,
    ):
        """Add up a stage's four blocks, of which the first is widened; and widen the first one of the stage behind it,
        and load its scales."""
        row_scales = ring.row_scales + state.stage * ((self.rows + 1) * SCALE_BYTES)
        of_blocks = [scales.of_blocks[block].bitcast(Float32) for block in range(BLOCKS)]
        for block in cutlass.range_constexpr(BLOCKS):
            cute.nvgpu.warpgroup.fence()
            for step in cutlass.range_constexpr(STEPS):
                mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, step > 0)
                b = activations[None, None, step, state.stage * BLOCKS + block]
                cute.gemm(mma, acc[block], widened[block % self.buffers][None, None, step], b, acc[block])
            cute.nvgpu.warpgroup.commit_group()
            if const_expr(block == BLOCKS - 1):
                of_rows = [
                    load_16(row_scales + (8 * (i // 2) + lane % 4 * 2 + i % 2) * SCALE_BYTES)
                    for i in range(self.rows // 4)
                ]
                self.await_stage(scales, ring, pipeline, following, warp, lane)
            if const_expr(block >= self.buffers - 1):
                # The block that was in the next buffer before.
                cute.nvgpu.warpgroup.wait_group(self.buffers - 1)
            at, after = (following, 0) if block == BLOCKS - 1 else (state, block + 1)
            self.widen_block(after, widened[after % self.buffers], scales, ring, tables, at, warp, lane)
        cute.nvgpu.warpgroup.wait_group(0)
        cute.arch.sync_warp()
        pipeline.consumer_release(state)
        for block in cutlass.range_constexpr(BLOCKS):
            factors = [x[block].bitcast(Float32) * of_blocks[block] for x in of_rows]
            products = cute.make_tensor(acc[block].iterator, cute.make_layout(self.rows // 2))
            for i in cutlass.range_constexpr(self.rows // 2):
                sums[i] += products[i] * factors[i // 4 * 2 + i % 2]

    @cute.jit
    def await_stage(self, scales: StageScales, ring: Ring, pipeline: Pipeline, state: PipelineState, warp, lane):
        """Wait for a stage, and load its scales."""
        pipeline.consumer_wait(state)
        # Activations were not written by TMA; wgmma reads them through the other proxy.
        cute.arch.fence_proxy("async.shared", space="cta")
        of_blocks = load_16(ring.row_scales + (state.stage * (self.rows + 1) + self.rows) * SCALE_BYTES)
        first = state.stage * self.columns + warp * OWN_ROWS
        for half in cutlass.range_constexpr(2):
            words = load_16(ring.scales + (first + lane // 4 + 8 * half) * SCALE_BYTES)
            for block in cutlass.range_constexpr(BLOCKS):
                scales.of_rows[half * BLOCKS + block] = words[block]
        for block in cutlass.range_constexpr(BLOCKS):
            scales.of_blocks[block] = of_blocks[block]

    @cute.jit
    def widen_block(
        self,
        block: cutlass.Constexpr,
        widened,
        scales: StageScales,
        ring: Ring,
        tables,
        state: PipelineState,
        warp,
        lane,
    ):
        """A stage's block, as the lanes of a warpgroup have it for wgmma."""
        # Matrices of ldmatrix: 16 rows' chunk of 16 bytes, then their next one.
        own = ring.codes + (state.stage * (BOXES * self.columns) + warp * OWN_ROWS + lane % OWN_ROWS) * BOX
        chunk = (lane // OWN_ROWS) ^ (lane % 8)
        of_block = scales.of_blocks[block].bitcast(Float32)
        places = [table_places(scales.of_rows[half * BLOCKS + block], of_block) for half in range(2)]
        words = cute.make_tensor(cute.recast_ptr(widened.iterator, dtype=Uint32), cute.make_layout((2, 2, STEPS)))
        box = own + block // 2 * (self.columns * BOX)
        for pair in cutlass.range_constexpr(STEPS // 2):
            codes = load_matrices(box + ((chunk ^ (block % 2 * STEPS + 2 * pair)) * 16))
            for i in cutlass.range_constexpr(4):
                half, step = i % 2, 2 * pair + i // 2
                table = load_table(tables, places[half], step)
                words[half, 0, step], words[half, 1, step] = widen(codes[i], *table)


@cached
def compile_fp8_fp4_gemm_few_rows(out_dtype: str, config: Fp8Fp4GemmFewRowsConfig):
    """-> f(a [T, K] e4m3, a_scale [T, G] fp32, rows [M] int32, or [0] where row m of the product is a's row m, b
    [E * N, K / 2] uint8, b_scale_32 [E, N, 4 G] uint8, b_scale [E, ceil(N / 128), G] fp32, ends [E] int32 ascending,
    weights [M] fp32, or [0] for none, out [M, N], ctas).

    E up to 1024, T and M up to 2^27, all > 0; K is a multiple of 128, N of 8; G is K / 128, rounded up to a multiple of
    4 with finite scales, and any bytes in b_scale_32; rows of all but the vectors start at multiples of 16 bytes. ctas:
    config.ctas(multiprocessors).
    """
    sources, rows, columns, channels, matrices = (cute.sym_int() for _ in range(5))
    blocks = cute.sym_int(divisibility=BLOCKS)
    out_type = cute_dtype(out_dtype)
    a = fake(Float8E4M3FN, (sources, channels), (*strides(1, 16), 1))
    a_scale = fake(Float32, (sources, blocks), (*strides(1, 4), 1))
    sources_of_rows = fake(Int32, (cute.sym_int(),), (1,), 4)
    b = fake(Uint8, (cute.sym_int(), cute.sym_int()), (*strides(1, 16), 1))
    b_scale_32 = fake(Uint8, (matrices, columns, cute.sym_int()), (*strides(2, SCALE_BYTES), 1))
    b_scale = fake(Float32, (matrices, cute.sym_int(), blocks), (*strides(2, 4), 1))
    ends = fake(Int32, (matrices,), (1,), 4)
    weights = fake(Float32, (cute.sym_int(),), (1,), 4)
    out = fake(out_type, (rows, columns), (*strides(1, 128 // out_type.width), 1))
    kernel = Fp8Fp4GemmFewRowsSm90(out_type, config)
    return compile_sm90(
        kernel,
        *(a, a_scale, sources_of_rows, b, b_scale_32, b_scale, ends, weights, out, Int32(1), fake_stream()),
    )


def choose_config(rows: int, columns: int, matrices: int, multiprocessors: int) -> Fp8Fp4GemmFewRowsConfig:
    """For `rows` in all: what the busiest multiprocessor loads the fewest bytes with, however many channels all work
    tiles have."""

    def loaded(config: Fp8Fp4GemmFewRowsConfig) -> float:
        tiles = matrices * expected_tiles(rows, matrices, config.rows) * -(-columns // config.columns)
        # A block's codes and e8m0 bytes, and its activations.
        return math.ceil(tiles / multiprocessors) * (config.columns * (GROUP // 2 + 4) + config.rows * GROUP)

    return min(CONFIGS, key=loaded)


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [(compile_fp8_fp4_gemm_few_rows, (dtype, config)) for dtype in OUT_DTYPES for config in CONFIGS]
