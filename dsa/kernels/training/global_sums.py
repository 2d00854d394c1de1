"""Sums in global memory: reductions in the L2 cache, plain stores, and a published counter by which warps of several
CTAs add one after another in a fixed order.

Addresses are Int64: kernels compute them from indices, and offsets exceed 32 bits.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64


@cute.jit
def add_4(target: Int64, values):
    """Add four numbers to those at `target`, a multiple of 16. The L2 cache adds in no fixed order, and the warp does
    not wait for it."""
    cute.arch.inline_ptx(
        "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {" + "{$r1}, {$r2}, {$r3}, {$r4}" + "};",
        read_only_args=[target, *values],
    )


@cute.jit
def store_4(target: Int64, values):
    """Store four 32-bit values at `target`, a multiple of 16."""
    cute.arch.inline_ptx(
        "st.global.v4.b32 [{$r0}], {" + "{$r1}, {$r2}, {$r3}, {$r4}" + "};",
        read_only_args=[target, *values],
    )


@cute.jit
def add_fixed(target: Int64, value: Float32):
    """Round a number to an integer and add it to the 64-bit integer at `target`. An integer sum does not depend on the
    order of its terms."""
    cute.arch.inline_ptx(
        "{ .reg .s64 rounded; cvt.rni.s64.f32 rounded, {$r1}; red.global.add.u64 [{$r0}], rounded; }",
        read_only_args=[target, value],
    )


@cute.jit
def publish(target: cute.Pointer, count: Int32):
    """Store `count` with release semantics: a warp that reads it with `await_count` sees all earlier additions of this
    warp. Called by a whole warp."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.fence_acq_rel_gpu()
        cute.arch.inline_ptx(
            "st.relaxed.gpu.global.s32 [{$r0}], {$r1};", read_only_args=[Int64(target.toint()), Int32(count)]
        )


@cute.jit
def await_count(source: cute.Pointer, known: Int32, count: Int32):
    """Wait until at least `count` has been published. `known` is the value last read. -> the value read now."""
    while known < count:
        known = cute.arch.inline_ptx(
            "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];",
            write_only_types=[Int32],
            read_only_args=[Int64(source.toint())],
        )
    return known
