"""SASS of the kernel that fills rows that belong to no sequence."""

from dsa.kernels.training import uncovered_rows_sm90 as kernels
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_uncovered_rows)
def test_sass(sass, arguments):
    # One store per tensor in each of three loops: rows before the first sequence, rows after the last, and rows past a
    # sequence's maximum length `most`.
    assert_counts(sass, STG=3 * len(arguments[0]))
    assert sass.registers <= 64
