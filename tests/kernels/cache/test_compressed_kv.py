"""SASS of the compressor: a thread issues all loads of a part before it uses their values. A part is a few consecutive
tokens of an entry."""

from dsa.kernels.cache import compressed_kv_sm90 as kernels
from tests.kernels.variants import shipped


@shipped(kernels.compile_write_compressed_kv)
def test_a_part_is_loaded_before_its_first_exponential(sass, in_order, arguments):
    dtype, channels, ratio, overlap, _ = arguments
    # Loads per token: both projections and ape. Projections that are not fp32 need two more, because earlier tokens are
    # read from the fp32 state. The 4 other loads: both boundaries of the sequence, its start and its state slot.
    tokens, loads = ratio if overlap else 8, 3 if dtype == "float32" else 5
    (instructions,) = in_order
    assert instructions[: instructions.index("MUFU")].count("LDG") >= tokens * loads + 4
    # With overlap, 512 channels and fp32 projections, three CTAs of 256 threads fit on an SM.
    assert sass.registers <= (80 if (dtype, channels) == ("float32", 512) and overlap else 168)
