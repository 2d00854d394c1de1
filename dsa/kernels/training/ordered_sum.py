"""Sums in global memory that warps of several CTAs add to one after another, always in the same order."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64


@cute.jit
def store_4(target: cute.Pointer, values):
    _vector(target, values, "st.global.v4.f32")


@cute.jit
def add_4(target: cute.Pointer, values):
    """Add to four fp32 numbers at a multiple of 16 bytes; nobody waits for it."""
    _vector(target, values, "red.relaxed.gpu.global.add.v4.f32")


@cute.jit
def _vector(target: cute.Pointer, values, instruction: cutlass.Constexpr):
    cute.arch.inline_ptx(
        instruction + " [{$r0}], {" + "{$r1}, {$r2}, {$r3}, {$r4}" + "};",
        read_only_args=[Int64(target.toint()), *[Float32(x) for x in values]],
    )


@cute.jit
def publish(target: cute.Pointer, count: Int32):
    """What the warp has added so far is there for whoever reads `count`. A warp's work."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.fence_acq_rel_gpu()
        cute.arch.inline_ptx(
            "st.relaxed.gpu.global.s32 [{$r0}], {$r1};", read_only_args=[Int64(target.toint()), Int32(count)]
        )


@cute.jit
def await_count(source: cute.Pointer, known: Int32, count: Int32):
    """Wait until at least `count` has been published, where `known` was read before. -> what has been read."""
    while known < count:
        known = cute.arch.inline_ptx(
            "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];",
            write_only_types=[Int32],
            read_only_args=[Int64(source.toint())],
        )
    return known
