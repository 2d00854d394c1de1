"""wgmma operands of the indexer's gradients, made in registers: dI where a head is active, 0 elsewhere."""

import cutlass.cute as cute
from cutlass import Int32, Uint32


@cute.jit
def load_pairs(address: Int32):
    """ldmatrix of 4 matrices, in each of which all lanes' addresses are the same row of 8 numbers: lane l gets the
    pair number l % 4 of each row. Lanes 8 i to 8 i + 7 give the address of row i."""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {" + "{$w0}, {$w1}, {$w2}, {$w3}" + "}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


@cute.jit
def load_doubled(address: Int32):
    """The same, transposed: lane l gets number l / 4 of each row, twice."""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {" + "{$w0}, {$w1}, {$w2}, {$w3}" + "}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


@cute.jit
def multiply_pairs(a: Uint32, b: Uint32) -> Uint32:
    """Products of two pairs of bf16, rounded."""
    return cute.arch.inline_ptx("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


@cute.jit
def load_word_pair(address: Int32):
    """8 bytes at a multiple of 8, as two words."""
    return cute.arch.inline_ptx(
        "ld.shared.v2.b32 {" + "{$w0}, {$w1}" + "}, [{$r0}];", write_only_types=[Uint32] * 2, read_only_args=[address]
    )
