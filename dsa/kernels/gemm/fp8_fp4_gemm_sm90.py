"""Grouped product of FP8 activations with FP4 weights, for many rows per weight matrix (prefill):
out[m, n] = weights[m] * sum_g (sum_{k in block g} a[m, k] b8[e, n, k]) * a_scale[m, g] * b_scale[e, n // 128, g],
where e is the matrix of row m, block g is 128 channels, weights[m] is 1 without `weights`, and
b8[e, n, k] = e2m1[e, n, k] * 2^(e8m0[e, n, k // 32] - 127) / b_scale[e, n // 128, k // 128].
b8 is exactly an e4m3 number. The result has the bits of the FP8 product with b8.

Plan
- This is the FP8 product (fp8_gemm_sm90.py) with an additional warpgroup, the converters, which widen a stage's FP4 to
  e4m3 before the consumers multiply it. The mainloop, the order of sums and the epilogue that stores the sums are those
  of that kernel. Work tiles have 128 columns, and never swap A/B.
- Warp roles: one or two consumer warpgroups, with 64 rows per wave; four converter warps; a producer warp, which finds
  the work tiles, passes them to the other warps and loads by TMA. The producer is in a separate warpgroup because of
  registers: with two consumer warpgroups, a consumer thread has 216 registers, a converter thread has 56, and a
  producer thread has 24. A warp that both loads and converts would need more than 56.
- Pipeline: one ring of STAGES stages of 128 channels. Consumers wait for two barriers of a stage: the pipeline's full
  barrier counts the bytes of TMA, and `widened` counts the converter warps. Only consumers release a stage.
- Widening is in place. A converter warp widens 32 of the 128 rows of b in a stage, which are 4 KiB of e4m3; TMA writes
  their codes to the first 2 KiB. The warp widens the last rows first. Before its stores reach the first 2 KiB, it has
  read all codes. So a warp needs no further memory and no barrier with other converter warps.
- The 16 bytes of codes that a lane reads are 32 channels of a row, which share an e8m0 scale. So one table
  (fp4_operand.py) is enough for the four words. Eight lanes read 128 contiguous bytes. Their 16-byte stores go to two
  rows, and TMA's swizzle puts them into different banks.
- All kinds of scales are loaded for four blocks at a time, together with the first of the four blocks. Converters
  compute the offsets of the tables from the scales before they pass that block to the consumers. So when the consumers
  release that block, the converters have read the scales, and the slot of the scales is free, too.
- Scheduler: static persistent. Dynamic scheduling was not faster when measured, since the converters limit the rate.
Shared memory: as for the FP8 product, STAGES x (64 GROUPS WAVES + COLUMNS) x 128 bytes of operands, scales and results.
In addition, the tables, and 16 bytes of e8m0 scales per row of b in each slot of scales.
Registers: see REGISTERS; a consumer thread has 64 accumulators and 64 or 128 sums.
Instructions: a converter lane issues 180 for a block of 128 x 128. 150 of them use the ALU, which takes 300 cycles.
Roofline: 256 x 128 tiles are bound by the tensor cores and the multiply-adds, 1280 cycles per block of channels. Shared
memory, 128 bytes per cycle, is busy for about as long: 768 cycles with wgmma, 320 with TMA and 224 with converters.
"""

import itertools
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint8, const_expr

from dsa.cute.copies import tile_load
from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake, fake_contiguous, fake_rows, fake_stream, strides
from dsa.cute.pipeline import Mbarriers, Pipeline, PipelineState, pipeline_storage, start
from dsa.cute.shared_memory import load_16, store_16
from dsa.cute.sm90 import SHARED_BYTES, WARP, WARPGROUP, warp_and_lane
from dsa.cute.work_tile import WorkTilePipeline, static_persistent_scheduler, work_tile_storage
from dsa.kernels.gemm.fp4_operand import TABLE_BYTES, load_table, table_places_of_blocks, widen, write_tables
from dsa.kernels.gemm.fp8_gemm_config import (
    CHUNK_BYTES,
    SCALES,
    STORE_CLOCKS,
    TMA_STORE_CLOCKS,
    Fp8GemmConfig,
    of_fewest_clocks,
    tile_block_clocks,
)
from dsa.kernels.gemm.fp8_gemm_sm90 import (
    SCALE_BLOCKS,
    SCALE_BYTES,
    Fp8GemmSm90,
    load_floats,
)
from dsa.kernels.gemm.grouped_tiles import PREFIX_SUMS, GroupedTiles, WorkTileInfo, tiles_of_matrices, tiles_storage
from dsa.kernels.gemm.limits import GROUP, OUT_DTYPES
from dsa.kernels.gemm.operand_loads import scales_of, tiles_of
from dsa.kernels.gemm.result_epilogue import LateResultEpilogue, ResultEpilogue
from dsa.runtime.compile_cache import Variants, cached, compile_sm90

CODE_BYTES = GROUP // 2  # per row and block
CONVERTERS = 4  # converter warps
OWN_ROWS = 32  # rows of b per converter warp
OWN_BYTES = OWN_ROWS * GROUP  # e4m3 bytes of these rows per block
UNITS = CODE_BYTES // 16  # groups of 32 channels per row and block
UNIT_ROWS = WARP // UNITS  # rows that a warp reads at a time
# {consumer warpgroups: (registers of a consumer thread, of a converter thread, of a thread of the producer's
# warpgroup)}. setmaxregister redistributes the registers after the launch.
REGISTERS = {1: (240, 104, 40), 2: (216, 56, 24)}
# The cost model. BLOCK_CLOCKS: overhead of a block, in cycles. WIDEN_CLOCKS: cycles to widen 128 columns of a block.
# WIDEN_MOVES: cycles in which shared memory transfers the codes, tables and e4m3 numbers of a block.
BLOCK_CLOCKS, WIDEN_CLOCKS, WIDEN_MOVES = 120, 450, 224


@dataclass(frozen=True)
class Fp8Fp4GemmConfig(Fp8GemmConfig):
    @property
    def threads(self) -> int:
        return (self.groups + 2) * WARPGROUP

    def fits(self) -> bool:
        loaded = self.stages * (self.rows + self.columns) * GROUP
        scales = self.scale_slots * ((self.rows + self.columns) * SCALES * 4 + 256)
        staged = 4 * self.groups * self.chunks * CHUNK_BYTES
        others = 4 * (PREFIX_SUMS + 32) + TABLE_BYTES + 24 * self.stages + 256 + 2 * 1024
        return loaded + scales + staged + others <= SHARED_BYTES


CONFIGS = (Fp8Fp4GemmConfig(1, 1, 128, 8, 2), Fp8Fp4GemmConfig(2, 1, 128, 5, 2), Fp8Fp4GemmConfig(2, 2, 128, 4, 1))


@dataclass(frozen=True)
class WidenedPipeline(Pipeline):
    widened: Mbarriers | None = None

    @cute.jit
    def consumer_wait(self, state: PipelineState):
        """Wait until the stage is loaded (the full barrier) and widened (the barrier `widened`)."""
        Pipeline.consumer_wait(self, state)
        self.widened.wait(state.phase, state.stage)


class Fp8Fp4GemmSm90(Fp8GemmSm90):
    """epilogue: applies the rows' weights to the sums and stores them."""

    def __init__(self, config: Fp8Fp4GemmConfig, epilogue: ResultEpilogue):
        super().__init__(config, False, epilogue)
        self.registers = REGISTERS[config.groups]

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        a_scale: cute.Tensor,
        b: cute.Tensor,
        b_scale_32: cute.Tensor,
        b_scale: cute.Tensor,
        ends: cute.Tensor,
        out: cute.Tensor,
        of_rows: cute.Tensor | None,
        ctas: Int32,
        stream,
    ):
        results = out, of_rows, None
        a_layout, b_layout, as_layout, bs_layout = self.layouts()
        slots = self.config.scale_slots
        # TMA writes the codes of a converter warp to the first of the warp's OWN_BYTES of b.
        boxes = CONVERTERS * self.stages
        codes_layout = cute.make_layout((OWN_ROWS, CODE_BYTES, boxes), stride=(CODE_BYTES, 1, OWN_BYTES))
        es_layout = cute.make_layout((GROUP, SCALE_BYTES, slots), stride=(SCALE_BYTES, 1, GROUP * SCALE_BYTES))
        loads = [
            tile_load(a, a_layout, (self.rows, GROUP)),
            tile_load(a_scale, as_layout, (self.rows, SCALES)),
            tile_load(b, codes_layout, (OWN_ROWS, CODE_BYTES)),
            tile_load(b_scale_32, es_layout, (GROUP, SCALE_BYTES)),
            tile_load(b_scale, bs_layout, (1, SCALES)),
        ]
        stores = self.epilogue.tma_stores(results)

        @cute.struct
        class Storage:
            pipeline: pipeline_storage(self.stages)
            widened: cute.struct.MemRange[Int64, self.stages]
            work_tiles: work_tile_storage(WorkTileInfo)
            tiles: tiles_storage(grouped=True)
            tables: cute.struct.Align[cute.struct.MemRange[Uint8, TABLE_BYTES], TABLE_BYTES]
            a_scale: cute.struct.Align[cute.struct.MemRange[Float32, cute.cosize(as_layout)], 128]
            b_scale_32: cute.struct.Align[cute.struct.MemRange[Uint8, cute.cosize(es_layout)], 128]
            b_scale: cute.struct.Align[cute.struct.MemRange[Float32, SCALE_BLOCKS * slots * 32], 128]
            staged: cute.struct.Align[
                cute.struct.MemRange[Int32, self.consumer_warps * self.epilogue.warp_bytes // 4], 1024
            ]
            a: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(a_layout)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(b_layout)], 1024]

        self.storage = Storage
        layouts = a_layout, b_layout, codes_layout, as_layout, es_layout, bs_layout
        self.kernel(loads, a_scale.shape[1], ends, results, stores, out.shape[0], layouts).launch(
            grid=(ctas, 1, 1),
            block=(self.config.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        loads,
        blocks: Int32,
        ends: cute.Tensor,
        results,
        stores,
        count: Int32,
        layouts,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = warp_and_lane()
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        pipeline = Pipeline.of(storage.pipeline, self.stages)
        widened = Mbarriers(storage.widened.data_ptr(), self.stages)
        work_tiles = WorkTilePipeline.of(storage.work_tiles, WorkTileInfo)
        a_layout, b_layout, codes_layout, as_layout, es_layout, bs_layout = layouts
        sa = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        sb = storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        codes = cute.make_tensor(cute.recast_ptr(storage.b.data_ptr(), dtype=Uint8), codes_layout)
        sas, ses = storage.a_scale.get_tensor(as_layout), storage.b_scale_32.get_tensor(es_layout)
        sbs = storage.b_scale.get_tensor(bs_layout)
        tables = Int32(storage.tables.data_ptr().toint())
        across = cute.ceil_div(results[0].shape[1], self.epilogue.tile_columns)
        tiles = tiles_of_matrices(storage.tiles, ends, count, across, self.rows, self.epilogue.tile_columns)
        scheduler = static_persistent_scheduler()
        producer = self.consumer_warps + CONVERTERS

        if warp == producer:
            for atom, _ in loads:
                cute.nvgpu.cpasync.prefetch_descriptor(atom)
        if tid == 0:
            pipeline.init(consumers=self.consumer_warps)
            widened.init(arrivals=CONVERTERS)
            work_tiles.init(consumers=self.consumer_warps + CONVERTERS)
        cute.arch.mbarrier_init_fence()
        if tid < WARP:
            tiles.clear(tid)
            write_tables(tables, lane)
        cute.arch.sync_threads()
        wait_for_prerequisite_grids()
        total = tiles.count(self.config.threads, tid, lane, warp)

        if warp >= producer:
            cute.arch.setmaxregister_decrease(self.registers[2])
            if warp == producer:
                shared = sa, sas, codes, ses, sbs
                self.produce_codes(loads, shared, scheduler, tiles, total, blocks, pipeline, work_tiles, lane)
        elif warp >= self.consumer_warps:
            cute.arch.setmaxregister_decrease(self.registers[1])
            memory = [Int32(x.iterator.toint()) for x in (codes, ses, sbs)]
            number = warp - self.consumer_warps
            self.widen_stages(memory, tables, blocks, pipeline, widened, work_tiles, number, lane)
        else:
            cute.arch.setmaxregister_increase(self.registers[0])
            staged = storage.staged.data_ptr().toint() + warp * self.epilogue.warp_bytes
            both = WidenedPipeline(pipeline.full, pipeline.empty, self.stages, Int32(0), widened=widened)
            self.consume(results, stores, blocks, (sa, sas, sb, sbs), staged, both, work_tiles, warp, lane)

    @cute.jit
    def produce_codes(self, loads, shared, scheduler, tiles: GroupedTiles, total, blocks, pipeline, work_tiles, lane):
        """The role of the producer warp: pass the work tiles to the other warps, and load their operands and scales."""
        (a_atom, ma), (as_atom, mas), (b_atom, mb), (es_atom, mes), (bs_atom, mbs) = loads
        sa, sas, codes, ses, sbs = shared
        state, tile_state, slot = start(), start(), Int32(0)
        b_rows = mb.shape[0] // tiles.ends.shape[0]
        size = self.rows * GROUP + self.columns * CODE_BYTES
        of_scales = (self.rows + self.columns + 1) * SCALE_BYTES
        index = scheduler.first
        info = tiles.at(index, Int32(0), total, lane)
        while info.end > 0:
            e = info.matrix
            tile_state = work_tiles.publish(tile_state, info)
            column = e * b_rows + info.column
            begins = [column + OWN_ROWS * i for i in range(CONVERTERS)]
            of_b = [tiles_of(b_atom, codes, mb, (OWN_ROWS, CODE_BYTES), row) for row in begins]
            tess, tesg = tiles_of(es_atom, ses, mes, (GROUP, SCALE_BYTES), column)
            tbss, tbsg = scales_of(bs_atom, sbs, mbs, info.column // GROUP, e)
            tas, tag = tiles_of(a_atom, sa, ma, (self.rows, GROUP), info.row)
            tass, tasg = tiles_of(as_atom, sas, mas, (self.rows, SCALES), info.row)
            following = info
            for group in cutlass.range(blocks // SCALES, unroll=1):
                for i in cutlass.range_constexpr(SCALES):
                    block = group * SCALES + i
                    pipeline.producer_acquire(state, size + (of_scales if const_expr(i == 0) else 0))
                    full = pipeline.producer_barrier(state)
                    if const_expr(i == 0):
                        cute.copy(es_atom, tesg[None, group], tess[None, slot], tma_bar_ptr=full)
                        cute.copy(bs_atom, tbsg[None, group], tbss[None, slot * SCALE_BLOCKS], tma_bar_ptr=full)
                        cute.copy(as_atom, tasg[None, group], tass[None, slot], tma_bar_ptr=full)
                    for j in cutlass.range_constexpr(CONVERTERS):
                        target, place = of_b[j]
                        at = state.stage * CONVERTERS + j
                        cute.copy(b_atom, place[None, block], target[None, at], tma_bar_ptr=full)
                    cute.copy(a_atom, tag[None, block], tas[None, state.stage], tma_bar_ptr=full)
                    state = pipeline.advance(state)
                slot = 0 if slot == self.config.scale_slots - 1 else slot + 1
                if group == 0:
                    # Find the next tile while the stages are full, so that its first loads do not wait for the search.
                    index += scheduler.step
                    following = tiles.at(index, e, total, lane)
            info = following
        work_tiles.publish(tile_state, WorkTileInfo.last())

    @cute.jit
    def widen_stages(
        self, memory, tables, blocks, pipeline: Pipeline, widened: Mbarriers, work_tiles: WorkTilePipeline, number, lane
    ):
        codes, scales, block_scales = memory
        row, unit = lane // UNITS, lane % UNITS
        own = codes + number * OWN_BYTES
        read_at = own + lane * 16
        # A unit is 32 bytes of e4m3. The first 16 go to `write_at`. The swizzle puts the other 16 at `write_at ^ 16`.
        write_at = own + row * GROUP + ((2 * unit) ^ row) * 16
        scales += (number * OWN_ROWS + row) * SCALE_BYTES
        state, tile_state, slot = start(), start(), Int32(0)
        info = work_tiles.current(tile_state)
        while info.end > 0:
            tile_state = work_tiles.release(tile_state)
            for _ in cutlass.range(blocks // SCALES, unroll=1):
                places = None
                for i in cutlass.range_constexpr(SCALES):
                    pipeline.consumer_wait(state)
                    at = scales + slot * (self.columns * SCALE_BYTES), block_scales + slot * (SCALE_BLOCKS * 128)
                    if const_expr(i == 0):
                        places = self.places(*at, unit)
                    offset = state.stage * (self.columns * GROUP)
                    words, table = self.read_unit(read_at + offset, tables, places, UNITS - 1, i)
                    for j in cutlass.range_constexpr(UNITS - 1, -1, -1):
                        own_words, own_table = words, table
                        if const_expr(j > 0):
                            words, table = self.read_unit(read_at + offset, tables, places, j - 1, i)
                        if const_expr(j == 1):
                            # The stores for j = 1 and j = 0 overwrite codes, so all lanes must have read all of the
                            # warp's codes.
                            cute.arch.sync_warp()
                        wide = [word for eight in own_words for word in widen(eight, *own_table)]
                        target = write_at + offset + j * UNIT_ROWS * GROUP
                        store_16(target, wide[:4])
                        store_16(target ^ 16, wide[4:])
                    # The stores went through the generic proxy, but wgmma reads through the async proxy.
                    cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.sync_warp()
                    widened.arrive(state.stage)
                    state = pipeline.advance(state)
                slot = 0 if slot == self.config.scale_slots - 1 else slot + 1
            info = work_tiles.current(tile_state)

    def read_unit(self, address, tables, places, j: int, block: int):
        """-> (four words of this lane's codes in the j-th set of UNIT_ROWS rows, the table for them). block: index of
        the stage's block among SCALES blocks."""
        return load_16(address + j * (WARP * 16)), load_table(tables, places[j], block)

    def places(self, scales, block_scales, unit):
        """Return, for each row that this lane widens, a word: byte i is the table offset of the lane's 32 channels in
        block i."""
        of_blocks = load_floats(block_scales)
        rows = [j * UNIT_ROWS for j in range(UNITS)]
        return [table_places_of_blocks(load_16(scales + r * SCALE_BYTES), unit, of_blocks) for r in rows]


def _operands():
    rows, columns, matrices, blocks = cute.sym_int(), cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=SCALES)
    row, matrix = strides(2, SCALES)
    return (
        fake_rows(Float8E4M3FN, rows, cute.sym_int()),
        fake_rows(Float32, rows, blocks),
        fake_rows(Uint8, columns, cute.sym_int()),
        fake_rows(Uint8, columns, cute.sym_int()),
        fake(Float32, (cute.sym_int(), blocks, matrices), (row, 1, matrix)),
        fake_contiguous(Int32, matrices),
    )


@cached
def compile_fp8_fp4_gemm(out_dtype: str, config: Fp8Fp4GemmConfig, weighted: bool = False):
    """-> f(a [M, K] e4m3, a_scale [M, G] fp32, b [E * N, K / 2] uint8, b_scale_32 [E * N, 4 G] uint8, b_scale
    [ceil(N / 128), G, E] fp32, ends [E] int32 ascending, out [M, N] out_dtype, weights [M] fp32 if `weighted` or None,
    ctas).

    E up to 1024, M up to 2^27; E, M, N, K > 0. K is a multiple of 32, N of 8. G is ceil(K / 128), rounded up to a
    multiple of 4. The padding of a_scale and b_scale must be finite; that of b_scale_32 may be any bytes. Dimension G
    of b_scale is contiguous. Rows of all tensors except ends and weights are aligned to 16 bytes. ctas: number of
    persistent CTAs, one per SM.
    """
    out_type, rows = cute_dtype(out_dtype), cute.sym_int()
    return compile_sm90(
        Fp8Fp4GemmSm90(config, LateResultEpilogue(out_type, config, weighted)),
        *_operands(),
        fake_rows(out_type, rows, cute.sym_int()),
        fake_contiguous(Float32, rows) if weighted else None,
        *(Int32(1), fake_stream()),
    )


def choose_config(rows: int, columns: int, channels: int, matrices: int, multiprocessors: int) -> Fp8Fp4GemmConfig:
    return of_fewest_clocks(CONFIGS, tile_clocks, rows, columns, channels, matrices, multiprocessors)


def tile_clocks(config: Fp8Fp4GemmConfig, rows: int, blocks: int) -> float:
    """Return the modelled cycles of a work tile with `rows` rows. The time of a block is `tile_block_clocks`, as for
    the FP8 product, or the time of the converters if that is longer."""
    block = tile_block_clocks(config, rows, config.columns // 2 + WIDEN_MOVES, latency=100)
    stored = TMA_STORE_CLOCKS if config.waves == 1 else STORE_CLOCKS
    return stored + blocks * (BLOCK_CLOCKS + max(block, WIDEN_CLOCKS))


def shipped_variants() -> Variants:
    return [(compile_fp8_fp4_gemm, variant) for variant in itertools.product(OUT_DTYPES, CONFIGS, (False, True))]
