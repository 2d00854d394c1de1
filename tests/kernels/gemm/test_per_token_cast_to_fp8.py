"""Every shipped variant of the FP8 cast compiles to sm_90a without spills, with wide loads and hardware conversion."""

import numpy as np

from dsa.kernels.gemm import per_token_cast_to_fp8_sm90 as kernels
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped


@shipped(kernels.compile_per_token_cast_to_fp8)
def test_sass(arguments):
    sass = disassemble(cubin(kernels.compile_per_token_cast_to_fp8, *arguments))
    config, scattered = arguments[3:]
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    # 1024 threads a multiprocessor at the least: the loads of fewer do not fill the memory's latency.
    assert sass.registers <= 64
    bytes_per_thread = config.channels * config.groups * (4 if arguments[0] == "float32" else 2)
    # Of rows that go elsewhere also each one's place.
    assert sass.instructions["LDG"] == bytes_per_thread // 16 + scattered * config.groups
    assert sass.instructions["F2FP"] >= config.channels * config.groups // 2


def test_powers_of_two_do_not_depend_on_how_448_divides():
    """The kernel multiplies with 1 / 448 in fp32, a CPU divides: for all mantissas the next power of two is one."""
    amax = (np.arange(1 << 23, dtype=np.uint32) | np.uint32(127 << 23)).view(np.float32)
    product, quotient = amax * np.float32(1 / 448), amax / np.float32(448)
    assert not np.array_equal(product, quotient)
    powers = [(x.view(np.uint32) + np.uint32(0x007FFFFF)) & np.uint32(0xFF800000) for x in (product, quotient)]
    assert np.array_equal(*powers)
