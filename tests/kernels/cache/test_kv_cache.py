"""SASS of the MLA cache's kernels: loads and stores of 16 bytes, and conversions in hardware."""

from dsa.kernels.cache import kv_cache_sm90 as kernels
from dsa.kernels.cache.limits import FLOAT_DTYPES
from tests.kernels.variants import assert_counts, sass_of, shipped

SLOT = 2  # load instructions for a slot: its low word, and its high word, which only int64 slots have
REGISTERS = 64  # allows 1024 threads per SM; fewer threads do not hide the latency of memory


def steps(dtype):
    """Return the number of 16-byte loads or stores for a lane's channels without RoPE, in rows of this dtype."""
    return 4 if dtype == "float32" else 2


@shipped(kernels.compile_write_kv_cache)
def test_write(sass, arguments):
    dtype, layout, _ = arguments
    loads, stores = kernels.UNROLL, kernels.UNROLL
    if layout not in FLOAT_DTYPES:
        # A step loads 16 bytes, and stores values and a scale. The last load and store are for the lane's pair of RoPE
        # channels.
        loads, stores = steps(dtype) + 1, 2 * steps(dtype) + 1
    assert_counts(sass, LDG=loads + SLOT, STG=stores)
    assert sass.registers <= REGISTERS


@shipped(kernels.compile_read_kv_cache)
def test_read(sass, arguments):
    layout, dtype = arguments
    loads, stores = kernels.UNROLL, kernels.UNROLL
    if layout not in FLOAT_DTYPES:
        loads, stores = 2 * steps(dtype) + 1, steps(dtype) + 1
    assert_counts(sass, LDG=loads + SLOT, STG=stores)
    assert sass.registers <= REGISTERS


@shipped(kernels.compile_write_mla_cache)
def test_write_of_the_projection(sass, arguments):
    dtype, layout, channels, interleaved, _ = arguments
    angles, row = 2 if interleaved else 4, steps(dtype) + 1
    if layout not in FLOAT_DTYPES:
        stores = 2 * steps(dtype)
    else:
        stores = steps(dtype) * (2 if layout == "float32" and dtype != "float32" else 1)
    # 4: a lane's 16 fp32 norm weights. channels == 512: the norm covers the RoPE channels, so the lane loads the
    # weights of a pair. `angles`: in RoPE on halves, each channel of the pair has a cosine and a sine.
    assert_counts(sass, LDG=row + 4 + (channels == 512) + angles + SLOT, STG=row + stores + 1)
    # 72 registers allow 896 threads per SM.
    assert sass.registers <= (72 if layout == "v4" and channels == 512 and not interleaved else REGISTERS)


def test_quantisation_is_in_hardware():
    write = sass_of(kernels.compile_write_kv_cache, "bfloat16", "v32", True)
    # F2FP: a lane has 16 channels, and each F2FP converts two. SHFL: the channels are in two groups. For each group, 4
    # shuffles find the largest magnitude in 16 lanes.
    assert_counts(write, F2FP=8, SHFL=8)
    assert_counts(sass_of(kernels.compile_read_kv_cache, "v32", "float32"), F2FP=8)
