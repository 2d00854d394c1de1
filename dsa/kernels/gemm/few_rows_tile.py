"""The work tile of the small-M FP8 products: 32 or 64 columns of the result, which are the rows of the wgmma (swap
A/B), by 8 to 64 rows. Both small-M FP8 kernels share these functions."""

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32

from dsa.cute.sm90 import WARP, WARPGROUP
from dsa.cute.wgmma import k_major_layout
from dsa.kernels.gemm.fp8_gemm_few_rows_config import COLUMNS
from dsa.kernels.gemm.limits import GROUP
from dsa.kernels.gemm.operand_loads import tiled_mma

THREADS = WARPGROUP + WARP


def operand_layouts(rows: int, blocks: int) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
    """The shared-memory layouts of `blocks` blocks of a and of b."""
    return tuple(k_major_layout(Float8E4M3FN, count, GROUP, blocks) for count in (rows, COLUMNS))


def fragments(rows: int, together: int, sb: cute.Tensor, sa: cute.Tensor):
    """-> the wgmma, accumulators for `together` blocks, and the operands b and a as fragments."""
    mma = tiled_mma(1, COLUMNS, rows)
    thr_mma = mma.get_slice(0)
    shape = thr_mma.partition_shape_C((COLUMNS, rows))
    acc = [cute.make_rmem_tensor(shape, Float32) for _ in range(together)]
    return mma, acc, mma.make_fragment_A(thr_mma.partition_A(sb)), mma.make_fragment_B(thr_mma.partition_B(sa))


@cute.jit
def prefetch_blocks(atom, source: cute.Tensor, first, end, step, span: cutlass.Constexpr):
    """Prefetch the `span` blocks of each of the groups first, first + step and so on below `end` to L2. Called by one
    warp."""
    for group in cutlass.range(first, end, step, unroll=1):
        for i in cutlass.range_constexpr(span):
            cute.prefetch(atom, source[None, span * group + i])


@cute.jit
def load_blocks(atom, source: cute.Tensor, target: cute.Tensor, group, stage, span: cutlass.Constexpr, barrier):
    """Load the `span` blocks of a group to a stage."""
    for i in cutlass.range_constexpr(span):
        cute.copy(atom, source[None, span * group + i], target[None, span * stage + i], tma_bar_ptr=barrier)
