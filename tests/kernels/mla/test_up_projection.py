"""SASS of products with a head's part of kv_b: all loads are in flight before the kernel waits for the first of
them."""

from dsa.kernels.mla import mla_absorb_queries_sm90, mla_values_cast_to_fp8_sm90
from tests.kernels.variants import assert_counts, shipped


def loads_before_the_first_barrier(in_order):
    (instructions,) = in_order
    return instructions[: instructions.index("BAR")].count("LDG")


@shipped(mla_absorb_queries_sm90.compile_mla_absorb_queries)
def test_absorbed_queries(sass, in_order, arguments):
    (nope,) = arguments
    # Loads: eight rows of the weight, their scale, and the queries of eight tokens; then three for rope, and the next
    # eight tokens.
    assert loads_before_the_first_barrier(in_order) == 10
    assert_counts(sass, LDG=14, HMMA=16, UBLKPF=1)
    # An SM runs 512 threads for V3.2's heads, or 384 for GLM-5's.
    assert sass.registers <= 65536 // (512 // nope * nope) // 8 * 8


@shipped(mla_values_cast_to_fp8_sm90.compile_mla_values_cast_to_fp8)
def test_values(sass, in_order):
    # Loads: eight times 16 bytes of the weight, their scale, and four for the latents of eight tokens; then the next
    # eight tokens.
    assert loads_before_the_first_barrier(in_order) == 13
    assert_counts(sass, LDG=17, HMMA=16, UBLKPF=1)
