"""Reads and writes of shared memory at byte addresses, where there is no tensor of one type."""

import cutlass.cute as cute
from cutlass import Int32, Uint32


@cute.jit
def load_16(address: Int32):
    """The 16 bytes at a multiple of 16, as four words."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.b32 {" + "{$w0}, {$w1}, {$w2}, {$w3}" + "}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


@cute.jit
def load_4(address: Int32) -> Uint32:
    return cute.arch.inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address])


@cute.jit
def load_8(address: Int32):
    """The 8 bytes at a multiple of 8, as two words."""
    return cute.arch.inline_ptx(
        "ld.shared.v2.b32 {" + "{$w0}, {$w1}" + "}, [{$r0}];", write_only_types=[Uint32] * 2, read_only_args=[address]
    )


@cute.jit
def store_4(address: Int32, word: Uint32):
    cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, word])


@cute.jit
def store_16(address: Int32, words):
    """Four words to the 16 bytes at a multiple of 16."""
    cute.arch.inline_ptx(
        "st.shared.v4.b32 [{$r0}], {" + "{$r1}, {$r2}, {$r3}, {$r4}" + "};", read_only_args=[address, *words]
    )


@cute.jit
def load_byte(address: Int32) -> Uint32:
    return cute.arch.inline_ptx("ld.shared.u8 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address])
