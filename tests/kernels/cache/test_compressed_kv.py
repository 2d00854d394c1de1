"""The shipped variants of the compressor compile to sm_90a: wide loads, all of a part at once, no spills."""

from dsa.kernels.cache import compressed_kv_sm90 as kernels
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble, instructions_in_order
from tests.kernels.variants import shipped


@shipped(kernels.compile_write_compressed_kv)
def test_sass(arguments):
    code = cubin(kernels.compile_write_compressed_kv, *arguments)
    sass = disassemble(code)
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    # Of a token two projections and ape; other instructions for those in the state, unless both are fp32.
    dtype, _, ratio, overlap, _ = arguments
    tokens, loads = ratio if overlap else 8, 3 if dtype == "float32" else 5
    (instructions,) = instructions_in_order(code)
    assert instructions[: instructions.index("MUFU")].count("LDG") >= tokens * loads + 4
    # A thread of a CTA for 512 channels of two blocks in fp32: three of these fit on a multiprocessor.
    assert sass.registers <= (80 if arguments[:2] == ("float32", 512) and overlap else 168)
