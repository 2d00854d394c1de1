"""Python ints in place of floats, in calls of every public op with a float argument. torch supports only ints of 64
bits, so for a larger int an op raises an error that names the argument."""

import inspect
import re

import pytest
import torch

import dsa
from dsa.cases import CASES
from dsa.runtime.checks import shown

TOO_LARGE = (2**63, 2**64, 2**70, -(2**63) - 1, 2**1100)
LARGEST = (2**63 - 1, -(2**63))


def floats(call):
    parameters = inspect.signature(call.function()).parameters.values()
    return [p.name for p in parameters if "float" in str(p.annotation).replace("dtype", "")]


ARGUMENTS = [(call, name) for call in CASES for name in floats(call)]
by_name = pytest.mark.parametrize(("call", "name"), ARGUMENTS, ids=[f"{call.name}-{name}" for call, name in ARGUMENTS])


def test_the_ops_that_take_floats_are_found():
    assert len({call.op for call, _ in ARGUMENTS}) > 25
    named = {"eps", "scale", "sm_scale", "softmax_scale", "limit", "hc_eps", "norm_eps"}
    assert named <= {name for _, name in ARGUMENTS}


@by_name
def test_an_int_of_more_bits_is_refused(call, name):
    for value in TOO_LARGE:
        with pytest.raises(ValueError, match=f"^{name}: must be .*, got {re.escape(shown(value))}$"):
            call.function()(**call.arguments() | {name: value})


@by_name
def test_an_int_of_64_bits_is_a_number(call, name):
    for value in LARGEST:
        try:
            call.function()(**call.arguments() | {name: value})
        except ValueError as error:  # below the least value that the argument may have
            assert str(error).startswith(f"{name}: must be ") and "64 bits" not in str(error)


@pytest.mark.parametrize("value", TOO_LARGE[:2])
def test_it_is_refused_with_gradients_and_on_meta(value):
    x = torch.randn(3, 64)
    for given in (x.requires_grad_(), x.to("meta")):
        with pytest.raises(ValueError, match=f"^eps: must be a float or an int of 64 bits, got {value}$"):
            dsa.rms_norm(given, None, value)


@pytest.mark.parametrize("value", [2**64, 2**1100])
def test_it_is_refused_under_compile(value):
    """Without the op's check, torch's dispatcher would convert the int to a float, or raise an error about types."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x: dsa.rms_norm(x, None, value), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="eps: must be "):
        compiled(torch.randn(3, 64))


def test_numbers_that_torch_compile_does_not_know_yet():
    torch.compiler.reset()
    compiled = torch.compile(dsa.rms_norm, backend="eager", fullgraph=True, dynamic=True)
    x = torch.randn(3, 64)
    for eps in (2, 3, 0.5, 0.25):
        assert torch.equal(compiled(x, None, eps), dsa.rms_norm(x, None, eps))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sorted": None}, "sorted: must be True or False, got None"),
        ({"return_values": 0.5}, "return_values: must be True or False, got 0.5"),
        ({"k": True}, "k: must be an integer, got True"),
        ({"k": 2.0}, "k: must be an integer, got 2.0"),
    ],
)
def test_a_compiled_call_refuses_what_an_eager_call_refuses(changes, message):
    """torch's dispatcher would convert these values."""

    def call(x):
        return dsa.topk_indices(x, **{"k": 2} | changes)

    for function in (call, torch.compile(call, backend="eager")):
        with pytest.raises(TypeError, match=message):
            function(torch.randn(3, 8))
