"""The shipped variants of the MLA cache's kernels compile to sm_90a without spills, with wide loads and stores."""

from dsa.kernels.cache import kv_cache_sm90 as kernels
from dsa.kernels.cache.limits import FLOAT_DTYPES
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped

SLOT = 2  # loads: the second is skipped for int32


def steps(dtype):
    """Loads or stores of 16 bytes for a lane's part of the channels before the rope."""
    return 4 if dtype == "float32" else 2


def instructions_of(compile_function, arguments, registers=64):
    sass = disassemble(cubin(compile_function, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    # 1024 threads a multiprocessor at the least: the loads of fewer do not fill the memory's latency.
    assert sass.registers <= registers
    return sass.instructions


def loads_and_stores(compile_function, arguments, registers=64):
    instructions = instructions_of(compile_function, arguments, registers)
    return instructions["LDG"], instructions["STG"]


@shipped(kernels.compile_write_kv_cache)
def test_write(arguments):
    dtype, layout, _ = arguments
    loads, stores = loads_and_stores(kernels.compile_write_kv_cache, arguments)
    if layout in FLOAT_DTYPES:
        assert (loads, stores) == (kernels.UNROLL + SLOT, kernels.UNROLL)
    else:
        # A store of values and one of a scale for each step, and one of the rope pair.
        assert (loads, stores) == (steps(dtype) + 1 + SLOT, 2 * steps(dtype) + 1)


@shipped(kernels.compile_read_kv_cache)
def test_read(arguments):
    layout, dtype = arguments
    loads, stores = loads_and_stores(kernels.compile_read_kv_cache, arguments)
    if layout in FLOAT_DTYPES:
        assert (loads, stores) == (kernels.UNROLL + SLOT, kernels.UNROLL)
    else:
        assert (loads, stores) == (2 * steps(dtype) + 1 + SLOT, steps(dtype) + 1)


@shipped(kernels.compile_write_mla_cache)
def test_write_from_the_projection(arguments):
    dtype, layout, channels, interleaved, _ = arguments
    # A norm over the rope part, whose halves are then turned: 768 threads.
    registers = 72 if layout == "v4" and channels == 512 and not interleaved else 64
    loads, stores = loads_and_stores(kernels.compile_write_mla_cache, arguments, registers)
    angles = 2 if interleaved else 4
    # The norm's weights are 16 a lane, 4 loads, and a pair more where the norm goes over the rope part.
    assert loads == steps(dtype) + 1 + 4 + (channels == 512) + angles + SLOT
    kept = steps(dtype) + 1
    if layout in FLOAT_DTYPES:
        wide = layout == "float32" and dtype != "float32"
        assert stores == kept + steps(dtype) * (2 if wide else 1) + 1
    else:
        assert stores == kept + 2 * steps(dtype) + 1


def test_quantisation_is_in_hardware():
    write = instructions_of(kernels.compile_write_kv_cache, ("bfloat16", "v32", True))
    assert write["F2FP"] == 8 and write["SHFL"] == 8  # two channels each; 16 lanes share a scale, twice
    read = instructions_of(kernels.compile_read_kv_cache, ("v32", "float32"))
    assert read["F2FP"] == 8
