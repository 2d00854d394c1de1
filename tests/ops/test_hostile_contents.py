"""What an index tensor holds never makes a reference fail or return wrong rows elsewhere."""

import pytest

from tests import hostile


@pytest.mark.parametrize("argument", hostile.all_arguments(), ids=str)
def test_on_the_references(argument):
    assert hostile.check(argument, "cpu") > 10
