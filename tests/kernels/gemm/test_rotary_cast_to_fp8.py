"""Every shipped variant of heads rotated and cast compiles to sm_90a without spills, with wide loads."""

from dsa.kernels.gemm import rotary_cast_to_fp8_sm90 as kernels
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped


@shipped(kernels.compile_rotary_cast_to_fp8)
def test_sass(arguments):
    dtype, _ = arguments
    sass = disassemble(cubin(kernels.compile_rotary_cast_to_fp8, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.registers <= 32  # all of a multiprocessor's threads
    # A lane's channels, and four angles' cos and sin; its bytes and a scale.
    assert sass.instructions["LDG"] == kernels.CHANNELS * (4 if dtype == "float32" else 2) // 16 + 2
    assert sass.instructions["STG"] == 2
