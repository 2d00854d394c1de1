"""What an index tensor holds never makes a reference fail or return wrong rows elsewhere."""

import pytest

from tests.hostile import ARGUMENTS, check


def arguments():
    """All of them: variants of a call differ in its kernels more than in its reference, and the first of each op's
    argument says most."""
    seen = set()
    for case, name in ARGUMENTS:
        key = case.op, name.split()[0]
        yield pytest.param(case, name, id=f"{case.name}-{name}", marks=[pytest.mark.slow] if key in seen else [])
        seen.add(key)


@pytest.mark.parametrize("case, name", [*arguments()])
def test_on_the_references(case, name):
    assert check(case, name, "cpu") > 10
