"""The steps of a recorded call do the same as the call: the same operators of torch and the same launches."""

import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from dsa.runtime.recorded_calls import noted, record

X, Y = torch.arange(24.0).view(4, 6), torch.arange(24.0).view(4, 6) + 100


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@noted
def add(tensors, by):
    """Stand in for a kernel: add a number, or 0 for None, to each tensor of a list, in place."""
    with _disable_current_modes():  # the mode must not record +=, because a real kernel calls no operators of torch
        for x in tensors:
            x += by or 0


def tensors_of(nested):
    return [x for x in tree_leaves(nested) if isinstance(x, torch.Tensor)]


def assert_replayed(call, first, other):
    """Require that the steps recorded with `first` do with other() what `call` does. Compare results and changed
    arguments."""
    _, steps = record(call, first)
    given, expected = other(), other()
    got, want = steps(*given), call(*expected)
    found, right = tensors_of((got, given)), tensors_of((want, expected))
    assert type(got) is type(want) and len(found) == len(right) and all(map(torch.equal, found, right))
    return got


def added_to(compute, by=1):
    def call(*arguments):
        out = compute(*arguments)
        add([out], by)
        return out

    return call


def test_a_result_is_new_in_every_call():
    call = added_to(lambda x: x.new_zeros(x.shape), 2.5)
    got = assert_replayed(call, (X,), lambda: (Y,))
    _, steps = record(call, (X,))
    assert (got == 2.5).all() and steps(X).data_ptr() != got.data_ptr()


@pytest.mark.parametrize("copy", [torch.Tensor.contiguous, lambda x: x.reshape(-1), lambda x: x.to(torch.float32)])
@pytest.mark.parametrize("view", [lambda x: x.flatten()[1::2], lambda x: x.T, lambda x: x[:, 3:], lambda x: x])
def test_a_view_or_a_copy_in_inference_mode(copy, view):
    """In inference mode a dispatch mode cannot see whether a result is a view or a copy."""
    with torch.inference_mode():
        assert_replayed(added_to(copy), (view(X.clone()),), lambda: (view(Y.clone()),))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.view(-1),
        lambda x: x[1:3],
        lambda x: x[:, 2:5].T,
        lambda x: x.unsqueeze(1).expand(4, 3, 6)[:, 1],
        lambda x: x.view(2, 2, 6).permute(2, 0, 1)[3],
        lambda x: x.view(torch.int32)[0].view(torch.float32),
        lambda x: x.detach(),
        lambda x: x.split(2)[1],
        lambda x: x.unbind()[2],
    ],
)
def test_views_are_of_the_arguments_memory(view):
    changed = X.clone()
    assert_replayed(lambda x: add([view(x)], 1), (changed,), lambda: (Y.clone(),))
    assert not torch.equal(changed, X)


def test_views_of_results_and_of_parts_of_arguments():
    def call(x):
        out = torch.empty_like(x)
        out.copy_(x)
        add([out[1:], out[:, 1]], -3)
        return Pair(out[2:], out.view(-1)[3])

    # When the steps are replayed, the argument has a storage offset. When they were recorded, it had none.
    assert_replayed(call, (X.clone(),), lambda: (torch.arange(60.0).view(10, 6)[3:7],))


@pytest.mark.parametrize("by", [None, 7])
def test_lists_numbers_strings_and_none(by):
    def call(tensors, by, name):
        if name == "both":
            add([tensors[0], tensors[1][:2]], by)
        return torch.cat(tensors) * 5

    assert_replayed(call, ([X.clone(), Y.clone()], by, "both"), lambda: ([Y.clone(), X.clone()], by, "both"))


def test_rows_that_are_gathered():
    call = added_to(lambda x, rows: x[rows, 1:])
    assert_replayed(call, (X, torch.tensor([1, 1])), lambda: (Y, torch.tensor([3, 0])))


def test_a_tensor_that_is_no_argument_is_a_constant():
    kept = torch.full((4, 6), 9.0)
    call = added_to(lambda x: x + kept)
    for _ in range(2):
        assert_replayed(call, (X,), lambda: (Y,))
        kept += 1


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda x: add([x], x[0, 0].item()), X),  # a number comes from the device
        (lambda x: add([x[x > 3]], 1), X),  # a shape comes from the device
        (lambda x: add([torch.tensor([1.0, 2.0])], 1), X),  # data come from the host
        (lambda x: x + 1, X),  # no launch
        (lambda lists: add(lists[0], 1), [[X]]),  # a list of lists
    ],
    ids=["number", "shape", "data", "no launch", "lists"],
)
def test_calls_that_cannot_be_replayed_are_not_recorded(call, argument):
    result, steps = record(call, (copy_of(argument),))
    expected = call(copy_of(argument))
    assert steps is None and (result is expected is None or torch.equal(result, expected))


def copy_of(argument):
    return argument.clone() if isinstance(argument, torch.Tensor) else [copy_of(x) for x in argument]


@pytest.mark.parametrize("arguments_of", [lambda x, y: (x, y), lambda x, y: ([x, y],)])
def test_one_tensor_in_two_places_says_nothing_of_two_tensors(arguments_of):
    x = X.clone()
    assert_replayed(
        lambda *arguments: add(tensors_of(arguments), 1),
        arguments_of(x, x),
        lambda: arguments_of(X.clone(), Y.clone()),
    )
    assert torch.equal(x, X + 2)


def test_calls_within_a_call_are_its_steps():
    def inner(x):
        add([x], 1)
        return x * 2

    def outer(x):
        return record(inner, (x,)), inner(x)

    ((_, steps_of_inner), _), _ = record(outer, (X.clone(),))
    assert steps_of_inner is None
    assert_replayed(outer, (X.clone(),), lambda: (Y.clone(),))


def test_an_error_ends_the_recording():
    def call(x):
        raise ValueError("x: is wrong")

    with pytest.raises(ValueError, match="x: is wrong"):
        record(call, (X,))
    assert record(lambda x: add([x], 1), (X.clone(),))[1] is not None


def test_gradients_may_be_on():
    call, parameter = added_to(lambda x: torch.empty_like(x.detach()).copy_(x.detach()[:])), torch.nn.Parameter
    got = assert_replayed(call, (parameter(X.clone()),), lambda: (parameter(Y.clone()),))
    assert not got.requires_grad


def test_a_recording_does_not_import_torch_compile():
    """The import takes seconds, and would delay the first call of a process."""
    code = (
        "import sys, torch\n"
        "from dsa.runtime.recorded_calls import record\n"
        "record(lambda x: x.new_empty(3) + x[:, 0].sum(), (torch.ones(2, 3),))\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
