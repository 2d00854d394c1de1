"""The shipped variants of the compressor compile to sm_90a: wide loads, no spills."""

from dsa.cute.compile_cache import cubin
from dsa.cute.sass import disassemble
from dsa.kernels.cache import compressed_kv_sm90 as kernels
from tests.kernels.variants import shipped


@shipped(kernels.compile_write_compressed_kv)
def test_sass(arguments):
    sass = disassemble(cubin(kernels.compile_write_compressed_kv, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    # Eight tokens at once: of a new token two projections and ape, of one in the state its two.
    assert sass.instructions["LDG"] >= kernels.TOKENS_AT_ONCE * 5
    assert sass.instructions["MUFU"] >= kernels.TOKENS_AT_ONCE * kernels.CHANNELS
