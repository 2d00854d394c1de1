"""Parts of the consumer warpgroups of multi-head attention (mha_varlen_fwd_sm90.py): selection bits, and the epilogue.

Selection: one bit per key says whether the key is selected (selection_bits_sm90.py). To set the scores of unselected
keys to -inf before the maxima would cost one instruction per score, in the pipe that computes the maxima. Instead the
max instructions are predicated by the bits. ptxas extracts seven predicates from a word with one instruction (R2P) if
adjacent bits are used one after the other. So a row's scores are processed in the order of their bits, one byte of the
word (eight scores) at a time.

Epilogue: O goes through shared memory. A warp has 16 rows and stages OUT_COLUMNS channels at a time, so that it writes
128 contiguous bytes of each row to global memory. The 16-byte chunk c of row r is at position c ^ (r % 8),
which avoids bank conflicts.
"""

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from dsa.cute.shared_memory import load_16, pack, store_matrices
from dsa.cute.sm90 import LN2, LOG2E, opaque
from dsa.kernels.mla.mha_producer import OUT_COLUMNS, OUT_ROWS, WorkTileInfo


def places(byte: int, r: int) -> list[int]:
    """Return the accumulator indices of the eight scores of the lane's row r (0 or 1) whose bits are in byte `byte`."""
    return [(8 * byte + bit) // 2 * 4 + 2 * r + bit % 2 for bit in range(8)]


def bit_mask(byte: int, bit: int) -> int:
    """Return an int32 in which only bit `bit` of byte `byte` is set."""
    mask = 1 << 8 * byte + bit
    return mask - (mask >> 31 << 32)


def load_word(address: Int64, key: Int32, known: Int32, bits: int) -> Int32:
    """Load a selection word of `bits` bits, 16 or 32, from global memory. If `key` is outside [0, known), load nothing
    and return -1 (all bits set).

    The load is predicated, not branched, so that ptxas can place it between other instructions. It is not
    ld.global.nc, which ptxas would move over barriers, down to the first use of the word.
    """
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.lt.u32 p, {$r1}, {$r2}; mov.b32 {$w0}, -1; "
        f"@p ld.global.u{bits} {{$w0}}, [{{$r0}}]; }}",
        write_only_types=[Int32],
        read_only_args=[address, key, known],
    )


def low_bits(count: Int32) -> Int32:
    """Return a word whose lowest `count` bits are set; all 32 bits if count is above 31."""
    return cute.arch.inline_ptx(
        "shl.b32 {$w0}, 1, {$r0}; sub.s32 {$w0}, {$w0}, 1;", write_only_types=[Int32], read_only_args=[count]
    )


def after(word: Int32, x: Float32, zero: Int32) -> Int32:
    """Return `word`, computed as word + (bits of x) * zero, so that ptxas cannot use it before x is known. `zero` is 0,
    but ptxas does not know this."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 t; mov.b32 t, {$r1}; mad.lo.s32 {$w0}, t, {$r2}, {$r0}; }",
        write_only_types=[Int32],
        read_only_args=[word, x, zero],
    )


def max_all(before: tuple[Float32, ...], eight: list[Float32]) -> tuple[Float32, Float32]:
    """Return two maxima of the scores `eight`: over even indices, and over odd indices. before: (), or the result for
    earlier scores, which the maxima then include.
    """
    even, odd = ([*before[i : i + 1], *eight[i::2]] for i in range(2))
    return functools.reduce(cute.arch.fmax, even), functools.reduce(cute.arch.fmax, odd)


def max_selected(before: tuple[Float32, ...], eight: list[Float32], word: Int32, byte: int) -> tuple[Float32, Float32]:
    """Return the same as `max_all`, but only of the scores whose bits in byte `byte` of `word` are set.

    If no bit is set and `before` is empty, the maximum is -inf.
    """
    code = ""
    for i in range(8):
        highest, score = f"{{$w{i % 2}}}", f"{{$r{i}}}"
        code += f"{{ .reg .pred p; .reg .b32 t; and.b32 t, {{$r8}}, {bit_mask(byte, i)}; setp.ne.s32 p, t, 0; "
        if i < 2 and not before:
            code += f"selp.f32 {highest}, {score}, 0fFF800000, p; }}"
        else:
            start = f"mov.f32 {highest}, {{$r{9 + i}}}; " if i < 2 else ""
            code += f"{start}@p max.f32 {highest}, {highest}, {score}; }}"
    return cute.arch.inline_ptx(code, write_only_types=[Float32, Float32], read_only_args=[*eight, word, *before])


@cute.jit
def store_rows(
    o: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    sinks: cute.Tensor | None,
    work_tile: WorkTileInfo,
    staged: Int32,
    own_row: Int32,
    warp: Int32,
    lane: Int32,
    few_registers: cutlass.Constexpr,
):
    """Write LSE and O for the warp's 16 rows, except rows past the end of the sequence. O is divided by the row's sum
    of P, plus exp(sink) if the heads have attention sinks, `sinks` [heads]. For a row without keys LSE is +inf and O is
    0.

    staged         address of the warp's staging buffer in shared memory
    own_row        the lane's first row in the work tile; the lane's second row is 8 rows further
    few_registers  recompute here the addresses that depend on the lane, so that they are not kept in registers through
                   the mainloop
    """
    query, row_count, head, dtype = work_tile.query, work_tile.row_count, work_tile.head, out.element_type
    if const_expr(few_registers):
        lane = opaque(lane)
    inverse = cute.make_rmem_tensor((2,), Float32)
    for r in cutlass.range_constexpr(2):
        amount = row_sum[r] + cute.arch.shuffle_sync_bfly(row_sum[r], offset=1)
        amount += cute.arch.shuffle_sync_bfly(amount, offset=2)
        whole = amount
        if const_expr(sinks is not None):
            whole += cute.math.exp2(sinks[head] * LOG2E - row_max[r])
        inverse[r] = 0.0 if amount == 0.0 else 1.0 / whole
        if lane % 4 == 0 and own_row + 8 * r < row_count:
            result = row_max[r] * LN2 + cute.math.log(amount)
            lse[head, query + own_row + 8 * r] = Float32(float("inf")) if amount == 0.0 else result
    own = lane % OUT_ROWS
    first_row = warp * OUT_ROWS
    eight = cute.make_rmem_tensor((4,), Uint32)
    for first in cutlass.range_constexpr(0, 2 * cute.size(o), OUT_COLUMNS):
        for pair in cutlass.range_constexpr(OUT_COLUMNS // 16):
            columns = [first // 2 + 8 * pair + 2 * i for i in range(4)]
            words = [pack(o[i] * inverse[i // 2 % 2], o[i + 1] * inverse[i // 2 % 2], dtype) for i in columns]
            # Lanes 0 to 15 address the 16 rows of 16-byte chunk 2 `pair`. Lanes 16 to 31 address those of chunk 2
            # `pair` + 1.
            store_matrices(staged + own * 128 + ((2 * pair + lane // OUT_ROWS) ^ (own % 8)) * 16, words)
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(0, OUT_ROWS * OUT_COLUMNS // 8, 32):
            r, chunk = (i + lane) // 8, (i + lane) % 8
            if first_row + r < row_count:
                loaded = load_16(staged + r * 128 + (chunk ^ (r % 8)) * 16)
                for j in cutlass.range_constexpr(4):
                    eight[j] = loaded[j]
                cute.autovec_copy(
                    cute.recast_tensor(eight, dtype),
                    cute.local_tile(out[query + first_row + r, head, None], (8,), (first // 8 + chunk,)),
                )
        cute.arch.sync_warp()
