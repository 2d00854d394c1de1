"""No contents of an index tensor make a kernel read or write outside the tensors of the call.

`tests.gpu.run` runs this file under compute-sanitizer's memcheck. Without memcheck, the tests detect only wrong results
and crashes.
"""

import pytest

from tests.hostile import ARGUMENTS, check


@pytest.mark.parametrize("case, name", ARGUMENTS, ids=[f"{case.name}-{name}" for case, name in ARGUMENTS])
def test_on_the_kernels(case, name):
    assert check(case, name, "cuda") > 10
