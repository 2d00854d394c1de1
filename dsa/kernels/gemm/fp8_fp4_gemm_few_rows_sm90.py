"""Grouped product of FP8 activations with FP4 weights, for few rows per weight matrix (decode):
out[m, n] = weights[m] * sum_g (sum_{k in block g} a[r, k] b8[e, n, k]) * a_scale[r, g] * b_scale[e, n // 128, g],
where e is the matrix of row m, block g is 128 channels, weights[m] is 1 without `weights`, r is rows[m] (m without
`rows`), and
b8[e, n, k] = e2m1[e, n, k] * 2^(e8m0[e, n, k // 32] - 127) / b_scale[e, n // 128, k // 128].
b8 is exactly an e4m3 number. The result has the bits of the FP8 product with b8.

Plan
- Weight rows are M of the wgmma, m64 nT k32, and T = 8, 16 or 32 rows of the product are N (swap A/B). A consumer
  warpgroup computes 64 weight rows. Its lanes read FP4 by ldmatrix and widen it in registers (fp4_operand.py). These
  registers are the wgmma's operand A, so the weights pass through shared memory only as FP4.
- Warp roles: a producer warpgroup, and one or two consumer warpgroups. With one consumer warpgroup, two or three CTAs
  share an SM. The first producer warp finds the work tiles and passes them to the other warps. It loads the weights'
  codes by TMA, and their e8m0 scales and block scales by cp.async. It waits only until stages are empty, in the ring of
  operands and in the ring of work tiles. The other three producer warps gather the rows of activations and their
  scales.
- Pipeline: one ring of STAGES stages of 512 channels, which are four blocks. A stage has codes (two boxes of 256
  channels, 128 bytes per row), e8m0 scales (16 bytes per row), activations (T x 128 bytes per block), their scales (16
  bytes per row) and the weights' four block scales (16 bytes). The ring continues across work tiles. Per SM, 100 to 170
  KB of FP4 are in flight.
- Mainloop: each of a stage's four blocks has separate accumulators (T / 2 registers), to which four wgmma add. The next
  block is widened while these wgmma run. After the fourth block of a stage, the next block is the first block of the
  next stage, even if that stage belongs to the next work tile. So widening hides the latency of wgmma, the wait for a
  stage and the fence after it. When all four blocks of a stage are multiplied, each thread scales their products and
  adds them in fp32, in order.
- Activations are copied in words of 4 bytes, because their channels must be in the order of the widened weights'
  channels (fp4_operand.py). With few rows, these are few copies. Rows past the matrix's end are not copied. Their
  columns of the wgmma's result contain garbage, which affects no other column and is not stored. Channels beyond K are
  zeros.
- Epilogue: stmatrix transposes 16-bit results. A warp has 16 weight rows, so it then stores 32 bytes per row of the
  result. fp32 results are stored from registers.
- Scheduler: static persistent. The work tiles of a matrix are consecutive. Among them, tiles with the same weight rows
  are consecutive, so each tile of weights is read from memory once. Consecutive CTAs read adjacent weights.
Shared memory: barriers, prefix sums, tables, T x 32 bytes per consumer warp for results, and the ring.
Registers: per consumer thread 64 for four blocks of widened weights, or 32 for two blocks where four do not fit; 2 T
accumulators; T / 2 sums. See REGISTERS.
Instructions: a lane issues 18 for 8 weights. 10 of them use the ALU. An SM issues 2 ALU instructions per cycle, each
for a whole warp: 320 cycles per block of 128 x 128.
Roofline: bound by memory, 8.5 KB per block of 128 x 128. At 4.2 TB/s for 132 SMs, an SM loads a block in 480 cycles.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint8, Uint32, const_expr

from dsa.cute.copies import arrive_when_gathered, gather_16, tile_load
from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake_contiguous, fake_rows, fake_stream
from dsa.cute.pipeline import Pipeline, PipelineState, pipeline_storage, start
from dsa.cute.shared_memory import load_16, load_matrices
from dsa.cute.sm90 import SHARED_BYTES, WARP, WARPGROUP, warp_and_lane
from dsa.cute.wgmma import k_major_layout
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
from dsa.kernels.gemm.grouped_tiles import (
    PREFIX_SUMS,
    GroupedTiles,
    WorkTileInfo,
    expected_tiles,
    tiles_of_matrices,
    tiles_storage,
)
from dsa.kernels.gemm.limits import GROUP, OUT_DTYPES
from dsa.kernels.gemm.operand_loads import tiled_mma, tiles_of
from dsa.kernels.gemm.swap_ab_tile import add_scaled, store_swap_ab
from dsa.runtime.compile_cache import Variants, cached, compile_sm90

BLOCKS = 4  # blocks of GROUP channels per stage
STEPS = GROUP // 32  # wgmma per block
BOX = 128  # bytes per row of a TMA box: 256 FP4 channels
BOXES = BLOCKS * GROUP // 2 // BOX  # per stage
SCALE_BYTES = 16  # per row and stage: four e8m0 bytes per block for weights, one fp32 per block for activations
OWN_ROWS = 16  # weight rows per consumer warp
GATHER_WARPS = 3
INFO_BYTES = 64  # shared memory of the ring of work tiles
# {(consumer warpgroups, CTAs per SM): (registers of a consumer thread, registers of a producer thread)}
REGISTERS = {(1, 2): (208, 48), (1, 3): (120, 40), (2, 1): (232, 40)}


@dataclass(frozen=True)
class Fp8Fp4GemmFewRowsConfig:
    """A work tile and its pipeline.

    groups    consumer warpgroups, with 64 weight rows each
    rows      rows of the product per work tile: 8, 16 or 32
    stages    stages of the ring, 512 channels each
    resident  CTAs per SM
    """

    groups: int
    rows: int
    stages: int
    resident: int

    @property
    def columns(self) -> int:
        """Weight rows of a work tile, which are columns of the result."""
        return 64 * self.groups

    @property
    def threads(self) -> int:
        return (self.groups + 1) * WARPGROUP

    def ctas(self, multiprocessors: int) -> int:
        return self.resident * multiprocessors

    def fits(self) -> bool:
        """Each resident CTA occupies 1 KiB more than it requests."""
        stage = self.columns * (BOXES * BOX + SCALE_BYTES) + self.rows * BLOCKS * GROUP + (self.rows + 1) * SCALE_BYTES
        barriers = 16 * self.stages + 16 + INFO_BYTES
        others = 4 * (PREFIX_SUMS + 32) + TABLE_BYTES + barriers + self.groups * WARPGROUP * self.rows + 1024
        return self.stages * stage + others <= (SHARED_BYTES + 1024) // self.resident - 1024


# Three CTAs per SM with one consumer warpgroup each balance the few work tiles of a single token best. With many work
# tiles, one CTA with two consumer warpgroups is faster.
CONFIGS = (
    *(Fp8Fp4GemmFewRowsConfig(1, *sizes) for sizes in ((8, 3, 3), (16, 4, 2), (32, 3, 2))),
    *(Fp8Fp4GemmFewRowsConfig(2, *sizes, 1) for sizes in ((8, 5), (16, 5), (32, 4))),
)


class Ring(NamedTuple):
    """Shared-memory addresses in stage 0 of the ring.

    codes       FP4 codes of the weights
    scales      e8m0 scales of the weights
    rows        rows of activations
    row_scales  fp32 scales of the activations' rows (16 bytes per row), then the weights' block scales, one per block
                of the stage
    """

    codes: Int32
    scales: Int32
    rows: Int32
    row_scales: Int32


class StageScales(NamedTuple):
    """The scales of a stage, in registers.

    of_rows    the e8m0 bytes of a lane's two weight rows: [2 * 4] words, one word per row and block
    of_blocks  the block scales as bits of fp32: [4]
    """

    of_rows: cute.Tensor
    of_blocks: cute.Tensor


class Fp8Fp4GemmSmallMSm90:
    def __init__(self, cfg: Fp8Fp4GemmFewRowsConfig):
        self.cfg = cfg
        self.rows, self.columns, self.stages = cfg.rows, cfg.columns, cfg.stages
        self.consumer_warps, self.threads = 4 * cfg.groups, cfg.threads
        # Register buffers for widened blocks: one per block of a stage if there are enough registers.
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
        b_layout = k_major_layout(Uint8, self.columns, BOX, BOXES * self.stages)
        a_layout = k_major_layout(Float8E4M3FN, self.rows, BOX, BLOCKS * self.stages)
        b_atom, b_tma = tile_load(b, b_layout, (self.columns, BOX))

        @cute.struct
        class Storage:
            pipeline: pipeline_storage(self.stages)
            work_tiles: work_tile_storage(WorkTileInfo)
            tiles: tiles_storage(grouped=True)
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
        warp, lane = warp_and_lane()
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        pipeline = Pipeline.of(storage.pipeline, self.stages)
        work_tiles = WorkTilePipeline.of(storage.work_tiles, WorkTileInfo)
        sb = storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        sa = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        across = cute.ceil_div(out.shape[1], self.columns)
        tiles = tiles_of_matrices(storage.tiles, ends, out.shape[0], across, self.rows, self.columns)
        tables = Int32(storage.tables.data_ptr().toint())
        places = storage.b, storage.scales, storage.a, storage.row_scales
        ring = Ring(*(Int32(place.data_ptr().toint()) for place in places))

        if warp == self.consumer_warps:
            cute.nvgpu.cpasync.prefetch_descriptor(b_atom)
        if tid == 0:
            # Per stage, one arrival announces the bytes of the codes, and one per producer lane is for its copies.
            pipeline.init(consumers=self.consumer_warps, producers=1 + (1 + GATHER_WARPS) * WARP)
            work_tiles.init(consumers=self.consumer_warps + GATHER_WARPS)
        cute.arch.mbarrier_init_fence()
        if tid < WARP:
            tiles.clear(tid)
            write_tables(tables, lane)
        cute.arch.sync_threads()
        wait_for_prerequisite_grids()
        total = tiles.count(self.threads, tid, lane, warp)

        consumer_registers, producer_registers = REGISTERS[self.cfg.groups, self.cfg.resident]
        if warp >= self.consumer_warps:
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp == self.consumer_warps:
                self.load_weights(b_atom, mb, b_scale_32, b_scale, tiles, total, sb, ring, pipeline, work_tiles, lane)
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
        """The role of the first producer warp: pass the work tiles to the other warps, and load the weights and their
        scales."""
        scheduler = static_persistent_scheduler()
        state, tile_state, e = start(), start(), Int32(0)
        columns = b_scale_32.shape[1]
        pitch = Int64(b_scale_32.stride[1])
        for index in cutlass.range(scheduler.first, total, scheduler.step, unroll=1):
            info = tiles.rows_first(index, e, lane)
            tile_state = work_tiles.publish(tile_state, info)
            e, column = info.matrix, info.column
            tbs, tbg = tiles_of(b_atom, sb, mb, (self.columns, BOX), e * columns + column)
            # Weight rows past the matrix's last row give results that are not stored, so their scales may have any
            # value.
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
        """The mainloop of gathering warp `number`. It copies every third row of the work tile, from row `number` on.
        Gathering warp 0 also copies the scales of all rows."""
        scheduler = static_persistent_scheduler()
        state, tile_state = start(), start()
        sources, channels = a.shape
        place = ordered_place(lane)
        chunk, word = place // 4, place % 4
        for _ in cutlass.range(scheduler.first, total, scheduler.step, unroll=1):
            info = work_tiles.current(tile_state)
            tile_state = work_tiles.release(tile_state)
            row, end = info.row, info.end
            count = cutlass.min(end - row, self.rows)
            own = cutlass.min(row + lane, end - 1)
            if rows.shape[0] > 0:
                own = rows[own]
            # Clamp the index, so that no value in `rows` causes a read outside `a`.
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
        """The mainloop of a consumer warp. No branch with a wgmma depends on the warp, because each wgmma needs all
        warps of the warpgroup."""
        mma = tiled_mma(1, 64, self.rows, a_in_registers=True)
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
        state, tile_state = start(), start()
        if scheduler.first < total:
            self.await_stage(scales, ring, pipeline, state, warp, lane)
            self.widen_block(0, widened[0], scales, ring, tables, state, warp, lane)
        for index in cutlass.range(scheduler.first, total, scheduler.step, unroll=1):
            info = work_tiles.current(tile_state)
            tile_state = work_tiles.release(tile_state)
            row, end = info.row, info.end
            sums.fill(0.0)
            factors.fill(1.0)
            if weights.shape[0] > 0:
                for i in cutlass.range_constexpr(self.rows // 4):
                    factors[i] = weights[cutlass.min(row + i // 2 * 8 + own_row + i % 2, end - 1)]
            for group in cutlass.range(groups, unroll=1):
                # After the CTA's last stage, `add_stage` widens that stage's first block again. The result is not used.
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
            store_swap_ab(sums, out, row, rows_end, info.column + warp * OWN_ROWS, staged, lane)

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
        """Multiply the four blocks of stage `state`, scale the products and add them to `sums`. The caller has widened
        the first block. Meanwhile wait for stage `following`, load its scales and widen its first block."""
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
                # Wait for the wgmma that read the next block's buffer.
                cute.nvgpu.warpgroup.wait_group(self.buffers - 1)
            at, after = (following, 0) if block == BLOCKS - 1 else (state, block + 1)
            self.widen_block(after, widened[after % self.buffers], scales, ring, tables, at, warp, lane)
        cute.nvgpu.warpgroup.wait_group(0)
        cute.arch.sync_warp()
        pipeline.consumer_release(state)
        for block in cutlass.range_constexpr(BLOCKS):
            add_scaled(sums, acc[block], [x[block].bitcast(Float32) * of_blocks[block] for x in of_rows])

    @cute.jit
    def await_stage(self, scales: StageScales, ring: Ring, pipeline: Pipeline, state: PipelineState, warp, lane):
        pipeline.consumer_wait(state)
        # cp.async wrote the activations through the generic proxy, but wgmma reads them through the async proxy.
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
        # One ldmatrix loads two adjacent 16-byte vectors of each of the warp's 16 rows.
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
    """-> f(a [A, K] e4m3, a_scale [A, G] fp32, rows [M] int32, or [0] if every row m of the product uses row m of `a`,
    b [E * N, K / 2] uint8, b_scale_32 [E, N, 4 G] uint8, b_scale [E, ceil(N / 128), G] fp32, ends [E] int32 ascending,
    weights [M] fp32, or [0] for none, out [M, N] out_dtype, ctas).

    E up to 1024, A and M up to 2^27; E, A, M, N, K > 0. K is a multiple of 128, N of 8. G is K / 128, rounded up to a
    multiple of 4. The padding of a_scale and b_scale must be finite; that of b_scale_32 may be any bytes. Rows of all
    tensors with two or more dimensions are aligned to 16 bytes. ctas: config.ctas(multiprocessors).
    """
    sources, rows, columns, channels, matrices = (cute.sym_int() for _ in range(5))
    blocks = cute.sym_int(divisibility=BLOCKS)
    return compile_sm90(
        Fp8Fp4GemmSmallMSm90(config),
        fake_rows(Float8E4M3FN, sources, channels),
        fake_rows(Float32, sources, blocks),
        fake_contiguous(Int32, cute.sym_int()),
        fake_rows(Uint8, cute.sym_int(), cute.sym_int()),
        fake_rows(Uint8, matrices, columns, cute.sym_int()),
        fake_rows(Float32, matrices, cute.sym_int(), blocks),
        fake_contiguous(Int32, matrices),
        fake_contiguous(Float32, cute.sym_int()),
        fake_rows(cute_dtype(out_dtype), rows, columns),
        *(Int32(1), fake_stream()),
    )


def choose_config(rows: int, columns: int, matrices: int, multiprocessors: int) -> Fp8Fp4GemmFewRowsConfig:
    """Return the configuration with which the busiest SM loads the fewest bytes, if each row belongs to a random
    matrix. `rows` is the number of rows of all matrices together. The number of channels does not matter, since it is
    the same for all work tiles."""

    def loaded(config: Fp8Fp4GemmFewRowsConfig) -> float:
        tiles = matrices * expected_tiles(rows, matrices, config.rows) * -(-columns // config.columns)
        return math.ceil(tiles / multiprocessors) * (config.columns * (GROUP // 2 + 4) + config.rows * GROUP)

    return min(CONFIGS, key=loaded)


def shipped_variants() -> Variants:
    return [(compile_fp8_fp4_gemm_few_rows, (dtype, config)) for dtype in OUT_DTYPES for config in CONFIGS]
