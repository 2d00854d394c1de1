"""8 x 8 matrices of 16-bit numbers from shared memory to a warp's registers, as wgmma and mma take them."""

import cutlass.cute as cute
from cutlass import Int32, Uint32


@cute.jit
def load_matrices(address: Int32):
    """Load 4 matrices; lane 8 i + r gives the address of row r of matrix i. -> what a lane has of each, two neighbours
    of row lane / 4."""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {" + "{$w0}, {$w1}, {$w2}, {$w3}" + "}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )
