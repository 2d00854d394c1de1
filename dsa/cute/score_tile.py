"""What the index-score kernels share: an FP8 wgmma tile of 64 keys by N columns (heads of queries), and its rings."""

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

TILE = 64
WARPGROUP = 128
SHARED_BYTES = 232448
# By math warpgroups: registers of their threads and of the other warpgroup's, what the launch gave redistributed.
REGISTERS = {2: (232, 40), 3: (160, 32), 4: (112, 32)}


def registers_fit(columns: int, groups: int) -> bool:
    """Whether a math thread can hold its accumulators, its weights and two dozen other numbers."""
    return columns // 2 + columns // 4 + 24 <= REGISTERS[groups][0]


def score_mma(columns: int) -> cute.TiledMma:
    """Keys [64, D] times queries [columns, D], both e4m3 in shared memory, into fp32."""
    major = cute.nvgpu.OperandMajorMode.K
    return sm90.make_trivial_tiled_mma(Float8E4M3FN, Float8E4M3FN, major, major, Float32, (1, 1, 1), (TILE, columns))


def key_layout(rows: int, columns: int, dim: int, stages: int) -> cute.ComposedLayout:
    """Shared memory of `stages` blocks of keys [rows, dim]; rows lie one after the other, whatever the block."""
    return sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (rows, columns, dim), Float8E4M3FN, stages)


def query_layout(columns: int, dim: int, slots: int) -> cute.ComposedLayout:
    """Shared memory of `slots` blocks of queries [columns, dim]."""
    return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (TILE, columns, dim), Float8E4M3FN, slots)


def tile_load(x: cute.Tensor, layout: cute.ComposedLayout, shape: tuple[int, int]) -> tuple[cute.CopyAtom, cute.Tensor]:
    """The TMA load of a block [shape] of x into one stage of `layout`, and x as it takes it."""
    load = cute.nvgpu.cpasync.CopyBulkTensorTileG2SOp()
    info = cute.nvgpu.cpasync.make_tiled_tma_atom(load, x, cute.slice_(layout, (None, None, 0)), shape)
    return info[0], info[1]


@cute.jit
def init_ring(full, empty, stages: cutlass.Constexpr, readers: cutlass.Constexpr):
    """Barriers of a ring that one warp fills and `readers` warps empty. One thread's work."""
    for i in cutlass.range_constexpr(stages):
        cute.arch.mbarrier_init(full + i, 1)
        cute.arch.mbarrier_init(empty + i, readers)


@cute.jit
def multiply(mma: cute.TiledMma, acc: cute.Tensor, keys: cute.Tensor, queries: cute.Tensor, stage, slot):
    """Start acc = keys of `stage` times queries of `slot`, as one group of wgmma instructions."""
    cute.nvgpu.warpgroup.fence()
    for step in cutlass.range_constexpr(cute.size(keys, mode=[2])):
        mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, step > 0)
        cute.gemm(mma, acc, keys[None, None, step, stage], queries[None, None, step, slot], acc)
    cute.nvgpu.warpgroup.commit_group()
