"""An index tensor may contain anything. A reference either raises a ValueError that names the tensor, or returns the
right results in all rows that the wrong entries do not concern."""

import pytest

from tests.hostile import ARGUMENTS, check


def arguments():
    """Yield all (call, argument) pairs. Only the first pair of an op and argument is not marked slow. The other calls
    of an op run nearly the same code of the reference."""
    seen = set()
    for case, name in ARGUMENTS:
        key = case.op, name.split()[0]
        yield pytest.param(case, name, id=f"{case.name}-{name}", marks=[pytest.mark.slow] if key in seen else [])
        seen.add(key)


@pytest.mark.parametrize("case, name", [*arguments()])
def test_on_the_references(case, name):
    assert check(case, name, "cpu") > 10
