"""wgmma: a product of tiles in shared memory, issued by a warpgroup."""

import cutlass
import cutlass.cute as cute
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90


def k_major_layout(
    dtype: type[cutlass.Numeric], rows: int, channels: int, stages: int
) -> cute.Layout | cute.ComposedLayout:
    """Return the shared-memory layout [rows, channels, stages] of a wgmma operand, A or B, with contiguous channels and
    TMA's swizzle."""
    return sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (rows, 1, channels), dtype, stages)


@cute.jit
def multiply(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, a_stage, b_stage):
    """Start acc = A B^T, with A [M, K] from stage `a_stage` and B [N, K] from stage `b_stage`, as one committed group
    of wgmma instructions. The caller waits for the group.

    a, b  fragments [atom, rows, steps of channels, stages] from make_fragment_A and make_fragment_B
    """
    cute.nvgpu.warpgroup.fence()
    for step in cutlass.range_constexpr(cute.size(a, mode=[2])):
        mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, step > 0)
        cute.gemm(mma, acc, a[None, None, step, a_stage], b[None, None, step, b_stage], acc)
    cute.nvgpu.warpgroup.commit_group()
