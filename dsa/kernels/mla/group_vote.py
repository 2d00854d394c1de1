"""A question to all warps of a warpgroup."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32


@cute.jit
def any_of_group(condition: Boolean, barrier_id: Int32, threads: cutlass.Constexpr):
    """Whether the condition holds for any of the threads, which all wait for each other."""
    own = Int32(1) if condition else Int32(0)
    found = cute.arch.inline_ptx(
        "{{ .reg .pred p, q; setp.ne.s32 q, {$r0}, 0; "
        f"barrier.cta.red.or.pred p, {{$r1}}, {threads}, q; "
        "selp.s32 {$w0}, 1, 0, p; }}",
        write_only_types=[Int32],
        read_only_args=[own, Int32(barrier_id)],
    )
    return found != 0
