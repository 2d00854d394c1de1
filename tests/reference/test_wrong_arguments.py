"""On a CPU, ops raise an error with the expected message for the wrong arguments of tests/reference/wrong_arguments,
and write nothing."""

import pytest

from dsa.cases import CASES
from dsa.cases.case import same_bits
from tests.reference.wrong_arguments import WRONG

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize(("name", "changes", "message"), WRONG, ids=[f"{name}-{text}" for name, _, text in WRONG])
def test_a_wrong_argument_is_named_and_nothing_is_written(name, changes, message):
    case = BY_NAME[name]
    given = case.arguments()
    before = {written: given[written].clone() for written in case.written}
    wrong = given | (changes(given) if callable(changes) else changes)
    with pytest.raises((TypeError, ValueError)) as error:
        case.run(wrong)
    assert message in str(error.value)
    assert all(same_bits(given[written], x) for written, x in before.items())
