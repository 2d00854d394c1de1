"""What an op does not take is refused by name, before anything is launched."""

import pytest

from dsa.cases import CASES
from tests.ops.limits import LIMITS

BY_NAME = {call.name: call for call in CASES}


@pytest.mark.parametrize(("name", "changes", "message"), LIMITS, ids=[f"{name}-{text}" for name, _, text in LIMITS])
def test_what_an_op_does_not_take_is_refused_by_name(name, changes, message, launches):
    arguments = BY_NAME[name].arguments()
    launches.clear()  # of what makes them
    with pytest.raises((TypeError, ValueError), match=message):
        BY_NAME[name].run(arguments | changes(arguments))
    assert not launches
