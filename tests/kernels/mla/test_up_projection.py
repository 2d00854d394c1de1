"""SASS of the products with W_UK and W_UV (a head's parts of the weight kv_b): all loads for the first eight tokens are
in flight before the kernel waits for one of them."""

from dsa.kernels.mla import mla_absorb_queries_sm90, mla_values_cast_to_fp8_sm90
from tests.kernels.variants import assert_counts, shipped


def loads_before_the_first_barrier(in_order):
    (instructions,) = in_order
    return instructions[: instructions.index("BAR")].count("LDG")


@shipped(mla_absorb_queries_sm90.compile_mla_absorb_queries)
def test_absorbed_queries(sass, in_order, arguments):
    (nope,) = arguments
    # Before the barrier: eight rows of the weight, their scale, and the queries of eight tokens. After it: three loads
    # for rope, and the queries of the next eight tokens.
    assert loads_before_the_first_barrier(in_order) == 10
    assert_counts(sass, LDG=14, HMMA=16, UBLKPF=1)
    # Registers allow 512 threads per SM for V3.2's heads (nope = 128), and 384 for GLM-5's (nope = 192).
    assert sass.registers <= 65536 // (512 // nope * nope) // 8 * 8


@shipped(mla_values_cast_to_fp8_sm90.compile_mla_values_cast_to_fp8)
def test_values(sass, in_order):
    # Before the barrier: eight loads of the weight, their scale, and four loads for the latents of eight tokens. After
    # it: four for the next eight tokens.
    assert loads_before_the_first_barrier(in_order) == 13
    assert_counts(sass, LDG=17, HMMA=16, UBLKPF=1)
