"""The operands of the FP8 products: views for TMA loads, and the wgmma."""

import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.copies import partition
from dsa.kernels.gemm.fp8_gemm_config import SCALES


def tiles_of(atom: cute.CopyAtom, shared: cute.Tensor, x: cute.Tensor, shape: tuple[int, int], row):
    """Partition a TMA load of x. -> its stages in shared memory, and the blocks [shape] of x from row `row` on."""
    return partition(atom, shared, cute.local_tile(cute.domain_offset((row, 0), x), shape, (0, None)))


def scales_of(atom: cute.CopyAtom, shared: cute.Tensor, x: cute.Tensor, block, e):
    """`tiles_of` for the scales of block `block` of b's rows in matrix e, SCALES blocks of channels at a time."""
    scales = cute.domain_offset((block, 0, e), x)[None, None, 0]
    return partition(atom, shared, cute.local_tile(scales, (1, SCALES), (0, None)))


def tiled_mma(warpgroups: int, rows: int, columns: int, a_in_registers: bool = False) -> cute.TiledMma:
    """The e4m3 wgmma of `rows` by `columns` per warpgroup, with operands in K-major order."""
    major, sources = cute.nvgpu.OperandMajorMode.K, cute.nvgpu.warpgroup.OperandSource
    shape = (warpgroups, 1, 1), (rows, columns), sources.RMEM if a_in_registers else sources.SMEM
    return sm90.make_trivial_tiled_mma(Float8E4M3FN, Float8E4M3FN, major, major, Float32, *shape)
