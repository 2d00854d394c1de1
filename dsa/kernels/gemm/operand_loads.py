"""Views of the operands for the TMA loads of the large-M products."""

import cutlass
import cutlass.cute as cute

from dsa.kernels.gemm.fp8_gemm_config import SCALES
from dsa.kernels.gemm.limits import GROUP


def out_columns(results):
    return results[0].shape[1]


@cute.jit
def rows_from(x, row, height: cutlass.Constexpr):
    """The blocks of channels of x's rows from `row` on."""
    return cute.local_tile(cute.domain_offset((row, 0), x), (height, GROUP), (0, None))


@cute.jit
def scales_from(x, block, e):
    """The scales of block `block` of b's rows in matrix e, SCALES blocks of channels at a time."""
    return cute.local_tile(cute.domain_offset((block, 0, e), x)[None, None, 0], (1, SCALES), (0, None))


@cute.jit
def part(atom, shared, tensor):
    """Partition a TMA load. -> its stages in shared memory, and the blocks of the tensor."""
    one = cute.make_layout(1)
    return cute.nvgpu.cpasync.tma_partition(
        *(atom, 0, one, cute.group_modes(shared, 0, 2), cute.group_modes(tensor, 0, 2))
    )
