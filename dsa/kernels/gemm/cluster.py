"""Distributed shared memory: access to the shared memory of the other CTAs of a cluster.

A CTA may write to another CTA's shared memory only after that CTA has started, and must not exit while others write to
its memory. One cluster barrier before the first write and one after the last write ensure both. The second barrier also
makes the writes visible:

    cute.arch.cluster_arrive_relaxed()
    ...                                                        # work that needs no other CTA
    cute.arch.cluster_wait()
    store_remote_8(remote_address(address, rank), low, high)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()                                   # all threads of all CTAs, including those without writes
"""

import cutlass.cute as cute
from cutlass import Float32, Int32


@cute.jit
def remote_address(address: Int32, rank: Int32) -> Int32:
    """Map `address` of this CTA's shared memory to the same location in CTA `rank` of the cluster. Offsets from both
    addresses correspond."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[address, rank]
    )


@cute.jit
def store_remote_8(address: Int32, low: Float32, high: Float32):
    """Store two numbers to 8 bytes at a remote address, which is a multiple of 8."""
    cute.arch.inline_ptx(
        "st.shared::cluster.v2.f32 [{$r0}], {" + "{$r1}, {$r2}" + "};", read_only_args=[address, low, high]
    )
