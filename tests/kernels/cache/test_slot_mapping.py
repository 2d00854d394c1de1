"""SASS of slot mapping: a thread has the loads of AT_ONCE sequence boundaries in flight at the same time."""

from dsa.kernels.cache import slot_mapping_sm90 as kernels
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_slot_mapping)
def test_slots(sass):
    # BAR: the threads' vote on whether the boundaries ascend.
    assert_counts(sass, STG=1, BAR=1)
    # The scan loads the first boundary, and AT_ONCE boundaries per step. The other 3 loads: the sequence's end, its
    # length or start, and the page.
    assert sass.instructions["LDG"] >= 1 + kernels.AT_ONCE + 3
    assert sass.registers <= 32  # allows 64 warps per SM
