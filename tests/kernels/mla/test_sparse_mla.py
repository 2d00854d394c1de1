"""The shipped variants of sparse MLA attention and of its end compile to sm_90a: wgmma, gathers, no spills."""

from dsa.cute.compile_cache import cubin
from dsa.cute.sass import disassemble
from dsa.kernels.mla import sparse_mla_combine_sm90 as combine
from dsa.kernels.mla import sparse_mla_fp8_kv_sm90 as of_bytes
from dsa.kernels.mla import sparse_mla_sm90 as kernels
from dsa.kernels.mla import sparse_mla_swap_ab_sm90 as few
from dsa.kernels.mla.mla_attention import LOADER_REGISTERS, OUTPUT_REGISTERS, SCORE_REGISTERS
from dsa.kernels.mla.mla_tiles import CHUNK, TILE
from dsa.kernels.mla.swap_ab_attention import SCORERS
from tests.kernels.variants import shipped

K16 = 16  # channels or keys of a wgmma instruction
ALL = 65536 // 128  # registers of a multiprocessor, for each thread of a warpgroup


@shipped(kernels.compile_sparse_mla)
def test_sass(arguments):
    _, channels, *_ = arguments
    sass = disassemble(cubin(kernels.compile_sparse_mla, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    # Scores, and the two units of a warpgroup's half of the value.
    assert sass.instructions["HGMMA"] == channels // K16 + 2 * TILE // K16
    # A warp gathers a chunk of 64 channels of four keys at a time, and has 16 keys.
    assert sass.instructions["LDGSTS"] == channels // CHUNK * 4
    assert sass.registers * kernels.THREADS <= 65536
    assert SCORE_REGISTERS + 2 * OUTPUT_REGISTERS + LOADER_REGISTERS <= ALL


@shipped(few.compile_sparse_mla_few)
def test_few_heads_sass(arguments):
    _, channels, *_ = arguments
    sass = disassemble(cubin(few.compile_sparse_mla_few, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    # Scores, and four products of 64 channels; with as little waiting as the compile-time order allows.
    assert sass.instructions["HGMMA"] == channels // K16 + 4 * TILE // K16
    assert sass.instructions["WARPGROUP"] < sass.instructions["HGMMA"]
    assert sass.instructions["LDGSTS"] == channels // CHUNK * 4
    warpgroups = SCORERS + 3
    assert sass.registers * warpgroups * 128 <= 65536
    given = SCORERS * few.SCORE_REGISTERS + 2 * few.OUTPUT_REGISTERS + few.LOADER_REGISTERS
    assert given <= sass.registers * warpgroups


@shipped(of_bytes.compile_sparse_mla_bytes)
def test_of_bytes_sass(arguments):
    channels, rows, _ = arguments
    sass = disassemble(cubin(of_bytes.compile_sparse_mla_bytes, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    # Scores, and the four products of a warpgroup's half of the value.
    assert sass.instructions["HGMMA"] == channels // K16 + 4 * TILE // K16
    # Without registers to spare the assembler waits behind every product: two instructions more for each.
    assert sass.instructions["WARPGROUP"] < sass.instructions["HGMMA"]
    # A key, and a query's row for each slot; nothing is gathered but the scales of the layout that has them apart.
    assert sass.instructions["UBLKCP"] == (3 if rows == 64 else 2)
    assert sass.instructions["LDGSTS"] == (0 if channels == 576 else 1)
    # The warpgroups share what the launch gives to all of them.
    scorers, (score, output, loader) = of_bytes.SCORERS[rows], of_bytes.REGISTERS[rows]
    assert sass.registers * (scorers + 3) * 128 <= 65536
    assert scorers * score + 2 * output + loader <= sass.registers * (scorers + 3)


@shipped(combine.compile_sparse_mla_combine)
def test_the_end_sass(arguments):
    sass = disassemble(cubin(combine.compile_sparse_mla_combine, *arguments))
    assert sass.stack == 0 and sass.registers <= 128
