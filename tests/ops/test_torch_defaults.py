"""torch's default dtype and default device do not change results, because ops specify both for everything that they
allocate. Autocast around a call does not change results either."""

import contextlib
import inspect
from collections.abc import Iterator

import pytest
import torch

import dsa
from dsa.cases import CASES
from dsa.cases.case import same_bits
from tests.public_names import all_ops


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "on meta": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


def test_every_op_has_a_call_with_all_of_its_arguments():
    assert {call.op for call in CASES} == all_ops()
    for call in CASES:
        parameters = inspect.signature(getattr(dsa, call.op)).parameters
        if call.op != "get_mla_metadata":  # its signature is (*args, **kwargs), because it can be called in two styles
            assert set(call.arguments()) == set(parameters), call.name


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("call", CASES, ids=lambda call: call.name)
def test_results_do_not_follow_the_default(call, default):
    expected, arguments = call.results(call.arguments()), call.arguments()
    with DEFAULTS[default]():
        found = call.results(arguments)
    assert all(same_bits(x, y) for x, y in zip(found, expected, strict=True))
