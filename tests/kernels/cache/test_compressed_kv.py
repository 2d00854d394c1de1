"""The shipped variants of the compressor compile to sm_90a: wide loads, no spills."""

from dsa.cute.compile_cache import cubin
from dsa.cute.sass import disassemble
from dsa.kernels.cache import compressed_kv_sm90 as kernels
from dsa.ops.cache import compressed_kv as op
from tests.kernels.variants import shipped


@shipped(kernels.compile_write_compressed_kv)
def test_sass(arguments):
    sass = disassemble(cubin(kernels.compile_write_compressed_kv, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    # Eight slots at once: of a new token two projections and ape, of one in the state its two.
    assert sass.instructions["LDG"] >= kernels.TOKENS_AT_ONCE * 5
    assert sass.instructions["MUFU"] >= kernels.TOKENS_AT_ONCE * kernels.CHANNELS


def test_the_op_takes_what_there_are_kernels_for():
    assert op.KINDS == kernels.KINDS
    assert {str(dtype).removeprefix("torch.") for dtype in op.DTYPES} == set(kernels.DTYPES)
