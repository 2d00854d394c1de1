"""SASS of the merge: loads and stores of 16 bytes."""

from dsa.kernels.mla import merge_attention_sm90 as kernels
from tests.kernels.variants import assert_counts, shipped

BITS = {"bfloat16": 16, "float16": 16, "float32": 32}


@shipped(kernels.compile_merge_attention)
def test_sass(sass, arguments):
    dtype, branches, sink = arguments
    unroll = kernels.unroll_of(kernels.VECTOR_BITS // BITS[dtype], branches)
    # LDG: a row's LSEs and its sink, and the vectors of all branches. The code for the vectors exists twice: for the
    # first chunk and for later chunks. A larger count would mean narrower loads.
    assert_counts(sass, LDG=2 * unroll * branches + branches + sink, STG=unroll + 1)
    assert sass.registers <= 80  # allows 24 warps per SM
