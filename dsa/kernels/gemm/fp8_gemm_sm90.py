"""Products of block-scaled FP8 matrices, one or a group of them:
out[m, n] = sum_g (sum_{k in block g} a[m, k] b[e, n, k]) * a_scale[m, g] * b_scale[e, n // 128, g],
e the matrix of row m.

Plan
- Rows lie one matrix's after another's. `ends` says on the device where each one's end, so no row is padded and no host
  reads a length. A work tile has rows of one matrix only; it loads what lies beyond them and does not store it.
- Warp roles: one warp is the producer, which loads a and b by TMA. A consumer warpgroup owns 64 rows of a work tile.
- Pipeline: a ring of STAGES stages, each a block of 128 channels of a and of b, that runs on over work tile after work
  tile.
- Mainloop: per block of 128 channels four wgmma into fresh accumulators, whose products are scaled and added in fp32
  while another warpgroup has the tensor cores. The tensor cores' own sum keeps about 14 bits: 128 channels are what may
  be left to it.
- Many rows get work tiles of 128 x 256. A warpgroup's columns are then in two parts, as each of its wgmma reads the 64
  rows again and shared memory is what they wait for. Few rows get narrow work tiles: enough of them to keep all SMs
  loading weights. The order of a sum is the same in all.
- Scales are loaded four blocks at a time. A row's scales lie in a line of their own, and each line that a warp touches
  costs a clock of the L1 cache, which is the shared memory that wgmma reads from. One block at a time they would be a
  sixth of its time.
- Epilogue: 16-bit results go through shared memory, a warp's 16 rows at a time, to be stored 128 bytes in a row.
- Scheduler: static persistent. The work tiles of a matrix come together, and its tiles of rows innermost: a tile of
  weights comes from memory once. A warp finds the matrix of a work tile by comparing 32 prefix sums at a time.
Shared memory: barriers, prefix sums, 2 KiB a consumer warp for results, STAGES x (64 GROUPS + COLUMNS) x 128 bytes.
Registers: COLUMNS / 2 sums and 32 or 64 accumulators a consumer thread, of 240; 24 for the others.
Roofline: for many rows a matrix shared memory, 128 bytes a clock: 1152 clocks a block of 128 x 256, of which wgmma has
1024; for few rows memory: b once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Uint32
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.copies import tile_load
from dsa.cute.fake_tensors import cute_dtype, fake, fake_stream, strides
from dsa.cute.pipeline import Pipeline, PipelineState, pipeline_storage, start
from dsa.cute.reductions import block_exclusive_scan
from dsa.cute.shared_memory import load_16, pack, store_matrices
from dsa.cute.sm90 import SHARED_BYTES, WARPGROUP
from dsa.cute.wgmma import multiply
from dsa.cute.work_tile import static_persistent_scheduler
from dsa.kernels.gemm.limits import GROUP, MAX_MATRICES, OUT_DTYPES

MAX_TILES = 2**30
WIDTH = 128  # columns that a warpgroup multiplies at a time
SCALES = 4  # blocks whose scales a thread loads at a time
# Results of a warp on their way out: rows, and columns of 2 bytes.
OUT_ROWS, OUT_COLUMNS = 16, 64
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24


class WorkTileInfo(NamedTuple):
    """matrix: its number; row, column: the first of the work tile; end: of the matrix's rows."""

    matrix: Int32
    row: Int32
    end: Int32
    column: Int32


@dataclass(frozen=True)
class Fp8GemmConfig:
    """groups: consumer warpgroups, of 64 rows each; columns: of a tile; stages: blocks of 128 channels in flight."""

    groups: int
    columns: int
    stages: int

    @property
    def together(self) -> int:
        """Blocks of channels multiplied before the first of them is added: what hides a narrow tile's latency."""
        return max(1, WIDTH // self.columns)

    @property
    def threads(self) -> int:
        return (self.groups + 1) * WARPGROUP

    def fits(self) -> bool:
        """Whether shared memory holds it."""
        staged = 4 * self.groups * OUT_ROWS * OUT_COLUMNS * 2
        loaded = self.stages * (64 * self.groups + self.columns) * GROUP
        return loaded + staged + 4 * (MAX_MATRICES + 64) + 16 * self.stages + 3 * 1024 <= SHARED_BYTES


CONFIGS = Fp8GemmConfig(1, 64, 12), Fp8GemmConfig(1, 128, 8), Fp8GemmConfig(2, 128, 6), Fp8GemmConfig(2, 256, 4)


class Fp8GemmSm90:
    def __init__(self, out_dtype: type[cutlass.Numeric], cfg: Fp8GemmConfig):
        self.out_dtype = out_dtype
        self.rows, self.columns, self.stages = 64 * cfg.groups, cfg.columns, cfg.stages
        self.consumer_warps, self.threads = 4 * cfg.groups, cfg.threads
        self.together, self.width = cfg.together, min(WIDTH, cfg.columns)
        self.parts = cfg.columns // self.width

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        a_scale: cute.Tensor,
        b: cute.Tensor,
        b_scale: cute.Tensor,
        ends: cute.Tensor,
        out: cute.Tensor,
        ctas: Int32,
        stream,
    ):
        tile = (self.rows, self.columns, GROUP)
        a_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, Float8E4M3FN, self.stages)
        b_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, Float8E4M3FN, self.stages)
        a_atom, a_tma = tile_load(a, a_layout, (self.rows, GROUP))
        b_atom, b_tma = tile_load(b, b_layout, (self.columns, GROUP))

        @cute.struct
        class Storage:
            pipeline: pipeline_storage(self.stages)
            sums: cute.struct.MemRange[Int32, 32]
            # Tiles of rows before each matrix; behind the last one those of all.
            tiles: cute.struct.MemRange[Int32, MAX_MATRICES + 32]
            out: cute.struct.Align[cute.struct.MemRange[Int32, self.consumer_warps * OUT_ROWS * OUT_COLUMNS // 2], 1024]
            a: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(a_layout)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(b_layout)], 1024]

        self.storage = Storage
        self.kernel(a_atom, a_tma, a_scale, b_atom, b_tma, b_scale, ends, out, a_layout, b_layout).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        a_atom: cute.CopyAtom,
        ma: cute.Tensor,
        a_scale: cute.Tensor,
        b_atom: cute.CopyAtom,
        mb: cute.Tensor,
        b_scale: cute.Tensor,
        ends: cute.Tensor,
        out: cute.Tensor,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        storage = SmemAllocator().allocate(self.storage)
        pipeline = Pipeline.of(storage.pipeline, self.stages)
        sa = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        sb = storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        tiles = storage.tiles.get_tensor(cute.make_layout(MAX_MATRICES + 32))
        sums = storage.sums.get_tensor(cute.make_layout(32))

        if warp == self.consumer_warps:
            cute.nvgpu.cpasync.prefetch_descriptor(a_atom)
            cute.nvgpu.cpasync.prefetch_descriptor(b_atom)
        if tid == 0:
            pipeline.init(consumers=self.consumer_warps)
        cute.arch.mbarrier_init_fence()
        if tid < 32:
            sums[tid] = 0
        cute.arch.sync_threads()
        total = self.count_tiles(ends, *out.shape, tiles, sums, tid, lane, warp)

        if warp >= self.consumer_warps:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == self.consumer_warps:
                blocks = a_scale.shape[1]
                self.produce(a_atom, ma, b_atom, mb, blocks, ends, out, tiles, total, sa, sb, pipeline, lane)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            staged = storage.out.data_ptr().toint() + warp * (OUT_ROWS * OUT_COLUMNS * 2)
            self.consume(a_scale, b_scale, ends, out, tiles, total, sa, sb, pipeline, staged, tid, warp, lane)

    @cute.jit
    def count_tiles(self, ends, rows, columns, tiles, sums, tid, lane, warp):
        """Fill in the tiles of rows before each matrix; returns those of all."""
        count = ends.shape[0]
        # Matrices that overlap, as ends that decrease make them, could have more tiles than an int32 holds.
        most = MAX_TILES // cute.ceil_div(columns, self.columns)
        total = Int32(0)
        for first in cutlass.range(0, count, self.threads, unroll=1):
            e = first + tid
            own = Int32(0)
            if e < count:
                begin, end = self.bounds(ends, e, rows)
                own = cute.ceil_div(end - begin, self.rows)
            before, of_all = block_exclusive_scan(own, sums, lane, warp)
            if e < count:
                tiles[e] = cutlass.min(total + before, most)
            total = cutlass.min(total + of_all, most)
            cute.arch.sync_threads()
        if tid < 32:
            tiles[count + tid] = total
        cute.arch.sync_threads()
        return total

    @cute.jit
    def bounds(self, ends, e, rows):
        """Where the rows of matrix e begin and end; inside the rows that there are, whatever `ends` says. If its ends
        decrease or are outside it has none, and takes none of the others'; the last may end beyond the rows."""
        begin, end = Int32(0), ends[e]
        if e > 0:
            begin = ends[e - 1]
        if e == ends.shape[0] - 1:
            end = cutlass.min(end, rows)
        if begin < 0 or begin > end or end > rows:
            begin, end = Int32(0), Int32(0)
        return begin, end

    @cute.jit
    def work_tile(self, index, e, ends, out, tiles, lane) -> WorkTileInfo:
        """Work tile `index`, whose matrix is not before e."""
        across = cute.ceil_div(out.shape[1], self.columns)
        steps = Int32(32)
        while steps == 32:
            # Whether the tile lies behind the beginning of each of the next 32 matrices.
            steps = cute.arch.popc(cute.arch.vote_ballot_sync(tiles[e + 1 + lane] * across <= index))
            e += steps
        begin, end = self.bounds(ends, e, out.shape[0])
        down = cute.ceil_div(end - begin, self.rows)
        local = index - tiles[e] * across
        return WorkTileInfo(e, begin + local % down * self.rows, end, local // down * self.columns)

    @cute.jit
    def produce(self, a_atom, ma, b_atom, mb, blocks, ends, out, tiles, total, sa, sb, pipeline: Pipeline, lane):
        """The producer warp."""
        one = cute.make_layout(1)
        scheduler = static_persistent_scheduler()
        state, e = start(), Int32(0)
        across = cute.ceil_div(out.shape[1], self.columns)
        for index in cutlass.range(scheduler.first, total * across, scheduler.step, unroll=1):
            e, row, _, column = self.work_tile(index, e, ends, out, tiles, lane)
            ga = cute.local_tile(cute.domain_offset((row, 0), ma), (self.rows, GROUP), (0, None))
            gb = cute.local_tile(
                cute.domain_offset((e * out.shape[1] + column, 0), mb), (self.columns, GROUP), (0, None)
            )
            tas, tag = cute.nvgpu.cpasync.tma_partition(
                a_atom, 0, one, cute.group_modes(sa, 0, 2), cute.group_modes(ga, 0, 2)
            )
            tbs, tbg = cute.nvgpu.cpasync.tma_partition(
                b_atom, 0, one, cute.group_modes(sb, 0, 2), cute.group_modes(gb, 0, 2)
            )
            for block in cutlass.range(blocks, unroll=1):
                pipeline.producer_acquire(state, (self.rows + self.columns) * GROUP)
                full = pipeline.producer_barrier(state)
                cute.copy(a_atom, tag[None, block], tas[None, state.stage], tma_bar_ptr=full)
                cute.copy(b_atom, tbg[None, block], tbs[None, state.stage], tma_bar_ptr=full)
                state = pipeline.advance(state)

    @cute.jit
    def consume(self, a_scale, b_scale, ends, out, tiles, total, sa, sb, pipeline: Pipeline, staged, tid, warp, lane):
        """The mainloop of a consumer warpgroup."""
        major = cute.nvgpu.OperandMajorMode.K
        mma = sm90.make_trivial_tiled_mma(
            *(Float8E4M3FN, Float8E4M3FN, major, major, Float32, (self.rows // 64, 1, 1), (64, self.width))
        )
        thr_mma = mma.get_slice(tid)
        ra = mma.make_fragment_A(thr_mma.partition_A(sa))
        parts = [cute.local_tile(sb, (self.width, GROUP, self.stages), (part, 0, 0)) for part in range(self.parts)]
        rb = [mma.make_fragment_B(thr_mma.partition_B(part)) for part in parts]
        shape = thr_mma.partition_shape_C((self.rows, self.width))
        acc = [cute.make_rmem_tensor(shape, Float32) for _ in range(self.together)]
        sums = cute.make_rmem_tensor((self.columns // 2,), Float32)
        own_row = warp * 16 + (lane >> 2)
        scheduler = static_persistent_scheduler()
        state, e = start(), Int32(0)
        across = cute.ceil_div(out.shape[1], self.columns)
        for index in cutlass.range(scheduler.first, total * across, scheduler.step, unroll=1):
            e, row, end, column = self.work_tile(index, e, ends, out, tiles, lane)
            sums.fill(0.0)
            # What lies beyond the rows has no scale and is not stored.
            of_rows = [a_scale[cutlass.min(row + own_row + 8 * half, end - 1), None] for half in range(2)]
            last = b_scale.shape[1] - 1
            of_parts = [b_scale[e, cutlass.min(column // GROUP + part, last), None] for part in range(self.parts)]
            of = (*of_rows, *of_parts)
            state = self.mainloop(mma, acc, ra, rb, sums, of, pipeline, state)
            if cutlass.const_expr(self.out_dtype.width == 16):
                self.store_rows(sums, out, row + warp * 16, end, column, staged, lane)
            else:
                self.store_pairs(sums, out, row + own_row, end, column + lane % 4 * 2)

    @cute.jit
    def mainloop(self, mma, acc, ra, rb, sums, of, pipeline: Pipeline, state: PipelineState) -> PipelineState:
        """Add up a work tile's blocks. of: the scales of this thread's rows `row` and `row` + 8, and of the columns."""
        groups = of[0].shape[0] // SCALES
        scales = [cute.make_rmem_tensor((SCALES,), Float32) for _ in of]
        self.load_scales(scales, of, 0)
        # The next blocks' are on their way while these are multiplied: all of them, if there are registers for both.
        load_at = 0 if self.parts == 1 else SCALES - self.together
        for group in cutlass.range(groups, unroll=1):
            scales_rmem = [[x[i] for x in scales] for i in range(SCALES)]
            for first in cutlass.range_constexpr(0, SCALES, self.together):
                states = []
                for i in cutlass.range_constexpr(self.together):
                    pipeline.consumer_wait(state)
                    multiply(mma, acc[i], ra, rb[0], state.stage, state.stage)
                    states.append(state)
                    state = pipeline.advance(state)
                if cutlass.const_expr(first == load_at):
                    self.load_scales(scales, of, cutlass.min(group + 1, groups - 1))
                for i in cutlass.range_constexpr(self.together):
                    for part in cutlass.range_constexpr(self.parts):
                        if cutlass.const_expr(part > 0):
                            multiply(mma, acc[i], ra, rb[part], states[i].stage, states[i].stage)
                        cute.nvgpu.warpgroup.wait_group(self.together - 1 - i)
                        if cutlass.const_expr(part == self.parts - 1):
                            pipeline.consumer_release(states[i])
                        of_rows = [scales_rmem[first + i][half] * scales_rmem[first + i][2 + part] for half in range(2)]
                        add_scaled(sums, part * self.width // 2, acc[i], *of_rows)
        return state

    @cute.jit
    def load_scales(self, target, of, group):
        for j in cutlass.range_constexpr(len(of)):
            cute.autovec_copy(cute.local_tile(of[j], (SCALES,), (group,)), target[j])

    @cute.jit
    def store_rows(self, sums, out, row, end, column, staged, lane):
        """A warp's 16 rows from `row` on, through its part of shared memory, whose rows are 128 bytes: the chunk of 16
        bytes c of row r lies where c ^ (r % 8) would."""
        width = min(self.columns, OUT_COLUMNS)
        chunks = width // 8
        own = lane % OUT_ROWS
        eight = cute.make_rmem_tensor((4,), Uint32)
        for first in cutlass.range_constexpr(0, self.columns, width):
            for pair in cutlass.range_constexpr(chunks // 2):
                places = [first // 2 + 8 * pair + 2 * i for i in range(4)]
                words = [pack(sums[i], sums[i + 1], self.out_dtype) for i in places]
                # Lanes 0 to 15 have the rows of the even chunk, the others those of the odd one.
                store_matrices(staged + own * 128 + ((2 * pair + lane // OUT_ROWS) ^ (own % 8)) * 16, words)
            cute.arch.sync_warp()
            for i in cutlass.range_constexpr(0, OUT_ROWS * chunks, 32):
                r, chunk = (i + lane) // chunks, (i + lane) % chunks
                at = column + first + 8 * chunk
                if row + r < end and at < out.shape[1]:
                    loaded = load_16(staged + r * 128 + (chunk ^ (r % 8)) * 16)
                    for k in cutlass.range_constexpr(4):
                        eight[k] = loaded[k]
                    target = cute.local_tile(out[row + r, None], (8,), (at // 8,))
                    cute.autovec_copy(cute.recast_tensor(eight, self.out_dtype), target)
            cute.arch.sync_warp()

    @cute.jit
    def store_pairs(self, sums, out, row, end, column):
        """The sums of rows `row` and `row` + 8, in pairs of columns 8 apart: 32 bytes in a row."""
        pair = cute.make_rmem_tensor((2,), self.out_dtype)
        for half in cutlass.range_constexpr(2):
            if row + 8 * half < end:
                pairs = cute.local_tile(out[row + 8 * half, None], (2,), (None,))
                for j in cutlass.range_constexpr(self.columns // 8):
                    if column + 8 * j < out.shape[1]:
                        for c in cutlass.range_constexpr(2):
                            pair[c] = sums[4 * j + 2 * half + c]
                        cute.autovec_copy(pair, pairs[None, column // 2 + 4 * j])


@cute.jit
def add_scaled(sums, first: cutlass.Constexpr, acc, of_row: Float32, of_row_8: Float32):
    """sums[first + i] += acc[i], scaled: pairs of columns of a row and of the row 8 below it take turns."""
    products = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
    for i in cutlass.range_constexpr(cute.size(acc)):
        sums[first + i] += products[i] * (of_row_8 if i // 2 % 2 else of_row)


@cached
def compile_fp8_gemm(out_dtype: str, config: Fp8GemmConfig):
    """-> f(a [M, K] e4m3, a_scale [M, G], b [E * N, K] e4m3, b_scale [E, ceil(N / 128), G], ends [E] int32 ascending,
    out [M, N], ctas); E up to 1024, M up to 2^27; M, N, K > 0. K is a multiple of 16, N of 8; G is ceil(K / 128),
    rounded up to a multiple of 4 with finite scales; rows of all but ends start at multiples of 16 bytes."""
    rows, columns, channels, matrices = (cute.sym_int() for _ in range(4))
    blocks = cute.sym_int(divisibility=SCALES)
    out_type = cute_dtype(out_dtype)
    a = fake(Float8E4M3FN, (rows, channels), (*strides(1, 16), 1))
    a_scale = fake(Float32, (rows, blocks), (*strides(1, SCALES), 1))
    b = fake(Float8E4M3FN, (cute.sym_int(), channels), (*strides(1, 16), 1))
    b_scale = fake(Float32, (matrices, cute.sym_int(), blocks), (*strides(2, SCALES), 1))
    ends = fake(Int32, (matrices,), (1,), 4)
    out = fake(out_type, (rows, columns), (*strides(1, 128 // out_type.width), 1))
    return compile_sm90(Fp8GemmSm90(out_type, config), a, a_scale, b, b_scale, ends, out, Int32(1), fake_stream())


def choose_config(rows: int, columns: int, matrices: int, multiprocessors: int) -> Fp8GemmConfig:
    """For `rows` in all, as many for each matrix: what takes the fewest clocks of shared memory a block of channels,
    over all tiles that a multiprocessor gets in turn. It moves 128 bytes a clock: what TMA writes, and what every wgmma
    reads, its 64 rows and its columns."""
    used = max(min(rows, matrices), 1)
    each = -(-rows // used)
    candidates = [config for config in CONFIGS if config.groups == 1 or each > 64]

    def clocks(config: Fp8GemmConfig) -> float:
        tiles = used * -(-each // (64 * config.groups)) * -(-columns // config.columns)
        width = min(WIDTH, config.columns)
        read = config.groups * config.columns // width * (64 + width) * GROUP
        written = (64 * config.groups + config.columns) * GROUP
        return -(-tiles // multiprocessors) * (read + written) / 128

    return min(candidates, key=clocks)


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [(compile_fp8_gemm, (dtype, config)) for dtype in OUT_DTYPES for config in CONFIGS]
