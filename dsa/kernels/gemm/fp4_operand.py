"""Conversion of FP4 weights (e2m1) to e4m3 operands of wgmma ("widening"). The result is in registers, as wgmma's
operand A, or in shared memory.

A byte contains two e2m1 codes; the code of the even channel is in the low nibble. 32 adjacent channels of a row form a
group. A group has one scale, a power of two, which is stored as an e8m0 byte. Each block of 128 x 128 has a block
scale, also a power of two. Let r be the ratio of a group's scale to the block scale. An e2m1 number times r is exactly
an e4m3 number if the exponent of r is from -8 to 6. The exponent is at most 6, since the block scale is 2^-6 times the
largest scale of the block's groups. `fp4_block_scales` refuses weights if the exponent of a group is below -8, unless
all numbers of this group are zero. The kernels do not check it: an exponent below -8 would select a wrong table.
The eight e2m1 magnitudes, multiplied by r, form a table of eight bytes, and a byte permutation looks up four of them at
a time. The tables for all exponents together are 128 bytes of shared memory; a table's index is its exponent modulo 16.
The tables occupy different banks, so reads of different tables do not conflict. Zero is zero in every table, so a group
of zeros can have any scale.

Let q = lane % 4. For an operand in registers, wgmma expects in a lane 8 of each 32 channels: channels 4 q to 4 q + 3,
and channels 16 + 4 q to 19 + 4 q. But eight adjacent channels are one word of FP4, and ldmatrix gives each lane one
word per matrix. So the lane gets channels 8 q to 8 q + 7 instead, and the channels of the other operand are permuted in
the same way: its words, of four channels each, are stored in the order 0, 2, 4, 6, 1, 3, 5, 7 (`ordered_place`). The
tensor cores align all 32 products of an instruction and add them at once, so the sum has the same bits as in the plain
order.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from dsa.cute.shared_memory import load_8, store_4

TABLE_BYTES = 128  # all tables together; they must be aligned to 8 bytes
_MAGNITUDES = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0  # magnitudes of e2m1, indexed by the code without its sign
_TABLES, _BYTES = 16, 8  # number of tables, bytes per table
_LOWEST = -8  # the smallest allowed exponent of r, the ratio of a group's scale to the block scale


@cute.jit
def write_tables(tables: Int32, lane):
    """Write the tables to shared memory at the address `tables`. One warp calls this; each of its first 16 lanes writes
    one table."""
    if lane < _TABLES:
        exponent = ((lane - _LOWEST) & (_TABLES - 1)) + _LOWEST
        factor = (Uint32(exponent + 127) << 23).bitcast(Float32)
        for half in cutlass.range_constexpr(2):
            word = _four_e4m3(*[Float32(x) * factor for x in _MAGNITUDES[4 * half : 4 * half + 4]])
            store_4(tables + lane * _BYTES + 4 * half, word)


@cute.jit
def table_places(scales: Uint32, block_scale: Float32) -> Uint32:
    """Return the byte offsets of four groups' tables, one per byte of the result. The groups are the 128 channels of
    one row in one block.

    scales       the groups' e8m0 bytes, four in a word; any bytes give offsets inside the tables
    block_scale  a power of two
    """
    base = (0 - (block_scale.bitcast(Uint32) >> 23) & (_TABLES - 1)) * Uint32(0x08080808)
    return (((scales << 3) & Uint32(0x78787878)) + base) & Uint32(0x78787878)


@cute.jit
def table_places_of_blocks(words, group, block_scales) -> Uint32:
    """Return the byte offsets of four tables. Byte i of the result is for group number `group` (0 to 3) of a row in
    block i.

    words         [4]: a word per block; its bytes are the e8m0 bytes of the row's four groups in this block
    block_scales  [4]: the scales of the blocks, powers of two
    """
    chosen = group | ((group + 4) << 4)
    pairs = [select_bytes(words[2 * i], words[2 * i + 1], chosen) for i in range(2)]
    scales = select_bytes(*pairs, Int32(0x5410))
    base = Uint32(0)
    for i in cutlass.range_constexpr(4):
        own = 0 - (block_scales[i].bitcast(Uint32) >> 23) & (_TABLES - 1)
        base = base | (own << (8 * i + 3))
    return (((scales << 3) & Uint32(0x78787878)) + base) & Uint32(0x78787878)


@cute.jit
def select_bytes(low: Uint32, high: Uint32, selector: Int32) -> Uint32:
    """Return a word of four bytes. Byte i of the result is the byte that nibble i of the selector selects: 0 to 3 from
    low, 4 to 7 from high."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Uint32], read_only_args=[low, high, selector]
    )


@cute.jit
def load_table(tables: Int32, places: Uint32, group: cutlass.Constexpr):
    """Load the table whose offset is byte `group` of `places`, a result of `table_places`. -> (magnitudes of codes 0 to
    3, magnitudes of codes 4 to 7), as e4m3 bytes."""
    place = cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, 0, {0x4440 + group};", write_only_types=[Int32], read_only_args=[places]
    )
    return load_8(tables + place)


@cute.jit
def widen(codes: Uint32, low: Uint32, high: Uint32):
    """Convert eight adjacent e2m1 codes to e4m3 numbers. -> (word of the first four numbers, word of the other four).
    low and high are the group's table, as `load_table` returns it.

    This takes nine instructions. Byte permutations look up the magnitudes: the selectors are the codes' magnitude bits.
    Two more permutations move the sign bits to the top bits of the results' bytes. Before them, a shift by four moves
    the signs of even channels from the middle to the top of a byte.
    """
    return cute.arch.inline_ptx(
        "{{ .reg .b32 m, n, e, s, t; and.b32 m, {$r0}, 0x77777777; shr.b32 n, m, 16; shl.b32 e, {$r0}, 4; "
        "prmt.b32 s, e, {$r0}, 0x5140; prmt.b32 t, e, {$r0}, 0x7362; "
        "prmt.b32 m, {$r1}, {$r2}, m; prmt.b32 n, {$r1}, {$r2}, n; "
        "lop3.b32 {$w0}, m, s, 0x80808080, 0xF8; lop3.b32 {$w1}, n, t, 0x80808080, 0xF8; }}",
        write_only_types=[Uint32, Uint32],
        read_only_args=[codes, low, high],
    )


def ordered_place(word):
    """Return the index at which word number `word` (four channels) of a row of activations is stored. The activations
    then have the order of channels of the widened weights."""
    return word // 8 * 8 + word % 2 * 4 + word % 8 // 2


@cute.jit
def gather_4(target: Int32, source: Int64, valid: Boolean):
    """Copy 4 bytes asynchronously from global address `source` to shared address `target`. If not `valid`, write zeros
    and read nothing."""
    size = Int32(4) if valid else Int32(0)
    cute.arch.inline_ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 4, {$r2};",
        read_only_args=[target, source, size],
    )


@cute.jit
def _four_e4m3(a: Float32, b: Float32, c: Float32, d: Float32) -> Uint32:
    return cute.arch.inline_ptx(
        "{{ .reg .b16 x, y; cvt.rn.satfinite.e4m3x2.f32 x, {$r1}, {$r0}; "
        "cvt.rn.satfinite.e4m3x2.f32 y, {$r3}, {$r2}; mov.b32 {$w0}, {x, y}; }}",
        write_only_types=[Uint32],
        read_only_args=[a, b, c, d],
    )
