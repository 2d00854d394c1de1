"""Guards of recorded calls: the guard of a recorded call accepts this call, but no call with another signature."""

import functools
import itertools
import re
import runpy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsa.runtime import call_guards, recorded_calls, torch_shortcuts
from dsa.runtime.call_guards import guard
from dsa.runtime.recorded_calls import KnownCalls, signature
from dsa.runtime.torch_shortcuts import HAS_SHORTCUTS

X = torch.zeros(4, 8)
UNALIGNED = torch.zeros(33)[1:].view(4, 8)
CALLS = [
    *[(x, 1) for x in (X, X[:3], X.T.contiguous().T, X.int(), UNALIGNED)],
    *[(X, value) for value in (2, 1.0, -1.0, 0.0, -0.0, 0, False, True, "1", "", None, torch.float32, torch.int32)],
    *[(X, value) for value in ([1], (1,), [1, 1], [X], (X,), [X[:3]], [None], [X, X], [UNALIGNED])],
    *[([X], 1), ([X, X], 1), (None, X), (1, X)],
]

LATER = tuple(map(int, torch.__version__.split(".")[:2])) > (2, 15)
pytestmark = pytest.mark.skipif(LATER and not HAS_SHORTCUTS, reason="a torch whose guards are not known")


def test_the_tested_versions_have_guards():
    assert HAS_SHORTCUTS


@pytest.mark.parametrize(
    "lacking", ["TensorGuards", "_empty_strided_cpu", "_empty_strided_cuda", "_reinterpret_tensor"]
)
def test_a_torch_without_the_shortcuts_is_named_once(lacking, monkeypatch):
    monkeypatch.delattr(torch._C._dynamo.guards, lacking)
    with pytest.warns(UserWarning, match=re.escape(f"dsa: torch {torch.__version__} lacks")) as warned:
        found = runpy.run_path(torch_shortcuts.__file__)
    assert len(warned) == 1 and not found["HAS_SHORTCUTS"] and found["empty_cpu"] is None


def test_a_torch_with_cuda_needs_the_current_device(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delattr(torch._C, "_cuda_getDevice", raising=False)
    with pytest.warns(UserWarning, match="lacks private functions"):
        assert not runpy.run_path(torch_shortcuts.__file__)["HAS_SHORTCUTS"]


@pytest.mark.parametrize("call", CALLS)
def test_a_guard_accepts_other_contents(call):
    made = {}

    def other(x):
        if isinstance(x, torch.Tensor):
            if id(x) not in made:  # a tensor that occurs twice gets one replacement
                made[id(x)] = torch.ones(33)[1:].view(4, 8) if x is UNALIGNED else x.clone() + 1
            return made[id(x)]
        return type(x)(map(other, x)) if isinstance(x, (list, tuple)) else x

    like = guard(call)
    assert like(*call) and like(*map(other, call))


def test_one_tensor_twice_and_two_are_different_calls():
    """torch's guards accept no repeated tensors, so each repeated argument has an extra condition."""
    twice, two = guard((X, X, [X])), guard((X, X.clone(), [X.clone()]))
    assert twice(X, X, [X]) and not twice(X, X.clone(), [X])
    assert two(X, X.clone(), [X.clone()]) and not two(X, X, [X.clone()])


def test_a_guard_accepts_no_other_call():
    for first, second in itertools.permutations(CALLS, 2):
        if len(first) == len(second):
            assert not guard(first)(*second), (first[1:], second[1:])


@pytest.mark.parametrize(
    "call",
    [(1, None), *((X, value) for value in (float("nan"), float("inf"), object(), [[X]], X.to_sparse(), {}))],
)
def test_calls_without_tensors_or_with_values_that_cannot_be_compared_have_no_guard(call):
    assert guard(call) is None


def test_a_tensor_that_requires_a_gradient_is_another_call():
    x = torch.zeros(4, 8, requires_grad=True)
    with torch.no_grad():
        like = guard((x,))
        assert like(x) and not like(X)
    assert not like(x)
    assert not guard((X,))(x)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Mode, functools.partial(torch.autocast, "cpu"), torch.inference_mode])
def test_a_call_in_a_mode_of_torch_is_another_call(mode):
    like = guard((X,))
    with mode():
        assert not like(torch.zeros(4, 8))
    with torch.no_grad():
        assert like(X)


def test_vmapped_tensors_and_parameters_are_other_calls():
    like = guard((X,))
    assert not torch.func.vmap(lambda x: x + float(like(x)))(X[None]).any()
    assert not like(torch.nn.Parameter(X, requires_grad=False))
    assert like(X)


def test_a_guard_can_compare_whether_two_arguments_have_one_address():
    apart, together = guard((X, X.clone()), [(0, 1)]), guard((X, X), [(0, 1)])
    assert apart(X, X.clone()) and not apart(X, X)
    assert together(X, X) and not together(X, X.clone())
    assert guard((X, None), [(0, 1)])(X, None)


def test_guards_of_a_signature_and_of_a_shape_are_few(monkeypatch):
    made = []
    monkeypatch.setattr("dsa.runtime.recorded_calls.guard", lambda *call: made.append(call) or call_guards.guard(*call))
    known = KnownCalls()
    for i in range(20):
        call = signature(X, i)
        known.keep(call, lambda *_: None)
        for _ in range(10):
            known.add_guard(call, known.steps[call], (X, i), ())
    assert len(made) == 20 * 4 and len(known.guarded[X.shape]) == 8
    last = known.guarded[X.shape][-1]
    assert last[0](X, 19) and last[1] is known.steps[signature(X, 19)]


def test_dropped_steps_are_not_found():
    known = KnownCalls()
    first = signature(X, 0)
    known.keep(first, len)
    known.add_guard(first, known.steps[first], (X, 0), ())
    for i in range(256):
        known.keep((i,), repr)
    assert first not in known.steps and not known.guarded[X.shape]


def test_without_shortcuts_calls_are_recorded_by_public_functions(monkeypatch):
    monkeypatch.setattr(call_guards, "HAS_SHORTCUTS", False)
    monkeypatch.setattr(recorded_calls, "HAS_SHORTCUTS", False)
    assert guard((X,)) is None
    add = recorded_calls.noted(lambda out, x: out.copy_(x).add_(1))

    def call(x):
        out = torch.empty_like(x)
        add(out[1:], x[1:])
        return out

    _, steps = recorded_calls.record(call, (X,))
    assert torch.equal(steps(X + 2)[1:], X[1:] + 3)
