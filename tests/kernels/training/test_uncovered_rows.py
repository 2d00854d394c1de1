"""SASS of the kernel that fills rows that belong to no sequence."""

from dsa.kernels.training import uncovered_rows_sm90 as kernels
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_uncovered_rows)
def test_sass(sass, arguments):
    # A store into each tensor, for the rows before, after and inside the sequences.
    assert_counts(sass, STG=3 * len(arguments[0]))
    assert sass.registers <= 64
