"""The self test of each op, which `dsa check` runs, passes, and fails when its op is wrong."""

import pytest
import torch

from dsa.cases import cases_of, check_op
from dsa.ops import op_modules
from tests.ops.wrong_ops import MISLED, OP_OF, WRONG, break_op, mislead_op


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("DSA_BACKEND", raising=False)


@pytest.mark.parametrize("name", op_modules())
def test_ops_pass_whatever_the_numbers(name):
    assert any(case.check for case in cases_of(name))
    for seed in range(5):
        check_op(name, "cpu", seed)


@pytest.mark.parametrize(("function", "wrong"), WRONG.values(), ids=WRONG)
def test_a_wrong_op_is_found(monkeypatch, function, wrong):
    break_op(monkeypatch, function, wrong)
    with pytest.raises(AssertionError):
        check_op(OP_OF[function], "cpu")


def test_every_check_is_shown_to_fail():
    assert {OP_OF[function] for function, _ in WRONG.values()} == op_modules().keys()


@pytest.mark.parametrize("misled", MISLED.values(), ids=MISLED)
def test_damage_is_noticed_whatever_the_numbers(monkeypatch, misled):
    """A scale off by 1%, a key off by one, a tile too few: outside of what the contract allows to a kernel."""
    mislead_op(monkeypatch, *misled)
    for seed in range(5):
        with pytest.raises(AssertionError):
            check_op(OP_OF[misled[0]], "cpu", seed)
