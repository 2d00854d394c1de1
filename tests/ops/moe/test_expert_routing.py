"""The largest number of entries that the sort by expert accepts."""

import math

from dsa.kernels.moe.limits import MAX_SORT_ENTRIES
from dsa.kernels.moe.sort_by_expert_sm90 import AHEAD, WARPS


def test_the_sorts_numbers_are_int32():
    """The end of the last warp's range and the last lane's prefetch index fit in int32."""
    of_a_warp = math.ceil(MAX_SORT_ENTRIES / WARPS)
    each = math.ceil(of_a_warp / 32) * 32
    assert WARPS * each < 2**31 and MAX_SORT_ENTRIES + 32 * AHEAD < 2**31
