"""What an index tensor holds never makes a reference fail or return wrong rows elsewhere."""

import pytest

from tests import hostile


def arguments():
    """All of them: variants of a call differ in its kernels more than in its reference, and the first of each op's
    argument says most."""
    seen = set()
    for argument in hostile.all_arguments():
        key = argument.op.split()[0], argument.argument.split()[0]
        yield pytest.param(argument, id=str(argument), marks=[pytest.mark.slow] if key in seen else [])
        seen.add(key)


@pytest.mark.parametrize("argument", [*arguments()])
def test_on_the_references(argument):
    assert hostile.check(argument, "cpu") > 10
