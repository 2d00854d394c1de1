"""The shipped variants of sparse MLA attention and of its end compile to sm_90a: wgmma, gathers, no spills."""

import pytest

from dsa.cute.compile_cache import cubin
from dsa.cute.latent_attention import OUTPUT_REGISTERS, WARPGROUP
from dsa.cute.latent_tiles import CHUNK, TILE
from dsa.cute.sass import disassemble
from dsa.kernels import sparse_mla_combine_sm90 as combine
from dsa.kernels import sparse_mla_sm90 as kernels

K16 = 16  # channels or keys of a wgmma instruction


@pytest.mark.parametrize("arguments", [v for _, v in kernels.shipped_variants()], ids=str)
def test_sass(arguments):
    _, channels, fp8, *_ = arguments
    sass = disassemble(cubin(kernels.compile_sparse_mla, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    # Scores, and the two units of a warpgroup's half of the value.
    assert sass.instructions["HGMMA"] == channels // K16 + 2 * TILE // K16
    # A warp gathers a chunk of 64 channels of four keys at a time, and has 16 keys. Bytes: the queries' rows so, too.
    gathers = channels // CHUNK * 4
    assert sass.instructions["LDGSTS"] == gathers if not fp8 else sass.instructions["LDGSTS"] > gathers
    assert sass.instructions["F2FP"] >= (16 if fp8 else 1)
    assert sass.registers * kernels.THREADS <= 65536
    roles = kernels.registers(fp8)
    assert (sum(roles) + 2 * OUTPUT_REGISTERS) * WARPGROUP <= 65536


def test_the_end_sass():
    for compile_function, arguments in combine.shipped_variants():
        sass = disassemble(cubin(compile_function, *arguments))
        assert sass.stack == 0 and sass.registers <= 128
