"""Signatures of calls are equal exactly if the checks cannot tell the calls apart."""

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from dsa.runtime.recorded_calls import KnownCalls, first_shape, signature

X = torch.zeros(4, 8)


def test_contents_do_not_change_a_signature():
    assert signature(X, 1, None, [X]) == signature(torch.ones(4, 8), 1, None, [torch.ones(4, 8)])


def test_every_other_difference_changes_a_signature():
    others = X[:3], X.T.contiguous().T, X.int(), torch._neg_view(X), X.to("meta"), torch.zeros(33)[1:].view(4, 8)
    calls = [
        *[(x, 1) for x in (X, *others)],
        *[(X, value) for value in (2, 1.0, True, "1", None, torch.float32, torch.int32, object())],
        *[(X, value) for value in (0.0, -0.0, 0, False, "")],
        *[(X, value) for value in ([1], (1,), [1, 1], [[1], 1], [X], [X[:3]], [None])],
        *[(X,), (X, 1, 1), (1, X), ([X], 1), ([X, 1],), (X, None, 1), (X, 1, None)],
    ]
    for first, second in itertools.combinations(calls, 2):
        assert signature(*first) != signature(*second), (first[1:], second[1:])


def test_a_tensor_without_strides_or_address_has_no_equal_signature():
    for x in (X.to_sparse(), TwoTensor(X, X)):
        assert signature(x) != signature(x)
    assert signature(X[:0]) == signature(X[:0].clone())


@pytest.mark.filterwarnings("ignore")  # torch warns that nested tensors may change
def test_the_first_shape():
    """The shape is None if the first argument is not a tensor, or is a nested tensor, which has no shape."""
    strided = torch.nested.nested_tensor([X[0], X[1]], layout=torch.strided)
    assert [first_shape(call) for call in ((X, 1), (1, X), (), (strided,))] == [X.shape, None, None, None]


def test_the_oldest_of_too_many_are_forgotten():
    known = KnownCalls()
    known.keep(signature(X, 0), len)
    for i in range(5000):
        known.remember(signature(X, i))
    assert [i for i in range(5000) if signature(X, i) in known] == [*range(5000 - 4096, 5000)]
    assert known.steps == {signature(X, 0): len}
    known.steps.clear()
    for i in range(300):
        known.remember((i,))
        known.count((i,))
        known.keep((i,), len)
    # The counts of forgotten calls restart at 0, so that they can be recorded again.
    assert list(known.steps) == [(i,) for i in range(300 - 256, 300)]
    assert known.count((0,)) == 1 and known.count((299,)) == 2
    known.forget()
    assert not known.steps and signature(X, 4999) not in known


def test_a_guard_of_steps_that_another_thread_forgot_is_kept():
    known, call = KnownCalls(), signature(X)
    known.keep(call, len)
    steps = known.steps.get(call)
    known.forget()
    known.add_guard(call, steps, (X,), ())
    assert [found for _, found in known.guarded[X.shape]] == [len]


def test_threads_keep_at_once():
    """The number of recorded calls is at its limit, so each thread also removes the oldest call."""
    known = KnownCalls()

    def keep(thread):
        for i in range(20000):
            known.keep((thread, i), len)
            if i % 1000 == 0:
                known.forget()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert [*threads.map(keep, range(4))] == [None] * 4
    finally:
        sys.setswitchinterval(interval)
