"""SASS of products with fp32 results. All loads of a round (small_m_product.py) come before its mma instructions.
Registers allow two CTAs per SM."""

from dsa.cute.small_m_product import CTAS, ROUND
from dsa.kernels.gemm import linear_fp32_sm90 as kernels
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_linear_fp32)
def test_all_loads_come_before_the_products(sass, in_order, arguments):
    _, (tokens, ctas) = arguments
    round_ = ROUND[ctas, tokens]
    # LDG per k-step: a lane loads two rows of the matrix, and executes one load of x per eight tokens.
    assert_counts(sass, LDG=round_ * (2 + tokens // 8), HMMA=2 * round_ * tokens // 8)
    # Only the CTAs of a cluster send partial sums to each other (ST).
    assert_counts(sass, ST=1 if ctas == CTAS else 0)
    assert sass.registers <= 65536 // 512
    [instructions] = in_order
    assert "LDG" not in instructions[instructions.index("HMMA") :]
    # The kernel prefetches the matrix to L2 (UBLKPF) before it waits for the previous kernel (ACQBULK).
    assert instructions.index("UBLKPF") < instructions.index("ACQBULK")
