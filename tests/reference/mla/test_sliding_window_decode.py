"""The reference of sliding_window_decode: fp32 queries with paged caches and ring buffers of several layouts, and
missing pages."""

import pytest

from dsa.cases import CASES
from dsa.reference import sliding_window_decode

CASE = next(case for case in CASES if case.name == "sliding_window_decode")
LENGTHS = (0, 1, 2, 7, 20, 23)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("s_q", [1, 3])
@pytest.mark.parametrize("window", [1, 4, 11, 100])
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("layout", ["bf16, 576", "656 bytes", "584 bytes"])
def test_pages_and_rings_are_right_for_fp32_queries(layout, ring, window, s_q, sink):
    sizes = {"lengths": LENGTHS, "s_q": s_q, "heads": 3, "window": window, "page": window + s_q if ring else 6}
    given = CASE.arguments(**sizes, layout=layout, ring=ring, sink=sink)
    given["q"] = given["q"].float()
    CASE.check(given, sliding_window_decode(**given))


def test_a_missing_page_holds_no_keys():
    given = CASE.arguments(layout="bf16, 576", lengths=LENGTHS, s_q=1, heads=3, window=100, page=6)
    given["block_table"][4, 1] = len(given["cache"])
    CASE.check(given, CASE.run(given))
