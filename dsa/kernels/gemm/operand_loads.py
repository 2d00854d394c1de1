"""The operands of the FP8 products: layouts in shared memory, views for TMA loads, and the wgmma.

The functions from `operand_layouts` on are for the small-M products. Their work tiles are 32 or 64 columns of the
result by 8 to 64 rows. In the wgmma, these columns are M and these rows are N (swap A/B).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.copies import partition
from dsa.cute.sm90 import WARP, WARPGROUP
from dsa.cute.wgmma import k_major_layout
from dsa.kernels.gemm.fp8_gemm_config import SCALES
from dsa.kernels.gemm.fp8_gemm_few_rows_config import COLUMNS
from dsa.kernels.gemm.limits import GROUP

SMALL_M_THREADS = WARPGROUP + WARP


def tiles_of(atom: cute.CopyAtom, shared: cute.Tensor, x: cute.Tensor, shape: tuple[int, int], row):
    """Partition a TMA load of x. -> (tiles in shared memory, indexed by the stage; tiles of `shape` of x from row `row`
    on, indexed by the block of channels)"""
    return partition(atom, shared, cute.local_tile(cute.domain_offset((row, 0), x), shape, (0, None)))


def scales_of(atom: cute.CopyAtom, shared: cute.Tensor, x: cute.Tensor, block, e):
    """Partition a TMA load of b's scales x[block, :, e], in boxes of SCALES adjacent scales. -> (boxes in shared
    memory, boxes of x). x is [blocks of rows, blocks of channels, matrices]."""
    scales = cute.domain_offset((block, 0, e), x)[None, None, 0]
    return partition(atom, shared, cute.local_tile(scales, (1, SCALES), (0, None)))


def tiled_mma(warpgroups: int, rows: int, columns: int, a_in_registers: bool = False) -> cute.TiledMma:
    """Return the e4m3 wgmma of M = `rows` by N = `columns` per warpgroup, with K-major operands and fp32
    accumulators."""
    major, sources = cute.nvgpu.OperandMajorMode.K, cute.nvgpu.warpgroup.OperandSource
    shape = (warpgroups, 1, 1), (rows, columns), sources.RMEM if a_in_registers else sources.SMEM
    return sm90.make_trivial_tiled_mma(Float8E4M3FN, Float8E4M3FN, major, major, Float32, *shape)


def operand_layouts(rows: int, blocks: int) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
    """-> (shared-memory layout of `blocks` blocks of a, shared-memory layout of `blocks` blocks of b)"""
    return tuple(k_major_layout(Float8E4M3FN, count, GROUP, blocks) for count in (rows, COLUMNS))


def fragments(rows: int, together: int, sb: cute.Tensor, sa: cute.Tensor):
    """-> (the wgmma, accumulators for each of `together` blocks, fragments of b, fragments of a). b comes first,
    because it is the wgmma's A (swap A/B)."""
    mma = tiled_mma(1, COLUMNS, rows)
    thr_mma = mma.get_slice(0)
    shape = thr_mma.partition_shape_C((COLUMNS, rows))
    acc = [cute.make_rmem_tensor(shape, Float32) for _ in range(together)]
    return mma, acc, mma.make_fragment_A(thr_mma.partition_A(sb)), mma.make_fragment_B(thr_mma.partition_B(sa))


@cute.jit
def prefetch_blocks(atom, source: cute.Tensor, first, end, step, span: cutlass.Constexpr):
    """Prefetch the groups range(first, end, step) to L2. A group is `span` blocks of channels. One warp calls this."""
    for group in cutlass.range(first, end, step, unroll=1):
        for i in cutlass.range_constexpr(span):
            cute.prefetch(atom, source[None, span * group + i])


@cute.jit
def load_blocks(atom, source: cute.Tensor, target: cute.Tensor, group, stage, span: cutlass.Constexpr, barrier):
    """Load group number `group`, which is `span` blocks of channels, to a stage. `barrier` counts the bytes."""
    for i in cutlass.range_constexpr(span):
        cute.copy(atom, source[None, span * group + i], target[None, span * stage + i], tma_bar_ptr=barrier)
