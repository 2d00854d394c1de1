"""Steps that the prologues and mainloops of the training kernels share: thread indices, TMA tiles, wgmma products, and
releases of pipeline stages."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.pipeline import Pipeline, PipelineState

K_MAJOR, MN_MAJOR = cute.nvgpu.OperandMajorMode.K, cute.nvgpu.OperandMajorMode.MN


@cute.jit
def thread_indices():
    """-> (thread in the CTA, warp in the CTA, lane). The compiler knows that the warp index is uniform in a warp."""
    tid, _, _ = cute.arch.thread_idx()
    return tid, cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()


@cute.jit
def finish_prologue():
    """Make initialized barriers and shared memory visible to all threads of the CTA, then wait until the previous
    kernels have ended. Called by all threads."""
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    wait_for_prerequisite_grids()


@cute.jit
def tma_tiles(atom, stages, x, shape: cutlass.Constexpr, offset, coordinate):
    """Make the operands of TMA copies into `stages` [rows, columns, stage]. x is divided into tiles of `shape` from
    `offset` on. `coordinate` selects tiles; a None in it keeps all tiles along this mode. -> (stages [elements of a
    tile, stage], tiles [elements of a tile, the modes with None])."""
    tiles = cute.local_tile(cute.domain_offset(offset, x), shape, coordinate)
    return cute.nvgpu.cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(stages, 0, 2), cute.group_modes(tiles, 0, 2)
    )


@cute.jit
def load_stage(pipeline: Pipeline, state: PipelineState, size: cutlass.Constexpr, atom, tile, stages) -> PipelineState:
    """Wait for an empty stage, and load a tile of `size` bytes into it by TMA. tile, stages: from `tma_tiles`. -> the
    next state."""
    pipeline.producer_acquire(state, size)
    barrier = pipeline.producer_barrier(state)
    cute.copy(atom, tile, stages[None, state.stage], tma_bar_ptr=barrier)
    return pipeline.advance(state)


def tiled_mma(
    dtype: type[cutlass.Numeric],
    shape: tuple[int, int],
    majors: tuple[cute.nvgpu.OperandMajorMode, cute.nvgpu.OperandMajorMode] = (K_MAJOR, K_MAJOR),
    from_registers: bool = False,
    warpgroups: int = 1,
) -> cute.TiledMma:
    """Return a tiled MMA of `shape` [rows per warpgroup, columns] with fp32 accumulators. majors: the major modes of A
    and B. from_registers: A is in registers."""
    source = cute.nvgpu.warpgroup.OperandSource
    return sm90.make_trivial_tiled_mma(
        *(dtype, dtype, *majors, Float32, (warpgroups, 1, 1), shape, source.RMEM if from_registers else source.SMEM)
    )


def smem_layout(rows: int, columns: int, dtype: type[cutlass.Numeric], stages: int) -> cute.ComposedLayout:
    """Return a row-major shared-memory layout [rows, columns, stages], with the widest swizzle of TMA and wgmma that
    fits a row."""
    return sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (rows, rows, columns), dtype, stages)


def swap_modes(x: cute.Tensor) -> cute.Tensor:
    """Return a view [columns, rows, stage] of stages [rows, columns, stage]."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 0, 2]))


def flatten(x: cute.Tensor) -> cute.Tensor:
    return cute.make_tensor(x.iterator, cute.make_layout(cute.size(x)))


def words_of(x: cute.Tensor, *shape: int) -> cute.Tensor:
    """Return a view of a contiguous tensor as 32-bit words [*shape]; the first index changes fastest."""
    return cute.make_tensor(cute.recast_ptr(x.iterator, dtype=Uint32), cute.make_layout(shape))


def accumulator(thr: cute.TiledMma, shape: tuple[int, int]) -> tuple[cute.Tensor, cute.Tensor]:
    """-> (a thread's fp32 accumulators of a tile, a flat view of them)."""
    acc = cute.make_rmem_tensor(thr.partition_shape_C(shape), Float32)
    return acc, flatten(acc)


def operand_a(
    thr: cute.TiledMma, shape: tuple[int, int], dtype: type[cutlass.Numeric]
) -> tuple[cute.Tensor, cute.Tensor]:
    """-> (a thread's part of a 16-bit operand A in registers, its 32-bit words)."""
    operand = cute.make_rmem_tensor(thr.partition_shape_A(shape), dtype)
    return operand, words_of(operand, cute.size(operand) // 2)


@cute.jit
def add_product(mma, acc, a, b, b_stage, first: cutlass.Constexpr = 0):
    """Issue acc += a b as one committed group of wgmma, without waiting. a: fragment [atom, rows, steps], in registers.
    b: fragment [atom, rows, steps, stages]. Step i of a is multiplied by step `first` + i of b. The caller has set
    ACCUMULATE of `mma`."""
    cute.nvgpu.warpgroup.fence()
    for step in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(mma, acc, a[None, None, step], b[None, None, first + step, b_stage], acc)
    cute.nvgpu.warpgroup.commit_group()


@cute.jit
def multiply_and_wait(mma, acc, a, b, b_stage):
    """Compute acc = a b and wait for the result. a, b: as in `add_product` with `first` = 0. The caller need not set
    ACCUMULATE."""
    cute.nvgpu.warpgroup.fence()
    for step in cutlass.range_constexpr(cute.size(a, mode=[2])):
        mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, step > 0)
        cute.gemm(mma, acc, a[None, None, step], b[None, None, step, b_stage], acc)
    cute.nvgpu.warpgroup.commit_group()
    cute.nvgpu.warpgroup.wait_group(0)


@cute.jit
def release(pipeline: Pipeline, state: PipelineState, count: cutlass.Constexpr = 1) -> PipelineState:
    """Release `count` stages from `state` on. -> the state after these stages."""
    for _ in cutlass.range_constexpr(count):
        pipeline.consumer_release(state)
        state = pipeline.advance(state)
    return state


@cute.jit
def skip(pipeline: Pipeline, state: PipelineState, count: cutlass.Constexpr = 1) -> PipelineState:
    """Skip `count` stages that another warpgroup reads. The warp waits for each of these stages, because a parity wait
    cannot distinguish phases that differ by two. The warp also releases them, because a stage is empty only after all
    consumer warps have released it. -> the state after these stages."""
    for _ in cutlass.range_constexpr(count):
        pipeline.consumer_wait(state)
        state = release(pipeline, state)
    return state
