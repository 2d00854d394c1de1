"""What an index tensor holds never makes a kernel read or write outside its tensors.

The receipt's run puts this file under compute-sanitizer's memcheck: alone it only sees results and crashes.
"""

import pytest

from tests import hostile


@pytest.mark.parametrize("argument", hostile.all_arguments(), ids=str)
def test_on_the_kernels(argument):
    assert hostile.check(argument, "cuda") > 10
