"""SASS of the kernels that prepare the indexer's queries and keys, and of those that copy keys to and from the cache:
loads of 16 bytes, and conversions in hardware."""

from dsa.kernels.cache import indexer_cache_sm90 as cache_kernels
from dsa.kernels.indexer import indexer_inputs_sm90 as kernels
from tests.kernels.variants import assert_counts, shipped


def loads_of(dtype, interleaved):
    """Return the number of 16-byte loads of a lane's 16 channels, and of cos and sin."""
    return (4 if dtype == "float32" else 2) + 2 * (2 if interleaved else 4)


@shipped(kernels.compile_quantize_indexer_queries)
def test_queries(sass, arguments):
    dtype, _, interleaved, *_ = arguments
    assert_counts(sass, LDG=loads_of(dtype, interleaved) + 1, STG=2)  # one load for the head's weight
    assert sass.instructions["F2FP"] >= 8 and sass.registers <= 64


@shipped(kernels.compile_write_indexer_keys)
def test_keys(sass, arguments):
    dtype, _, _, interleaved, *_ = arguments
    # The norm's weight and bias need 4 loads each. The slot needs one load, or up to two if it is int64.
    assert sass.instructions["LDG"] - loads_of(dtype, interleaved) - 8 in (1, 2)
    assert_counts(sass, STG=2)
    assert sass.instructions["F2FP"] >= 8 and sass.registers <= 64


@shipped(cache_kernels.compile_indexer_cache)
def test_cache(sass):
    assert_counts(sass, STG=2)
    assert sass.registers <= 32
