"""What a call asks of torch and of kernels, recorded and done again."""

import subprocess
import sys
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from dsa.runtime.recording import noted, record

X, Y = torch.arange(24.0).view(4, 6), torch.arange(24.0).view(4, 6) + 100


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@pytest.fixture
def kernels():
    """One kernel: adds a number, if any, to each tensor of a list, in place, and notes what it got."""
    module = ModuleType("made_up")
    module.launched = []

    def compile_add(sign):
        def kernel(tensors, by):
            module.launched.append((tuple(tensors), by))
            with _disable_current_modes():  # no operator of torch's
                for x in tensors:
                    x += sign * (by or 0)

        return noted(kernel)

    module.compile_add = compile_add
    return module


def again(call, first, second):
    """(what the steps of a call do with the second arguments, what the call does with them)."""
    _, steps = record(call, first)
    assert steps is not None
    return steps(*second), call(*second)


def test_a_result_is_new_in_every_call(kernels):
    def call(x, by):
        out = x.new_zeros(x.shape)
        kernels.compile_add(1)([out], by)
        return out

    (got, want) = again(call, (X, 2.5), (Y, 2.5))
    assert torch.equal(got, want) and got is not want and (got == 2.5).all()
    _, steps = record(call, (X, 2.5))
    assert steps(X, 2.5).data_ptr() != got.data_ptr()


@pytest.mark.parametrize("copy", [torch.Tensor.contiguous, lambda x: x.reshape(-1), lambda x: x.to(torch.float32)])
@pytest.mark.parametrize("view", [lambda x: x.flatten()[1::2], lambda x: x.T, lambda x: x[:, 3:], lambda x: x])
def test_what_may_be_a_copy_in_inference_mode(copy, view, kernels):
    """There torch does not say which of the two it is."""

    def call(x):
        out = copy(x)
        kernels.compile_add(1)([out], 1.5)
        return out

    with torch.inference_mode():
        _, steps = record(call, (view(X.clone()),))
        assert torch.equal(steps(view(Y.clone())), call(view(Y.clone())))


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
def test_views_are_of_the_arguments_memory(kernels, view):
    def call(x):
        kernels.compile_add(1)([view(x)], 1)

    first, second, third = X.clone(), Y.clone(), Y.clone()
    _, steps = record(call, (first,))
    assert steps(second) is None
    call(third)
    assert torch.equal(second, third) and not torch.equal(second, Y)


def test_views_of_results_and_of_parts_of_arguments(kernels):
    def call(x):
        out = torch.empty_like(x)
        out.copy_(x)
        kernels.compile_add(-1)([out[1:], out[:, 1]], 3)
        return Pair(out[2:], out.view(-1)[3])

    part = torch.arange(60.0).view(10, 6)[3:7]  # begins elsewhere in its memory
    got, want = again(call, (X.clone(),), (part,))
    assert type(got) is Pair and all(torch.equal(a, b) for a, b in zip(got, want))


def test_lists_numbers_and_what_is_not_given(kernels):
    def call(tensors, by, name):
        if name == "both":
            kernels.compile_add(1)([tensors[0], tensors[1][:2]], by)
        return torch.cat(tensors) * 5

    firsts, seconds, thirds = ([x.clone(), y.clone()] for x, y in ((X, Y), (Y, X), (Y, X)))
    for by in (None, 7):
        _, steps = record(call, (firsts, by, "both"))
        assert torch.equal(steps(seconds, by, "both"), call(thirds, by, "both"))
        assert all(torch.equal(a, b) for a, b in zip(seconds, thirds))


def test_rows_that_are_gathered(kernels):
    def call(x, rows):
        out = x[rows, 1:]
        kernels.compile_add(1)([out], 1)
        return out

    got, want = again(call, (X, torch.tensor([1, 1])), (Y, torch.tensor([3, 0])))
    assert torch.equal(got, want)


def test_lists_of_lists_are_not_recorded(kernels):
    def call(lists):
        kernels.compile_add(1)(lists[0], 1)

    assert record(call, ([[X.clone()]],))[1] is None


def test_what_a_cache_keeps_is_a_constant(kernels):
    kept = torch.full((4, 6), 9.0)

    def call(x):
        out = x + kept
        kernels.compile_add(1)([out], 1)
        return out

    got, want = again(call, (X,), (Y,))
    assert torch.equal(got, want)
    kept += 1
    _, steps = record(call, (X,))
    assert torch.equal(steps(X), call(X))


def test_calls_that_are_not_all_steps(kernels):
    def number(x):
        kernels.compile_add(1)([x], x[0, 0].item())

    def shape(x):
        kernels.compile_add(1)([x[x > 3]], 1)

    def hidden(x):
        kernels.compile_add(1)([torch.tensor([1.0, 2.0])], 1)

    def nothing(x):
        return x + 1

    for call in (number, shape, hidden, nothing):
        result, steps = record(call, (X.clone(),))
        assert steps is None
    assert torch.equal(result, X + 1)


def test_one_tensor_for_two_arguments_says_nothing_of_two(kernels):
    def call(x, y):
        kernels.compile_add(1)([x, y], 1)

    x = X.clone()
    _, steps = record(call, (x, x))
    assert torch.equal(x, X + 2)
    first, second = X.clone(), Y.clone()
    steps(first, second)
    assert torch.equal(first, X + 1) and torch.equal(second, Y + 1)


def test_one_tensor_in_a_list_twice_says_nothing_of_two(kernels):
    def call(tensors):
        kernels.compile_add(1)([tensors[0], tensors[1]], 1)

    x = X.clone()
    _, steps = record(call, ([x, x],))
    first, second = X.clone(), Y.clone()
    steps([first, second])
    assert torch.equal(first, X + 1) and torch.equal(second, Y + 1)


def test_calls_within_a_call_are_its_steps(kernels):
    def inner(x):
        kernels.compile_add(1)([x], 1)
        return x * 2

    def outer(x):
        return record(inner, (x,)), inner(x)

    first, second = X.clone(), X.clone()
    (result, no_steps), steps = record(outer, (first,))[0][0], record(outer, (first,))[1]
    assert no_steps is None and torch.equal(result, (X + 1) * 2)
    got, want = steps(second)[1], outer(X.clone())[1]
    assert torch.equal(got, want) and torch.equal(second, X + 2)


def test_an_error_ends_the_recording(kernels):
    def call(x):
        raise ValueError("x: is wrong")

    with pytest.raises(ValueError, match="x: is wrong"):
        record(call, (X,))
    assert record(lambda x: kernels.compile_add(1)([x], 1), (X.clone(),))[1] is not None


def test_gradients_may_be_on(kernels):
    def call(x):
        out = torch.empty_like(x.detach())
        out.copy_(x.detach()[:])
        kernels.compile_add(1)([out], 1)
        return out

    weight = torch.nn.Parameter(X.clone())
    got, want = again(call, (weight,), (torch.nn.Parameter(Y.clone()),))
    assert torch.equal(got, want) and not got.requires_grad


def test_a_recording_does_not_import_what_compiles():
    """torch.compile takes seconds to import, which a process's first call would wait for."""
    code = (
        "import sys, torch\n"
        "from dsa.runtime.recording import record\n"
        "record(lambda x: x.new_empty(3) + x[:, 0].sum(), (torch.ones(2, 3),))\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
