"""SASS of the kernels that write the index lists of windows: a thread has several loads in flight at the same time."""

from dsa.kernels.mla import window_indices_sm90 as kernels
from tests.kernels.variants import assert_counts, shipped

REGISTERS = 40  # allows 48 warps per SM


@shipped(kernels.compile_window_indices)
def test_indices(sass):
    # A lane loads both boundaries of UNROLL sequences at a time. The 4 other loads are for the query's sequence.
    assert_counts(sass, LDG=2 * kernels.UNROLL + 4, STG=kernels.UNROLL)
    assert sass.registers <= REGISTERS


@shipped(kernels.compile_window_slots)
def test_slots(sass, arguments):
    (ring,) = arguments
    # LDG: the sequence's length, and without a ring the page numbers of UNROLL keys.
    assert_counts(sass, LDG=1 if ring else 1 + kernels.UNROLL, STG=kernels.UNROLL)
    assert sass.registers <= REGISTERS
