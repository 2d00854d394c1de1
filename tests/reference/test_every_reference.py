"""The references beside the float64 formulas of the cases (`dsa.cases`), at their sizes and at small ones."""

import pytest

from dsa.cases import CASES

CHECKED = [case for case in CASES if case.check is not None]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CHECKED, ids=lambda case: case.name)
def test_a_reference_is_right(case, seed):
    case.verify_all("cpu", seed)
