"""SASS of slot mapping: several boundaries are loaded together."""

from dsa.kernels.cache import slot_mapping_sm90 as kernels
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_slot_mapping)
def test_slots(sass):
    # The CTA votes once whether boundaries ascend.
    assert_counts(sass, STG=1, BAR=1)
    # The scan loads the first boundary and those of a step; then the sequence's two numbers and the page are loaded.
    assert sass.instructions["LDG"] >= 1 + kernels.AT_ONCE + 3
    assert sass.registers <= 32  # allows 64 warps per SM
