"""SASS of slot mapping: a thread has the loads of AT_ONCE sequence boundaries in flight at the same time."""

from dsa.kernels.cache import slot_mapping_sm90 as kernels
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_slot_mapping)
def test_slots(sass):
    # The barrier is a vote of the CTA's threads on whether the boundaries ascend.
    assert_counts(sass, STG=1, BAR=1)
    # At least these loads: in the scan, the first boundary and AT_ONCE boundaries per step; then the sequence's end,
    # the sequence's length or start, and the page.
    assert sass.instructions["LDG"] >= 1 + kernels.AT_ONCE + 3
    assert sass.registers <= 32  # allows 64 warps per SM
