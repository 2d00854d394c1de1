"""Loads and stores of shared memory at byte addresses, for memory that contains several types; and copies of 8 x 8
matrices of 16-bit numbers between shared memory and a warp's registers, in the register layout of wgmma and mma."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32, const_expr


@cute.jit
def load_16(address: Int32):
    """Load 16 bytes at an address that is a multiple of 16, as four words."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.b32 {" + "{$w0}, {$w1}, {$w2}, {$w3}" + "}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


@cute.jit
def load_registers(address: Int32) -> cute.Tensor:
    """Load 16 bytes like `load_16`, but return a tensor of four words in registers."""
    words = cute.make_rmem_tensor((4,), Uint32)
    loaded = load_16(address)
    for i in cutlass.range_constexpr(4):
        words[i] = loaded[i]
    return words


@cute.jit
def load_4(address: Int32) -> Uint32:
    return cute.arch.inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address])


@cute.jit
def load_8(address: Int32):
    """Load 8 bytes at an address that is a multiple of 8, as two words."""
    return cute.arch.inline_ptx(
        "ld.shared.v2.b32 {" + "{$w0}, {$w1}" + "}, [{$r0}];", write_only_types=[Uint32] * 2, read_only_args=[address]
    )


@cute.jit
def store_4(address: Int32, word: Uint32):
    cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, word])


@cute.jit
def store_16(address: Int32, words):
    """Store four words to an address that is a multiple of 16."""
    cute.arch.inline_ptx(
        "st.shared.v4.b32 [{$r0}], {" + "{$r1}, {$r2}, {$r3}, {$r4}" + "};", read_only_args=[address, *words]
    )


@cute.jit
def load_byte(address: Int32) -> Uint32:
    return cute.arch.inline_ptx("ld.shared.u8 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address])


@cute.jit
def load_matrices(address: Int32):
    """Load four 8 x 8 matrices; lane 8 i + r gives the address of row r of matrix i. -> one word per matrix, with
    columns 2 (lane % 4) and 2 (lane % 4) + 1 of row lane / 4."""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {" + "{$w0}, {$w1}, {$w2}, {$w3}" + "}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


@cute.jit
def load_matrices_transposed(address: Int32):
    """Load four matrices like `load_matrices`, but transposed: each word has rows 2 (lane % 4) and 2 (lane % 4) + 1 of
    column lane / 4."""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {" + "{$w0}, {$w1}, {$w2}, {$w3}" + "}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


@cute.jit
def pack(low: Float32, high: Float32, dtype: cutlass.Constexpr):
    """Round two numbers to `dtype`, bf16 or fp16, and return them in a word, `low` in the lower half."""
    kind = "bf16x2" if const_expr(dtype is BFloat16) else "f16x2"
    return cute.arch.inline_ptx(
        f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Uint32], read_only_args=[high, low]
    )


@cute.jit
def store_matrices(address: Int32, words):
    """Store one, two or four 8 x 8 matrices; lane 8 i + r gives the address of row r of matrix i. `words` has one word
    per matrix: columns 2 (lane % 4) and 2 (lane % 4) + 1 of row lane / 4."""
    _store(address, words, "")


@cute.jit
def store_transposed(address: Int32, words):
    """Store matrices like `store_matrices`, but transposed: each word has rows 2 (lane % 4) and 2 (lane % 4) + 1 of
    column lane / 4."""
    _store(address, words, ".trans")


@cute.jit
def _store(address: Int32, words, kind: cutlass.Constexpr):
    count = len(words)
    registers = ", ".join(f"{{$r{i + 1}}}" for i in range(count))
    cute.arch.inline_ptx(
        f"stmatrix.sync.aligned.m8n8.x{count}{kind}.shared.b16 [{{$r0}}], " + "{" + registers + "};",
        read_only_args=[address, *words],
    )


@cute.jit
def swizzled(row, vector):
    """Return the index of the first element of vector `vector` in row `row` of a swizzled tile.

    A row is 64 elements of 16 bits, and a vector is 8 elements. The swizzle is wgmma's 128-byte swizzle.
    """
    return row * 64 + (vector ^ (row % 8)) * 8
