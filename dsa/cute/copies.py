"""Asynchronous copies from global to shared memory (tiles by TMA, rows by gathers), and prefetches to L2.

`gather_16` and `gather_8` are cp.async, which writes through PTX's generic proxy; wgmma reads shared memory through the
async proxy. An mbarrier does not order the two proxies, so a fence.proxy.async must come between the write and the
read. Each kernel that gathers an operand of wgmma with cp.async executes this fence after the wait for a full stage and
before the wgmma. Examples are mla/topk_gather.py, training/topk_gather.py, sparse_mla_backward_sm90.py,
fp8_gemm_sm90.py and fp8_fp4_gemm_few_rows_sm90.py. `bulk_gather` writes through the async proxy and needs no fence.
"""

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

EVICT_FIRST = 0x12F0000000000000  # PTX encoding of L2's evict_first policy, for bytes that are read once


def tile_load(x: cute.Tensor, layout: cute.ComposedLayout, shape: tuple[int, int]) -> tuple[cute.CopyAtom, cute.Tensor]:
    """-> (the TMA copy atom for loads from x, x as a tensor of TMA coordinates).

    A load copies a block of `shape` (rows, columns) into one stage of the shared-memory layout `layout`
    [rows, columns, stages].
    """
    load = cute.nvgpu.cpasync.CopyBulkTensorTileG2SOp()
    info = cute.nvgpu.cpasync.make_tiled_tma_atom(load, x, cute.slice_(layout, (None, None, 0)), shape)
    return info[0], info[1]


def partition(atom: cute.CopyAtom, shared: cute.Tensor, tiles: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """Partition `shared` [rows, columns, stages] and `tiles` [rows, columns, ...] for copies by the TMA atom `atom`. ->
    (shared [tile, stages], tiles [tile, ...]). The mode `tile` is all elements of a tile."""
    grouped = cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
    return cute.nvgpu.cpasync.tma_partition(atom, 0, cute.make_layout(1), *grouped)


@cute.jit
def bulk_load(target: cute.Pointer, source: cute.Pointer, size: Int32, barrier: cute.Pointer):
    """Copy `size` bytes from global to shared memory with L2's evict_first policy. The mbarrier `barrier` counts the
    bytes, which the caller announces. The size is a multiple of 16, and both addresses are aligned to 16 bytes. One
    thread calls this."""
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
def gather_16(target: Int32, source: Int64, valid: Boolean):
    """Copy 16 bytes from global address `source` to shared address `target`. If not `valid`, write zeros and read
    nothing."""
    size = Int32(16) if valid else Int32(0)
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global.L2::256B [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[target, source, size],
    )


@cute.jit
def gather_8(target: Int32, source: Int64, valid: Boolean):
    """Copy 8 bytes from global address `source` to shared address `target`. If not `valid`, write zeros and read
    nothing."""
    size = Int32(8) if valid else Int32(0)
    cute.arch.inline_ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 8, {$r2};",
        read_only_args=[target, source, size],
    )


@cute.jit
def bulk_gather(target: Int32, source: Int64, size: Int32, barrier: cute.Pointer):
    """Copy `size` bytes from global address `source` to shared address `target`. The mbarrier `barrier` counts the
    bytes, which the caller announces. The size is a multiple of 16, and both addresses are aligned to 16 bytes. Each
    active lane starts a copy with its own addresses."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, source, size, Int32(barrier.toint())],
    )


@cute.jit
def arrive_when_gathered(barrier: cute.Pointer):
    """Make this lane arrive at the barrier when its earlier cp.async copies (`gather_16`, `gather_8`) are complete. The
    call does not wait for them. Initialise the barrier with a number of arrivals that includes this one."""
    cute.arch.inline_ptx(
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{$r0}];", read_only_args=[Int32(barrier.toint())]
    )


@cute.jit
def arrive_when_gathered_too(barrier: cute.Pointer):
    """Keep the barrier's current phase from ending before this lane's earlier cp.async copies are complete.

    The call does not wait for the copies. It adds one expected arrival to the phase, and this arrival follows when the
    copies are complete. So the barrier is initialised without it, unlike for `arrive_when_gathered`. The call must come
    before the warp's ordinary arrival, which could end the phase.
    """
    cute.arch.inline_ptx("cp.async.mbarrier.arrive.shared::cta.b64 [{$r0}];", read_only_args=[Int32(barrier.toint())])


@cute.jit
def prefetch_to_l2(source: Int64, size: Int32):
    """Prefetch `size` bytes from global address `source` to L2. Size and address are multiples of 16. One thread calls
    this."""
    cute.arch.inline_ptx("cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", read_only_args=[source, size])
