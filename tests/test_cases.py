"""The cases of ops are complete. Many tests loop over the cases and would miss what they do not contain."""

import inspect

import pytest

from dsa.cases import CASES, cases_of
from tests.hostile import ARGUMENTS


def test_every_tensor_argument_is_given_by_a_call():
    given, taken = set(), set()
    for call in CASES:
        given |= {(call.op, name) for name, value in call.arguments().items() if value is not None}
        parameters = inspect.signature(call.function()).parameters.values()
        taken |= {(call.op, p.name) for p in parameters if "Tensor" in str(p.annotation)}
    assert len(taken) > 100 and taken <= given


def test_every_index_argument_has_hostile_contents():
    """No other argument has hostile contents."""
    named = {(call.op, name) for call in CASES for name in call.index_arguments()}
    assert len(named) > 40
    assert {(case.op, name.split()[0]) for case, name in ARGUMENTS} == named


@pytest.mark.parametrize("op", ["mla_absorb_queries", "mla_values_cast_to_fp8"])
def test_the_checks_of_products_accept_calls_without_tokens(op):
    (case,) = cases_of(op)
    assert case.check_call(case.arguments(tokens=0)) == 0
