"""SASS of the windows' index lists: a thread loads the pages of its keys together."""

from dsa.kernels.mla import window_indices_sm90 as kernels
from tests.kernels.variants import assert_counts, shipped

REGISTERS = 40  # allows 48 warps per SM


@shipped(kernels.compile_window_indices)
def test_indices(sass):
    # Loads: the boundaries of several sequences at the same time, and those of the query's sequence.
    assert_counts(sass, LDG=2 * kernels.UNROLL + 4, STG=kernels.UNROLL)
    assert sass.registers <= REGISTERS


@shipped(kernels.compile_window_slots)
def test_slots(sass, arguments):
    (ring,) = arguments
    # Loads: the length, and the pages' numbers.
    assert_counts(sass, LDG=1 if ring else 1 + kernels.UNROLL, STG=kernels.UNROLL)
    assert sass.registers <= REGISTERS
