"""The work tile of the small-M FP8 products: 32 or 64 columns of the result, which are the rows of the wgmma (swap
A/B), by 8 to 64 rows. Both small-M FP8 kernels share these functions."""

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.sm90 import WARP, WARPGROUP
from dsa.kernels.gemm.fp8_gemm_few_rows_config import COLUMNS
from dsa.kernels.gemm.limits import GROUP

THREADS = WARPGROUP + WARP


def operand_layouts(rows: int, blocks: int) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
    """The shared-memory layouts of `blocks` blocks of a and of b."""
    tile = (COLUMNS, rows, GROUP)
    a_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, Float8E4M3FN, blocks)
    return a_layout, sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, Float8E4M3FN, blocks)


def tiles_of(atom: cute.CopyAtom, shared: cute.Tensor, x: cute.Tensor, shape: tuple[int, int], row):
    """Partition a TMA load of x. -> its stages in shared memory, and the blocks [shape] of x from row `row` on."""
    blocks = cute.local_tile(cute.domain_offset((row, 0), x), shape, (0, None))
    one = cute.make_layout(1)
    return cute.nvgpu.cpasync.tma_partition(
        atom, 0, one, cute.group_modes(shared, 0, 2), cute.group_modes(blocks, 0, 2)
    )


def fragments(rows: int, together: int, sb: cute.Tensor, sa: cute.Tensor):
    """-> the wgmma, accumulators for `together` blocks, and the operands b and a as fragments."""
    major = cute.nvgpu.OperandMajorMode.K
    mma = sm90.make_trivial_tiled_mma(Float8E4M3FN, Float8E4M3FN, major, major, Float32, (1, 1, 1), (COLUMNS, rows))
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
