"""Shared memory of the other CTAs of a cluster.

A CTA may write to another's only once that one runs, and must not end while others write to its own. A barrier of the
cluster before the first write and one behind the last are enough for both; the second also makes what was written
visible:

    cute.arch.cluster_arrive_relaxed()
    ...                                                        # what needs no other CTA
    cute.arch.cluster_wait()
    store_remote_8(remote_address(address, rank), low, high)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()                                   # all threads of all CTAs, those that wrote nothing too
"""

import cutlass.cute as cute
from cutlass import Float32, Int32


@cute.jit
def remote_address(address: Int32, rank: Int32) -> Int32:
    """Where CTA `rank` of the cluster has what this one has at `address` of its shared memory; what follows there
    follows here."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[address, rank]
    )


@cute.jit
def store_remote_8(address: Int32, low: Float32, high: Float32):
    """Two numbers to the 8 bytes at a remote address, a multiple of 8."""
    cute.arch.inline_ptx(
        "st.shared::cluster.v2.f32 [{$r0}], {" + "{$r1}, {$r2}" + "};", read_only_args=[address, low, high]
    )
