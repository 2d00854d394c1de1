"""Load Q of dense MLA decoding: TILE_M rows of 576 channels, from global memory to registers and shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from dsa.cute.shared_memory import swizzled
from dsa.cute.sm90 import opaque
from dsa.kernels.mla.limits import HEAD_DIM, TILE_M
from dsa.kernels.mla.mla_tiles import K_CHUNK


@cute.jit
def start_q_load(q, sq, q_rmem, order: cutlass.Constexpr, sequence, heads, rows, first_row, kv_head, warp, lane):
    """Start loading rows first_row to first_row + TILE_M - 1 of a sequence and KV head; zeros after row
    `rows` - 1.

    order   the k chunks in the order of use; the first ones go to registers, the rest to shared memory
    q_rmem  [a lane's part of a 64 x 16 wgmma operand, K_CHUNK / 16, chunks]: registers, loaded when first
            read
    sq      [64, channels, 1]: shared memory, complete after `cp_async_wait_group(0)` and a barrier

    Called by a warpgroup, after a barrier of its warps: PTX does not say which rows of Q a warp reads in its
    part of a wgmma, so all warps must be done with the previous Q. Call it before the first keys are
    requested; otherwise the loads of Q wait for those of the keys.
    """
    lane = opaque(lane)
    in_registers = cute.size(q_rmem, mode=[cute.rank(q_rmem) - 1])
    target = cute.recast_ptr(sq.iterator, cute.make_swizzle(0, 4, 3), dtype=q.element_type)
    for i in cutlass.range_constexpr(TILE_M // 16):
        row = warp * 16 + 4 * i + lane // 8
        source = _row(q, sequence, heads, rows, first_row + row, kv_head) + lane % 8 * 8
        for n in cutlass.range_constexpr(in_registers, len(order)):
            place = target + ((n - in_registers) * TILE_M * K_CHUNK + swizzled(row, lane % 8))
            _load_16_or_zeros(place, source + order[n] * K_CHUNK, first_row + row < rows)
    # Of each 16 channels a lane holds channel pairs lane % 4 and lane % 4 + 4, of its row and of the row 8
    # further.
    words = cute.make_tensor(
        cute.recast_ptr(q_rmem.iterator, dtype=Uint32), cute.make_layout((2, 2, K_CHUNK // 16, in_registers))
    )
    for r in cutlass.range_constexpr(2):
        row = first_row + warp * 16 + lane // 4 + 8 * r
        pointer = cute.recast_ptr(_row(q, sequence, heads, rows, row, kv_head), dtype=Uint32)
        pairs = cute.make_tensor(pointer + lane % 4, cute.make_layout((2, HEAD_DIM // 16), stride=(4, 8)))
        for n in cutlass.range_constexpr(in_registers):
            for step in cutlass.range_constexpr(K_CHUNK // 16):
                for k in cutlass.range_constexpr(2):
                    words[r, k, step, n] = pairs[k, order[n] * (K_CHUNK // 16) + step]
        if row >= rows:
            for n in cutlass.range_constexpr(in_registers):
                for step in cutlass.range_constexpr(K_CHUNK // 16):
                    for k in cutlass.range_constexpr(2):
                        words[r, k, step, n] = Uint32(0)


@cute.jit
def _row(q, sequence, heads, rows, row, kv_head):
    """Return the address of a row, or of the last row if `row` is past it."""
    inside = cutlass.min(row, rows - 1)
    return q[sequence, inside // heads, kv_head * heads + inside % heads, None].iterator


@cute.jit
def _load_16_or_zeros(target: cute.Pointer, source: cute.Pointer, valid: Boolean):
    """Copy 16 bytes between 16-byte-aligned addresses; if `valid` is False, write zeros and read nothing."""
    size = Int32(16) if valid else Int32(0)
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2}; cp.async.commit_group;",
        read_only_args=[Int32(target.toint()), Int64(source.toint()), size],
    )
