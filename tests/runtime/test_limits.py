"""The error for a broken limit names the argument, the accepted values, and the value in the call."""

import math

import pytest
import torch

from dsa.runtime.arguments import POSITIVE, Arguments, Int, Number, Tensor, Tensors, at_least, at_most, multiple_of
from tests.reference.common import assert_refused

F32 = (torch.float32,)
SIZES = Arguments(
    x=Tensor("... D", F32),
    cos=Tensor("R/2", F32, optional=True),
    parts=Tensors("D", F32, count="parts"),
    k=Int(),
    scale=Number(),
)
X, PARTS = torch.zeros(2, 3, 12), [torch.zeros(12)] * 2


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"D": (8, 16, 32)}, "x takes 8, 16 or 32 for D, got 12"),
        ({"D": multiple_of(8)}, "x takes a multiple of 8 for D, got 12"),
        ({"D": multiple_of(4, least=16)}, "x takes a multiple of 4, at least 16 for D, got 12"),
        ({"D": multiple_of(4, least=4, most=8)}, "x takes a multiple of 4, at least 4, at most 8 for D, got 12"),
        ({"D": multiple_of(8, most=32)}, "x takes a multiple of 8, at most 32 for D, got 12"),
        ({"D": at_most(9, least=1)}, "x takes at least 1, at most 9 for D, got 12"),
        ({"D": at_least(13)}, "x takes at least 13 for D, got 12"),
        ({"rows": at_most(5)}, "x takes at most 5 for rows, got 6"),
        ({"rows*D": at_most(71)}, r"x takes at most 71 for rows * D, got 72"),
        ({"D*itemsize": at_most(47)}, "x takes at most 47 for D * itemsize, got 48"),
        ({"parts": at_most(1)}, "parts takes at most 1 for parts, got 2"),
        ({"k": at_most(3)}, "k takes at most 3 for k, got 4"),
        ({"scale": POSITIVE}, "scale takes a positive number for scale, got 0.0"),
        ({"R/2": at_least(8)}, None),
        ({"D": (12,), "rows": multiple_of(3, most=6), "k": at_most(4, least=4)}, None),
    ],
)
def test_a_broken_limit_says_what_is_accepted(limits, message):
    sizes = SIZES.check(X, None, PARTS, 4, 0.0)
    said = [
        f"{argument} takes {accepted} for {word}, got {size}"
        for argument, accepted, word, size in broken(limits, sizes)
    ]
    assert said == ([] if message is None else [message])


def broken(limits, sizes):
    return SIZES.limits_of("limits", limits).broken(sizes)


def test_neither_nan_nor_infinity_is_positive():
    assert 1e-30 in POSITIVE and not any(x in POSITIVE for x in (0.0, -1.0, math.nan, math.inf))


def test_a_limit_of_no_size_is_refused():
    with pytest.raises(TypeError, match=r"limits: must be of D, .*, got S"):
        SIZES.limits_of("limits", {"S": at_most(1)})


def test_limits_of_specs_hold_for_references_too():
    limited = Arguments(limits={"D": multiple_of(8), "k": at_most(2)}, x=Tensor("T D", F32), k=Int())
    assert_refused("x: D must be a multiple of 8, got 12", limited.check, torch.zeros(3, 12), 1)
    assert_refused("k: must be at most 2, got 3", limited.check, torch.zeros(3, 8), 3)
    assert limited.check(torch.zeros(3, 8), 2)["D"] == 8
