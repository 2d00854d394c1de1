"""The contents of an index tensor never make a kernel read or write outside its tensors.

The receipt's run puts this file under compute-sanitizer's memcheck. Without it, the tests only detect wrong results and
crashes.
"""

import pytest

from tests.hostile import ARGUMENTS, check


@pytest.mark.parametrize("case, name", ARGUMENTS, ids=[f"{case.name}-{name}" for case, name in ARGUMENTS])
def test_on_the_kernels(case, name):
    assert check(case, name, "cuda") > 10
