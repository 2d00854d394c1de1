"""Every shipped variant of SwiGLU with a cast compiles to sm_90a without spills, with wide loads and few registers."""

from dsa.kernels.gemm import swiglu_cast_sm90 as kernels
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped


@shipped(kernels.compile_swiglu_cast)
def test_sass(arguments):
    dtype, use_ue8m0, _, ragged = arguments
    sass = disassemble(cubin(kernels.compile_swiglu_cast, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.registers <= 48  # 40 warps a multiprocessor
    assert sass.instructions["LDG"] == 2 * kernels.CHANNELS * (4 if dtype == "float32" else 2) // 16
    assert sass.instructions["STG"] == (2 if ragged else 1) + 1  # q, and the scale
    # One exponential and one reciprocal an element, and those of the group's scale.
    assert sass.instructions["MUFU"] <= 2 * kernels.CHANNELS + (1 if use_ue8m0 else 5)
    # What a multiprocessor issues while the bytes of 16-bit operands pass is 34 an element.
    assert sum(sass.instructions.values()) <= 36 * kernels.CHANNELS


@shipped(kernels.compile_swiglu_cast_of_matrices)
def test_sass_of_several_matrices(arguments):
    """The same with a load of the last end, in a loop over groups."""
    dtype, use_ue8m0, _ = arguments
    sass = disassemble(cubin(kernels.compile_swiglu_cast_of_matrices, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.registers <= 48 and 48 * kernels.THREADS * kernels.RESIDENT <= 65536
    assert sass.instructions["LDG"] == 2 * kernels.CHANNELS * (4 if dtype == "float32" else 2) // 16 + 1
    assert sass.instructions["STG"] == 2  # q, and the scale
    assert sass.instructions["MUFU"] <= 2 * kernels.CHANNELS + (1 if use_ue8m0 else 5)
    assert sum(sass.instructions.values()) <= 36 * kernels.CHANNELS


def test_every_variant_is_shipped_once():
    variants = kernels.shipped_variants()
    assert len(variants) == len(set(variants)) == 3 * 2 * 2 * (2 + 1)
