"""Asynchronous copies from global to shared memory at addresses that only the kernel knows."""

import cutlass.cute as cute
from cutlass import Int32, Int64

EVICT_FIRST = 0x12F0000000000000  # the encoding of the L2 policy for what is read once


@cute.jit
def bulk_load(target: cute.Pointer, source: cute.Pointer, size: Int32, barrier: cute.Pointer):
    """Copy `size` bytes, a multiple of 16 between addresses of 16 bytes; the barrier counts them. One thread's work."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [{$r0}], [{$r1}], {$r2}, "
        "[{$r3}], {$r4};",
        read_only_args=[
            Int32(target.toint()),
            Int64(source.toint()),
            size,
            Int32(barrier.toint()),
            Int64(EVICT_FIRST),
        ],
    )


@cute.jit
def async_load_16(target: cute.Pointer, source: cute.Pointer):
    """Copy 16 bytes between addresses of 16 bytes; `cp_async_wait_group(0)` and a barrier wait for the whole CTA's."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16; cp.async.commit_group;",
        read_only_args=[Int32(target.toint()), Int64(source.toint())],
    )
