"""fp32 numbers from registers to global memory, 16 bytes a lane: added by the L2 cache, in no order, or stored."""

import cutlass.cute as cute
from cutlass import Int64


@cute.jit
def add_4(target: Int64, numbers):
    """Add four numbers to those at `target`, a multiple of 16."""
    cute.arch.inline_ptx(
        "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {" + "{$r1}, {$r2}, {$r3}, {$r4}" + "};",
        read_only_args=[target, *numbers],
    )


@cute.jit
def store_4(target: Int64, numbers):
    """Store four numbers at `target`, a multiple of 16."""
    cute.arch.inline_ptx(
        "st.global.v4.f32 [{$r0}], {" + "{$r1}, {$r2}, {$r3}, {$r4}" + "};",
        read_only_args=[target, *numbers],
    )
