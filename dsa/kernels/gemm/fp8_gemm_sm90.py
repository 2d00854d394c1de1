"""Products with one block-scaled FP8 matrix or several:
out[m, n] = weights[m] * sum_g (sum_{k in block g} a[r, k] b[e, n, k]) * a_scale[r, g] * b_scale[e, n // 128, g],
where e is the matrix of row m, block g is 128 channels, and r = rows[m]. Without `rows`, r = m; without `weights`, the
factor weights[m] is 1. With the SwiGLU epilogue (swiglu_epilogue.py), the kernel stores SwiGLU of the sums, cast to
FP8, instead of the sums.

Plan
- A work tile has rows of one matrix only (grouped_tiles.py). To find its tile, a CTA must first count the tiles of all
  matrices, which takes 0.6 us before the first load; a product with one matrix skips that. A tile can load rows past
  its matrix's last row. These rows are not stored, and a warpgroup does not multiply 64 rows that are all past the last
  row. If scheduling is dynamic and tiles are not 192 wide, a tile with up to 32 rows of the matrix swaps A/B
  (swap_ab_tile.py). A kernel that can swap A/B loads a box (64 rows of `a`) only if at least one of the rows belongs to
  the matrix.
- Warp roles: a producer warpgroup, and one or two consumer warpgroups. The first producer warp finds the work tiles,
  passes them to the warps that work on them, and loads by TMA. If `rows` selects the rows of `a`, TMA loads only `b`
  and its scales, and all four producer warps gather `a` and its scales by cp.async, 16 bytes per lane; otherwise three
  producer warps do nothing. A consumer warpgroup computes 64 rows of a work tile, or 64 rows in each of two waves; if
  A/B are swapped, it computes 64 columns of the work tile, or with SwiGLU 64 columns of gate and 64 of up.
- Pipeline: a ring of STAGES stages; a stage is a block of 128 channels of a and of b. The ring continues across work
  tiles. Scales are loaded for four blocks at a time, with every fourth block: four scales of a row are 16 contiguous
  bytes, while a load of a single scale would use only an eighth of a 32-byte sector.
- Mainloop: per block of 128 channels, four wgmma into fresh accumulators. Their products are scaled and added in fp32.
  Meanwhile the other consumer warpgroup, if there is one, uses the tensor cores. The tensor cores' accumulation keeps
  about 14 bits, so it is limited to 128 channels.
- For many rows, work tiles are 256 x 128, 128 x 192 or 128 x 128. For 256 x 128, a warpgroup has registers for the sums
  of 128 x 128 and the products of 64 x 128, so it multiplies its 128 rows in two waves. With SwiGLU a work tile is 64
  or 128 rows by 128 columns of gate and 128 of up: two parts, which are multiplied one after the other. For few rows,
  work tiles are narrow, so that there are enough of them to keep all SMs loading weights. Tiles of 48, 96 or 192
  columns can straddle two scale blocks of b. The order of a sum is the same for all tiles, so the bits are equal.
- Epilogue: 16-bit results pass through shared memory (result_epilogue.py); fp32 results are stored from registers. If
  the tile's columns are a multiple of 64, and a warp has shared memory for all results that it computes in a tile, TMA
  stores them while the next work tile is multiplied. Otherwise the warps store them: for 256 x 128, the stages leave
  too little shared memory.
- Scheduler: static persistent, or dynamic for several matrices with many rows, because their work tiles take different
  times (grouped_tiles.py). Kernels that gather rows are always static.
Shared memory: barriers; prefix sums with several matrices; scales; per consumer warp CHUNKS x 2 KiB of results;
STAGES x (64 GROUPS WAVES + COLUMNS) x 128 bytes of operands. Names in capitals are fields of Fp8GemmConfig.
Registers: 240 per consumer thread, including COLUMNS / 2 sums per wave and 48 to 96 accumulators; 24 per producer
thread. A gathering producer thread has 40 with two consumer warpgroups, which leaves 232 for a consumer thread; with
one consumer warpgroup it has 56.
Roofline: many rows are bound by the tensor cores and the multiply-adds, which compete for the registers: 1024 + 256
cycles per block of channels of a 256 x 128 tile. Shared memory (128 bytes per cycle) is busy for 1152 of these 1280
cycles. Few rows are bound by memory: b is read once.
"""

import itertools
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, const_expr

from dsa.cute.copies import arrive_when_gathered, gather_16, tile_load
from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake, fake_contiguous, fake_rows, fake_stream, strides
from dsa.cute.pipeline import Pipeline, pipeline_storage, start
from dsa.cute.sm90 import REGISTERS, WARP, WARPGROUP, warp_and_lane
from dsa.cute.tile_counter import fake_tile_counter
from dsa.cute.wgmma import k_major_layout, multiply
from dsa.cute.work_tile import WorkTilePipeline, static_persistent_scheduler, work_tile_storage
from dsa.kernels.gemm.fp8_gemm_config import (
    CONFIGS,
    DYNAMIC_CONFIGS,
    GATHERING_CONFIGS,
    ONE_MATRIX_CONFIGS,
    SCALES,
    SWAP_AB_CONFIGS,
    SWAP_AB_COUNTS,
    SWAP_AB_ROWS,
    SWIGLU_CONFIGS,
    WARP_ROWS,
    Fp8GemmConfig,
)
from dsa.kernels.gemm.grouped_tiles import WorkTileInfo, next_index, tiles_of_matrices, tiles_storage
from dsa.kernels.gemm.limits import GROUP, OUT_DTYPES
from dsa.kernels.gemm.operand_loads import scales_of, tiled_mma, tiles_of
from dsa.kernels.gemm.result_epilogue import LateResultEpilogue, ResultEpilogue
from dsa.kernels.gemm.swap_ab_tile import load_floats, swap_ab_blocks
from dsa.kernels.gemm.swiglu_epilogue import SwigluEpilogue
from dsa.runtime.compile_cache import Variants, cached, compile_sm90

SCALE_BYTES = 4 * SCALES
# Number of scale blocks of b that a work tile loads: the block of the tile's first column and the block after it. With
# SwiGLU, they are the block of gate and the block of up.
SCALE_BLOCKS = 2
LOADING_REGISTERS = 240, 24  # per consumer and per producer thread, if TMA loads `a`
VECTORS = GROUP // 16  # lanes that gather one block of a row
BOX_ROWS = 64  # rows of `a` per TMA load (a box), in kernels that skip boxes without rows of the matrix


class Fp8GemmSm90:
    """gathered: `rows` selects the rows of `a`. swap_ab: work tiles with up to SWAP_AB_ROWS rows swap A/B."""

    def __init__(
        self, config: Fp8GemmConfig, gathered: bool, epilogue: ResultEpilogue | SwigluEpilogue, swap_ab: bool = False
    ):
        self.config, self.gathered, self.epilogue, self.swap_ab = config, gathered, epilogue, swap_ab
        self.rows, self.columns, self.stages = config.rows, config.columns, config.stages
        self.groups, self.waves, self.parts = config.groups, config.waves, epilogue.parts
        self.width = self.columns // self.parts
        self.piece = config.piece
        self.consumer_warps = 4 * config.groups
        # Rows of `a` per TMA load (a box).
        self.box_rows = BOX_ROWS if swap_ab else self.rows
        self.boxes = self.rows // self.box_rows
        self.registers = LOADING_REGISTERS
        if gathered:
            # With one consumer warpgroup, more registers are left for the warps that gather.
            self.registers = REGISTERS[2] if config.groups == 2 else (240, 56)

    def layouts(self):
        slots = self.config.scale_slots
        return (
            k_major_layout(Float8E4M3FN, self.rows, GROUP, self.stages),
            k_major_layout(Float8E4M3FN, self.columns, GROUP, self.stages),
            cute.make_layout((self.rows, SCALES, slots), stride=(SCALES, 1, self.rows * SCALES)),
            # Slots are aligned to 128 bytes, as TMA requires.
            cute.make_layout((1, SCALES, SCALE_BLOCKS * slots), stride=(SCALES, 1, 32)),
        )

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        a_scale: cute.Tensor,
        rows: cute.Tensor | None,
        b: cute.Tensor,
        b_scale: cute.Tensor,
        ends: cute.Tensor | None,
        out: cute.Tensor,
        of_rows: cute.Tensor | None,
        limit: Float32 | None,
        counter: cute.Tensor | None,
        ctas: Int32,
        stream,
    ):
        results = out, of_rows, limit
        a_layout, b_layout, as_layout, bs_layout = self.layouts()
        # A stage contains the rows of b of all parts, one part after the other. One TMA load is one part.
        b_box = k_major_layout(Float8E4M3FN, self.width, GROUP, 1)
        loads = [tile_load(b, b_box, (self.width, GROUP)), tile_load(b_scale, bs_layout, (1, SCALES))]
        if const_expr(not self.gathered):
            a_box = k_major_layout(Float8E4M3FN, self.box_rows, GROUP, 1)
            loads += [tile_load(a, a_box, (self.box_rows, GROUP)), tile_load(a_scale, as_layout, (self.rows, SCALES))]
        stores = self.epilogue.tma_stores(results)

        @cute.struct
        class Storage:
            pipeline: pipeline_storage(self.stages)
            work_tiles: work_tile_storage(WorkTileInfo)
            tiles: tiles_storage(ends is not None)
            a_scale: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(as_layout)], 128]
            b_scale: cute.struct.Align[cute.struct.MemRange[Float32, SCALE_BLOCKS * self.config.scale_slots * 32], 128]
            staged: cute.struct.Align[
                cute.struct.MemRange[Int32, self.consumer_warps * self.epilogue.warp_bytes // 4], 1024
            ]
            a: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(a_layout)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(b_layout)], 1024]

        self.storage = Storage
        self.kernel(
            *(a, a_scale, rows, loads, ends, results, stores, counter),
            *(out.shape[0], a_layout, b_layout, as_layout, bs_layout),
        ).launch(grid=(ctas, 1, 1), block=(self.config.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True)

    @cute.kernel
    def kernel(
        self,
        a: cute.Tensor,
        a_scale: cute.Tensor,
        rows: cute.Tensor | None,
        loads,
        ends: cute.Tensor | None,
        results,
        stores,
        counter: cute.Tensor | None,
        count: Int32,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        as_layout: cute.Layout,
        bs_layout: cute.Layout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = warp_and_lane()
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        pipeline = Pipeline.of(storage.pipeline, self.stages)
        work_tiles = WorkTilePipeline.of(storage.work_tiles, WorkTileInfo)
        sa = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        sb = storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        sas, sbs = storage.a_scale.get_tensor(as_layout), storage.b_scale.get_tensor(bs_layout)
        across = cute.ceil_div(results[0].shape[1], self.epilogue.tile_columns)
        scheduler = static_persistent_scheduler()
        tiles = tiles_of_matrices(storage.tiles, ends, count, across, self.rows, self.epilogue.tile_columns)

        if warp == self.consumer_warps:
            for atom, _ in loads:
                cute.nvgpu.cpasync.prefetch_descriptor(atom)
        if tid == 0:
            producers = 1 + WARPGROUP if const_expr(self.gathered) else 1
            pipeline.init(consumers=self.consumer_warps, producers=producers)
            work_tiles.init(consumers=self.consumer_warps + (3 if const_expr(self.gathered) else 0))
        cute.arch.mbarrier_init_fence()
        if tid < WARP:
            tiles.clear(tid)
        cute.arch.sync_threads()
        wait_for_prerequisite_grids()
        total = tiles.count(self.config.threads, tid, lane, warp)

        blocks, memory = a_scale.shape[1], (sa, sas, sb, sbs)
        if warp >= self.consumer_warps:
            cute.arch.setmaxregister_decrease(self.registers[1])
            gather = a, a_scale, rows, tid - 32 * self.consumer_warps
            if warp == self.consumer_warps:
                self.produce(
                    loads, gather, scheduler, counter, tiles, total, blocks, memory, pipeline, work_tiles, lane
                )
            elif const_expr(self.gathered):
                self.gather_only(gather, blocks, sa, sas, pipeline, work_tiles)
        else:
            cute.arch.setmaxregister_increase(self.registers[0])
            staged = storage.staged.data_ptr().toint() + warp * self.epilogue.warp_bytes
            self.consume(results, stores, blocks, memory, staged, pipeline, work_tiles, warp, lane)

    @cute.jit
    def produce(self, loads, gather, scheduler, counter, tiles, total, blocks, memory, pipeline, work_tiles, lane):
        """The role of the first producer warp: pass the work tiles to the other warps, and load their operands."""
        (b_atom, mb), (bs_atom, mbs) = loads[:2]
        sa, sas, sb, sbs = memory
        targets = [cute.local_tile(sb, (self.width, GROUP, self.stages), (i, 0, 0)) for i in range(self.parts)]
        state, tile_state, slot = start(), start(), Int32(0)
        b_rows = mb.shape[0] // tiles.matrices
        size, of_scales = self.columns * GROUP, SCALE_BLOCKS * SCALE_BYTES
        if const_expr(not self.gathered):
            size, of_scales = size + self.box_rows * GROUP, of_scales + self.rows * SCALE_BYTES
        index = scheduler.first
        info = tiles.at(index, Int32(0), total, lane)
        while info.end > 0:
            e = info.matrix
            tile_state = work_tiles.publish(tile_state, info)
            columns = self.epilogue.columns_of_parts(info.column, b_rows)
            of_b = [
                tiles_of(b_atom, target, mb, (self.width, GROUP), e * b_rows + c) for target, c in zip(targets, columns)
            ]
            scale_rows = self.epilogue.scale_blocks(info.column, b_rows)
            of_bs = [scales_of(bs_atom, sbs, mbs, c, e) for c in scale_rows]
            if const_expr(self.gathered):
                sources = self.sources(gather, info)
            else:
                (a_atom, ma), (as_atom, mas) = loads[2:]
                boxes = [cute.local_tile(sa, (self.box_rows, GROUP, self.stages), (j, 0, 0)) for j in range(self.boxes)]
                of_a = [
                    tiles_of(a_atom, box, ma, (self.box_rows, GROUP), info.row + j * self.box_rows)
                    for j, box in enumerate(boxes)
                ]
                # Boxes with rows of the matrix.
                used = Int32(1)
                if const_expr(self.swap_ab):
                    used = cutlass.min(cute.ceil_div(info.end - info.row, self.box_rows), self.boxes)
                tass, tasg = tiles_of(as_atom, sas, mas, (self.rows, SCALES), info.row)
            # If this warp gathers rows of `a`, it lacks the registers to keep the next tile during the mainloop. So it
            # finds that tile after the last group, not after the first.
            following = info
            for group in cutlass.range(blocks // SCALES, unroll=1):
                for i in cutlass.range_constexpr(SCALES):
                    block = group * SCALES + i
                    more = (used - 1) * (self.box_rows * GROUP) if const_expr(self.swap_ab) else 0
                    pipeline.producer_acquire(state, size + more + (of_scales if const_expr(i == 0) else 0))
                    full = pipeline.producer_barrier(state)
                    if const_expr(i == 0):
                        for j in cutlass.range_constexpr(SCALE_BLOCKS):
                            shared, place = of_bs[j]
                            cute.copy(
                                bs_atom, place[None, group], shared[None, slot * SCALE_BLOCKS + j], tma_bar_ptr=full
                            )
                    for j in cutlass.range_constexpr(self.parts):
                        shared, place = of_b[j]
                        cute.copy(b_atom, place[None, block], shared[None, state.stage], tma_bar_ptr=full)
                    if const_expr(self.gathered):
                        self.gather_block(gather, sources, sa, sas, block, group, i == 0, slot, state.stage)
                        arrive_when_gathered(full)
                    else:
                        if const_expr(i == 0):
                            cute.copy(as_atom, tasg[None, group], tass[None, slot], tma_bar_ptr=full)
                        for j in cutlass.range_constexpr(self.boxes):
                            shared, place = of_a[j]
                            if const_expr(j == 0):
                                cute.copy(a_atom, place[None, block], shared[None, state.stage], tma_bar_ptr=full)
                            else:
                                if j < used:
                                    cute.copy(a_atom, place[None, block], shared[None, state.stage], tma_bar_ptr=full)
                    state = pipeline.advance(state)
                slot = 0 if slot == self.config.scale_slots - 1 else slot + 1
                if const_expr(not self.gathered):
                    if group == 0:
                        # Find the next tile while the stages are full, so that its first loads do not wait for the
                        # search.
                        index = next_index(index, scheduler.step, counter, lane)
                        following = tiles.at(index, e, total, lane)
            if const_expr(self.gathered):
                index = next_index(index, scheduler.step, counter, lane)
                following = tiles.at(index, e, total, lane)
            info = following
        work_tiles.publish(tile_state, WorkTileInfo.last())

    @cute.jit
    def gather_only(self, gather, blocks, sa, sas, pipeline: Pipeline, work_tiles: WorkTilePipeline):
        """The role of the second to fourth producer warps if rows are gathered."""
        state, tile_state, slot = start(), start(), Int32(0)
        info = work_tiles.current(tile_state)
        while info.end > 0:
            tile_state = work_tiles.release(tile_state)
            sources = self.sources(gather, info)
            for group in cutlass.range(blocks // SCALES, unroll=1):
                for i in cutlass.range_constexpr(SCALES):
                    pipeline.producer_wait(state)
                    self.gather_block(gather, sources, sa, sas, group * SCALES + i, group, i == 0, slot, state.stage)
                    arrive_when_gathered(pipeline.producer_barrier(state))
                    state = pipeline.advance(state)
                slot = 0 if slot == self.config.scale_slots - 1 else slot + 1
            info = work_tiles.current(tile_state)

    @cute.jit
    def sources(self, gather, info: WorkTileInfo):
        """Return the indices in `a` of the rows that this thread gathers; a negative index means no row. Entry i is for
        row thread // 8 + 16 i of the work tile. The thread gathers 16 bytes of this row per block. The last entry is
        for row `thread`, whose scales it gathers."""
        a, _, rows, thread = gather
        found = []
        for i in cutlass.range_constexpr(self.rows // 16 + 1):
            row = info.row + (thread if const_expr(i == self.rows // 16) else thread // VECTORS + 16 * i)
            source = Int32(-1)
            if row < info.end:
                source = rows[row]
                # An index past the last row of `a` means no row, as a negative index does.
                source = source if source < a.shape[0] else Int32(-1)
            found.append(source)
        return found

    @cute.jit
    def gather_block(self, gather, sources, sa, sas, block, group, scales: cutlass.Constexpr, slot, stage):
        """Copy this thread's part of a block of channels of `a` to a stage. With `scales`, also copy one row's scales
        of the SCALES blocks of group `group` to slot `slot`."""
        a, a_scale, _, thread = gather
        vector, first = thread % VECTORS, thread // VECTORS
        channel = block * GROUP + vector * 16
        inside = channel < a.shape[1]
        start_at = Int64(a.iterator.toint()) + channel
        target = sa.iterator.toint() + stage * (self.rows * GROUP) + first * GROUP + (vector ^ (first % VECTORS)) * 16
        for i in cutlass.range_constexpr(self.rows // 16):
            source = sources[i]
            at = start_at + Int64(cutlass.max(source, 0)) * a.stride[0]
            gather_16(Int32(target + i * 16 * GROUP), at, source >= 0 and inside)
        if const_expr(scales):
            source = sources[self.rows // 16]
            at = (
                Int64(a_scale.iterator.toint())
                + (Int64(cutlass.max(source, 0)) * a_scale.stride[0] + group * SCALES) * 4
            )
            if thread < self.rows:
                gather_16(Int32(sas.iterator.toint() + (slot * self.rows + thread) * SCALE_BYTES), at, source >= 0)

    @cute.jit
    def consume(self, results, stores, blocks, memory, staged, pipeline: Pipeline, work_tiles, warp, lane):
        sa, sas, sb, sbs = memory
        mma = tiled_mma(self.groups, 64, self.width)
        # A `group` that the compiler knows to be uniform puts wgmma descriptors into uniform registers.
        group = cute.arch.make_warp_uniform(warp // 4)
        thr_mma = mma.get_slice(group * WARPGROUP)
        high = 64 * self.groups
        waves = [cute.local_tile(sa, (high, GROUP, self.stages), (wave, 0, 0)) for wave in range(self.waves)]
        parts = [cute.local_tile(sb, (self.width, GROUP, self.stages), (i, 0, 0)) for i in range(self.parts)]
        ra = [mma.make_fragment_A(thr_mma.partition_A(wave)) for wave in waves]
        rb = [mma.make_fragment_B(thr_mma.partition_B(part)) for part in parts]
        shape = thr_mma.partition_shape_C((high, self.width))
        acc = [cute.make_rmem_tensor(shape, Float32) for _ in range(self.config.together)]
        # A product is a wave, or with SwiGLU a part.
        sums = [cute.make_rmem_tensor((self.width // 2,), Float32) for _ in range(self.waves * self.parts)]
        operands = acc, ra, rb
        scales = sas.iterator.toint() + (warp * WARP_ROWS + (lane >> 2)) * SCALE_BYTES, sbs.iterator.toint()
        state, tile_state, slot = start(), start(), Int32(0)
        info = work_tiles.current(tile_state)
        while info.end > 0:
            tile_state = work_tiles.release(tile_state)
            own = operands, sums, scales
            if const_expr(self.swap_ab):
                if info.end - info.row <= SWAP_AB_ROWS:
                    state, slot = self.swap_ab_tile(
                        *(info, results, memory, blocks, staged, pipeline, state, slot, group, warp, lane)
                    )
                else:
                    state, slot = self.tile(
                        *(info, results, stores, own, blocks, staged, pipeline, state, slot, group, warp, lane)
                    )
            else:
                state, slot = self.tile(
                    *(info, results, stores, own, blocks, staged, pipeline, state, slot, group, warp, lane)
                )
            info = work_tiles.current(tile_state)
        self.epilogue.finish()

    @cute.jit
    def tile(self, info, results, stores, own, blocks, staged, pipeline: Pipeline, state, slot, group, warp, lane):
        """Compute and store a work tile. -> (pipeline state, scale slot) after it."""
        operands, sums, scales = own
        high = 64 * self.groups
        in_next_block = self.epilogue.pieces_in_next_block(info.column)
        left = info.end - info.row - group * 64
        if left > high * (self.waves - 1):
            for product in cutlass.range_constexpr(self.waves * self.parts):
                sums[product].fill(0.0)
            for _ in cutlass.range(blocks // SCALES, unroll=1):
                state, slot = self.four_blocks(len(sums), operands, sums, scales, in_next_block, pipeline, state, slot)
            for wave in cutlass.range_constexpr(self.waves):
                row = info.row + wave * high + warp * WARP_ROWS
                of_wave = sums[wave * self.parts : (wave + 1) * self.parts]
                self.epilogue.store(of_wave, results, stores, info, row, staged, lane)
        elif left > 0:
            if const_expr(self.waves > 1):
                # The second wave has no rows of the matrix.
                sums[0].fill(0.0)
                for _ in cutlass.range(blocks // SCALES, unroll=1):
                    state, slot = self.four_blocks(1, operands, sums, scales, in_next_block, pipeline, state, slot)
                self.epilogue.store(sums[:1], results, stores, info, info.row + warp * WARP_ROWS, staged, lane)
        else:
            for _ in cutlass.range(blocks, unroll=1):
                pipeline.consumer_wait(state)
                pipeline.consumer_release(state)
                state = pipeline.advance(state)
            slot = (slot + blocks // SCALES) % self.config.scale_slots
        return state, slot

    @cute.jit
    def swap_ab_tile(self, info, results, memory, blocks, staged, pipeline: Pipeline, state, slot, group, warp, lane):
        """Like `tile`, for a work tile of up to SWAP_AB_ROWS rows that swaps A/B."""
        sa, sas, sb, sbs = memory
        count = info.end - info.row
        operands = sa, sb, group
        scales = sas.iterator.toint() + lane % 4 * 2 * SCALE_BYTES, sbs.iterator.toint()
        sizes = self.rows * SCALE_BYTES, SCALE_BLOCKS * 128, 128
        for i in cutlass.range_constexpr(len(SWAP_AB_COUNTS)):
            least, most = (0, *SWAP_AB_COUNTS)[i], SWAP_AB_COUNTS[i]
            if count > least and count <= most:
                sums = [cute.make_rmem_tensor((most // 2,), Float32) for _ in range(self.parts)]
                state, slot = swap_ab_blocks(
                    *(most, sums, operands, (*scales, *sizes), blocks, self.config.scale_slots, pipeline, state, slot)
                )
                self.epilogue.store_swap_ab(sums, results, info, staged, warp, lane)
        return state, slot

    @cute.jit
    def four_blocks(
        self, products: cutlass.Constexpr, operands, sums, scales, in_next_block, pipeline: Pipeline, state, slot
    ):
        """Compute the first `products` products over SCALES blocks of channels, and add them to `sums`. Return the
        pipeline state and the scale slot after these blocks."""
        acc, ra, rb = operands
        # `multiply` sets a field of the wgmma object. An object that one branch changed cannot be used in another, so
        # each call makes an object.
        mma = tiled_mma(self.groups, 64, self.width)
        together = self.config.together
        # For each product: (its wave of rows of `a`, its part of `b`).
        pairs = [(i // self.parts, i % self.parts) for i in range(products)]
        of_rows, of_columns = None, None
        for first in cutlass.range_constexpr(0, SCALES, together):
            states = []
            for i in cutlass.range_constexpr(together):
                pipeline.consumer_wait(state)
                if const_expr(self.gathered):
                    # cp.async wrote the rows of a through the generic proxy, but wgmma reads them through the async
                    # proxy.
                    cute.arch.fence_proxy("async.shared", space="cta")
                if const_expr(first + i == 0):
                    at = scales[0] + slot * (self.rows * SCALE_BYTES)
                    halves = [64 * self.groups * wave + 8 * half for wave in range(pairs[-1][0] + 1) for half in (0, 1)]
                    of_rows = [load_floats(at + row * SCALE_BYTES) for row in halves]
                    at = scales[1] + slot * (SCALE_BLOCKS * 128)
                    of_columns = [load_floats(at + 128 * j) for j in range(SCALE_BLOCKS if GROUP % self.columns else 1)]
                multiply(mma, acc[i], ra[0], rb[0], state.stage, state.stage)
                states.append(state)
                state = pipeline.advance(state)
            for i in cutlass.range_constexpr(together):
                for product in cutlass.range_constexpr(products):
                    wave, part_of_b = pairs[product]
                    if const_expr(product > 0):
                        multiply(mma, acc[i], ra[wave], rb[part_of_b], states[i].stage, states[i].stage)
                    cute.nvgpu.warpgroup.wait_group(together - 1 - i)
                    if const_expr(product == products - 1):
                        if const_expr(first + i == 0):
                            # All lanes must have read the scales, because releasing this stage also frees the slot of
                            # the scales.
                            cute.arch.sync_warp()
                        pipeline.consumer_release(states[i])
                    half_piece = self.piece // 2
                    for j in cutlass.range_constexpr(self.width // self.piece):
                        of = self.epilogue.scale_of(part_of_b, j, [x[first + i] for x in of_columns], in_next_block)
                        both = [of_rows[2 * wave + half][first + i] * of for half in range(2)]
                        multiplied = cute.make_tensor(acc[i].iterator + half_piece * j, cute.make_layout(half_piece))
                        add_scaled(sums[product], half_piece * j, multiplied, *both)
        return state, 0 if slot == self.config.scale_slots - 1 else slot + 1


class Fp8GemmOneMatrixSm90(Fp8GemmSm90):
    @cute.jit
    def __call__(self, a: cute.Tensor, a_scale: cute.Tensor, b: cute.Tensor, b_scale: cute.Tensor, out, ctas, stream):
        tiles = cute.ceil_div(out.shape[0], self.rows) * cute.ceil_div(out.shape[1], self.columns)
        operands = a, a_scale, None, b, b_scale, None
        Fp8GemmSm90.__call__(self, *operands, out, None, None, None, cutlass.min(ctas, tiles), stream)


@cute.jit
def add_scaled(sums, first: cutlass.Constexpr, products, of_row: Float32, of_row_8: Float32):
    """sums[first + i] += products[i] * the scale of the product's row. `products` has pairs of adjacent columns: a pair
    of row r (scale of_row), a pair of row r + 8 (scale of_row_8), again a pair of row r, and so on."""
    for i in cutlass.range_constexpr(cute.size(products)):
        sums[first + i] += products[i] * (of_row_8 if i // 2 % 2 else of_row)


def _operands(gathered: bool, matrices: Any):
    """Return fake a, a_scale, rows (None unless `gathered`), b and b_scale."""
    channels, blocks, rows = cute.sym_int(), cute.sym_int(divisibility=SCALES), cute.sym_int()
    row, matrix = strides(2, SCALES)
    return (
        fake_rows(Float8E4M3FN, rows, channels),
        fake_rows(Float32, rows, blocks),
        fake_contiguous(Int32, cute.sym_int()) if gathered else None,
        fake_rows(Float8E4M3FN, cute.sym_int(), channels),
        fake(Float32, (cute.sym_int(), blocks, matrices), (row, 1, matrix)),
    )


def _grouped_operands(gathered: bool):
    matrices = cute.sym_int()
    return *_operands(gathered, matrices), fake_contiguous(Int32, matrices)


@cached
def compile_fp8_gemm(out_dtype: str, config: Fp8GemmConfig):
    """-> f(a [M, K] e4m3, a_scale [M, G] fp32, b [N, K] e4m3, b_scale [ceil(N / 128), G, 1] fp32, out [M, N] out_dtype,
    ctas), with the rules of `compile_grouped_fp8_gemm`. All rows belong to one matrix. There are at most as many CTAs
    as work tiles."""
    out_type = cute_dtype(out_dtype)
    a, a_scale, _, b, b_scale = _operands(gathered=False, matrices=1)
    return compile_sm90(
        Fp8GemmOneMatrixSm90(config, False, ResultEpilogue(out_type, config, weighted=False)),
        *(a, a_scale, b, b_scale),
        fake_rows(out_type, cute.sym_int(), cute.sym_int()),
        *(Int32(1), fake_stream()),
    )


@cached
def compile_grouped_fp8_gemm(
    out_dtype: str, config: Fp8GemmConfig, gathered: bool = False, weighted: bool = False, dynamic: bool = False
):
    """-> f(a [A, K] e4m3, a_scale [A, G] fp32, rows [M] int32 if `gathered` or None, b [E * N, K] e4m3, b_scale
    [ceil(N / 128), G, E] fp32, ends [E] int32 ascending, out [M, N] out_dtype, weights [M] fp32 if `weighted` or None,
    None (SwiGLU's limit), a tile counter (dsa/cute/tile_counter.py) if `dynamic` or None, ctas).

    E up to 1024, M up to 2^27; M, N, K > 0; A = M unless gathered. K is a multiple of 16, N of 8. G is ceil(K / 128),
    rounded up to a multiple of 4; the padding of the scales must be finite. Dimension G of b_scale is contiguous. Rows
    of all tensors except ends, rows and weights are aligned to 16 bytes. ctas: number of persistent CTAs, one per SM.
    """
    out_type, rows = cute_dtype(out_dtype), cute.sym_int()
    swap_ab = dynamic and config in SWAP_AB_CONFIGS
    epilogue = LateResultEpilogue if swap_ab else ResultEpilogue
    return compile_sm90(
        Fp8GemmSm90(config, gathered, epilogue(out_type, config, weighted), swap_ab),
        *_grouped_operands(gathered),
        fake_rows(out_type, rows, cute.sym_int()),
        fake_contiguous(Float32, rows) if weighted else None,
        None,
        fake_tile_counter() if dynamic else None,
        *(Int32(1), fake_stream()),
    )


@cached
def compile_fp8_gemm_swiglu(
    dtype: str, use_ue8m0: bool, limited: bool, config: Fp8GemmConfig, gathered: bool = False, dynamic: bool = False
):
    """-> f(a, a_scale, rows, b [E * 2 I, K], b_scale [2 I / 128, G, E], ends, q [M, I] e4m3, scale [M, I / 128] fp32,
    limit if `limited` or None, counter if `dynamic` or None, ctas). All other arguments, their dtypes and the rules are
    those of `compile_grouped_fp8_gemm`. dtype: gate, up and h are rounded to it (swiglu_epilogue.py). I and the row
    stride of q are multiples of 128; rows of scale need no alignment."""
    rows = cute.sym_int()
    return compile_sm90(
        Fp8GemmSm90(config, gathered, SwigluEpilogue(cute_dtype(dtype), use_ue8m0), swap_ab=dynamic),
        *_grouped_operands(gathered),
        fake(Float8E4M3FN, (rows, cute.sym_int(divisibility=GROUP)), (*strides(1, GROUP), 1)),
        fake_rows(Float32, rows, cute.sym_int(), align=4),
        Float32(1.0) if limited else None,
        fake_tile_counter() if dynamic else None,
        *(Int32(1), fake_stream()),
    )


def shipped_variants() -> Variants:
    one = [(compile_fp8_gemm, (dtype, config)) for dtype in OUT_DTYPES for config in ONE_MATRIX_CONFIGS]
    both = (False, True)
    # Grouped products: (config, gathered, weighted, dynamic). SwiGLU: (config, gathered, dynamic).
    plain = [(config, False, weighted, False) for config in CONFIGS for weighted in both]
    gathered = [(config, True, weighted, False) for config in GATHERING_CONFIGS for weighted in both]
    dynamic = [(config, False, weighted, True) for config in DYNAMIC_CONFIGS for weighted in both]
    kinds = plain + gathered + dynamic
    products = [(compile_grouped_fp8_gemm, (dtype, *kind)) for dtype in OUT_DTYPES for kind in kinds]
    kinds = [(config, gathered, False) for config in SWIGLU_CONFIGS for gathered in both]
    kinds += [(SWIGLU_CONFIGS[-1], False, True)]
    options = itertools.product(OUT_DTYPES, both, both, kinds)
    swiglus = [(compile_fp8_gemm_swiglu, (*option, *kind)) for *option, kind in options]
    return one + products + swiglus
