"""The shipped variants of the indexer's fused inputs and cache copies compile to sm_90a without spills."""

from dsa.kernels.cache import indexer_cache_sm90 as cache_kernels
from dsa.kernels.indexer import indexer_inputs_sm90 as kernels
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped

WIDE_LOADS = {"bfloat16": 2, "float16": 2, "float32": 4}  # of 16 bytes, for a lane's 16 channels


def angle_loads(rotated, interleaved):
    return 2 * (2 if interleaved else 4)


@shipped(kernels.compile_quantize_indexer_queries)
def test_queries(arguments):
    dtype, rotated, interleaved, *_ = arguments
    sass = disassemble(cubin(kernels.compile_quantize_indexer_queries, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and sass.registers <= 64
    # The head's weight is the one more.
    assert sass.instructions["LDG"] == WIDE_LOADS[dtype] + angle_loads(rotated, interleaved) + 1
    assert sass.instructions["STG"] == 2 and sass.instructions["F2FP"] >= 8


@shipped(kernels.compile_write_indexer_keys)
def test_keys(arguments):
    dtype, _, rotated, interleaved, *_ = arguments
    sass = disassemble(cubin(kernels.compile_write_indexer_keys, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and sass.registers <= 64
    # The norm's weight and bias are 4 each; a slot of 64 bits comes in one load or two.
    assert sass.instructions["LDG"] - WIDE_LOADS[dtype] - angle_loads(rotated, interleaved) - 8 in (1, 2)
    assert sass.instructions["STG"] == 2 and sass.instructions["F2FP"] >= 8


@shipped(cache_kernels.compile_indexer_cache)
def test_cache(arguments):
    sass = disassemble(cubin(cache_kernels.compile_indexer_cache, *arguments))
    assert sass.stack == 0 and sass.registers <= 32 and sass.instructions["STG"] == 2
