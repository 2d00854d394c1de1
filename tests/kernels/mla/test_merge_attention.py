"""The shipped variants of the merge compile to sm_90a without spills, with loads and stores of 16 bytes."""

from dsa.kernels.mla import merge_attention_sm90 as kernels
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped

BITS = {"bfloat16": 16, "float16": 16, "float32": 32}


@shipped(kernels.compile_merge_attention)
def test_sass(arguments):
    dtype, branches, sink = arguments
    sass = disassemble(cubin(kernels.compile_merge_attention, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.registers <= 80  # 24 warps a multiprocessor
    # The first chunk's vectors and a later chunk's; a row's LSEs and sink. More would be narrower ones.
    unroll = kernels.unroll_of(kernels.VECTOR_BITS // BITS[dtype], branches)
    assert sass.instructions["LDG"] == 2 * unroll * branches + branches + sink
    assert sass.instructions["STG"] == unroll + 1


def test_every_variant_is_shipped_once():
    variants = [arguments for _, arguments in kernels.shipped_variants()]
    assert len(variants) == len(set(variants)) == 3 * 4 * 2
