"""SASS of combine_experts: the cp.async copies of BATCH rows are in flight at the same time."""

from dsa.cute.weighted_rows import BATCH
from dsa.kernels.moe import combine_experts_sm90 as kernels
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_combine_experts)
def test_sass(sass, arguments):
    dtype, numbers, weighted, shared, residual = arguments
    assert_counts(sass, LDGSTS=BATCH, LDGDEPBAR=1)
    # Loads: the index and weight of each of BATCH rows; the vectors of the shared expert and of the residual.
    assert_counts(sass, LDG=(1 + weighted) * BATCH + shared + residual, STG=1)
    # Products are rounded before they are added, so they are FMUL and not FFMA.
    assert_counts(sass, FMUL=weighted * BATCH * (4 if dtype == "float32" else 8))
    # 48 registers allow 10 CTAs per SM, and 56 allow 9. Both keep enough bytes in flight. With 64-bit indices, shared
    # expert and residual, the kernel needs two more registers, and an SM runs one CTA fewer.
    assert sass.registers <= (48 if weighted else 56) + 2 * (numbers == "int64" and shared and residual)
