"""What the valid calls of ops leave out would be left out by every test that goes through them."""

import inspect

from tests import hostile
from tests.valid_calls import CALLS


def test_every_tensor_argument_is_given_by_a_call():
    given, taken = set(), set()
    for call in CALLS:
        given |= {(call.op, name) for name, value in call.arguments().items() if value is not None}
        parameters = inspect.signature(call.function()).parameters.values()
        taken |= {(call.op, p.name) for p in parameters if "Tensor" in str(p.annotation)}
    assert len(taken) > 100 and taken <= given


def test_every_index_argument_has_hostile_contents():
    """And what is said to be one is one."""
    named = {(call.op, name) for call in CALLS for name in call.index_arguments()}
    assert len(named) > 40
    # A word behind a name tells calls of an op apart, or contents.
    assert {(a.op.split()[0], a.argument.split()[0]) for a in hostile.all_arguments()} == named
