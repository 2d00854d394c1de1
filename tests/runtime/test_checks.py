"""The argument checks: what they accept, and error messages that name the argument, what it got and what is
accepted."""

import math

import pytest
import torch

from dsa.runtime import checks

WATCHED = torch.zeros(3, requires_grad=True)
META, INT_MAX = torch.zeros(1, device="meta"), 2**31 - 1
SHAPE, DIMS, PAIR = (checks.FLOATS, (3, "K")), ("first", "last"), "(keys, scales)"


def overlapping_pages(page_stride):
    return torch.zeros(64).as_strided((2, 2, 1, 8), (page_stride, 8, 8, 1))


@pytest.mark.parametrize(
    ("check", "arguments", "message"),
    [
        (checks.check_tensor, ([1.0], *SHAPE), "x: must be a torch.Tensor, got list"),
        (
            checks.check_tensor,
            (torch.zeros(3, 7).int(), *SHAPE),
            "x: dtype must be float32, bfloat16 or float16, got int",
        ),
        (checks.check_tensor, (torch.zeros(2, 7), *SHAPE, "q"), "x: shape must be [3, K], got [2, 7] (sizes as of q)"),
        (checks.check_tensor, (torch.zeros(3), *SHAPE), "x: shape must be [3, K], got [3]"),
        (checks.check_memory, (META,), "x: must be on a device with memory, got a tensor on meta"),
        (checks.check_writable, (torch.zeros(1, 4).expand(3, 4),), "x: its numbers must not share memory"),
        (
            checks.check_writable,
            (overlapping_pages(8),),
            "x: its numbers must not share memory, got strides [8, 8, 8, 1]",
        ),
        (checks.check_writable, (WATCHED,), "x: is written in place"),
        (checks.check_positive, (True,), "x: must be an integer, got True"),
        (checks.check_positive, (2.0,), "x: must be an integer, got 2.0"),
        (checks.check_positive, (None,), "x: must be an integer, got None"),
        (checks.check_positive, (0,), "x: must be at least 1, got 0"),
        (checks.check_positive, (-(2**63),), f"x: must be at least 1, got {-(2**63)}"),
        (checks.check_positive, (2**31,), f"x: must be at most {INT_MAX}, got {2**31}"),
        (checks.check_positive, (9, 8), "x: must be at most 8, got 9"),
        *(
            (checks.check_number, (v,), "x: must be finite in fp32, got")
            for v in (math.nan, math.inf, 1e39, -(10**400))
        ),
        *((checks.check_number, (v,), "x: must be a number, got") for v in (True, "1", None, torch.tensor(1.0), [1.0])),
        (checks.check_number, (-1e-9, 0), "x: must be at least 0, got -1e-09"),
        *((checks.check_flag, (v,), "x: must be True or False, got ") for v in (0, 1, None, "yes", torch.tensor(True))),
        *((checks.check_choice, (v, DIMS), "x: must be 'first' or 'last', got ") for v in ("all", "", None, ["last"])),
        *(
            (checks.check_dtype, (v, checks.FLOATS), "x: must be ")
            for v in (torch.int8, "float16", None, torch.zeros(3))
        ),
        (checks.check_pair, ((1, 2, 3), PAIR), "x: must be a pair (keys, scales), got 3 of them"),
        (checks.check_pair, ("ab", PAIR), "x: must be a pair (keys, scales), got str"),
    ],
)
def test_what_is_refused(check, arguments, message):
    with pytest.raises((TypeError, ValueError)) as error:
        check("x", *arguments)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("check", "arguments"),
    [
        (checks.check_tensor, (torch.zeros(3, 7), *SHAPE)),
        (checks.check_memory, (torch.zeros(1),)),
        (checks.check_writable, (torch.zeros(3, 4)[:, 1:2],)),
        (checks.check_writable, (torch.zeros(1, 4).expand(1, 4),)),
        (checks.check_writable, (torch.zeros(3).as_strided((1, 3), (0, 1)),)),
        (checks.check_writable, (overlapping_pages(32),)),
        (checks.check_writable, (torch.zeros(3, 4, 5).permute(2, 0, 1),)),
        (checks.check_writable, (torch.zeros(4, 0, 3),)),
        (checks.check_positive, (INT_MAX,)),
        (checks.check_int, (0, 0)),
        *((checks.check_number, (value,)) for value in (0, -1, 1e-300, -3.4e38)),
        (checks.check_number, (0.0, 0)),
        (checks.check_choice, ("last", DIMS)),
        (checks.check_dtype, (torch.float16, checks.FLOATS)),
        (checks.check_pair, ([1, 2], PAIR)),
    ],
)
def test_what_is_accepted(check, arguments):
    check("x", *arguments)


def test_a_watched_tensor_may_be_written_without_gradients():
    with torch.no_grad():
        checks.check_writable("x", WATCHED)


def test_other_tensors_have_the_dtype_and_the_device_of_the_first():
    q = torch.zeros(1).bfloat16()
    checks.check_same_dtype(("q", q), k=q, sink=None)
    checks.check_same_device(("q", q), k=q, sink=None)
    with pytest.raises(ValueError, match="kv: dtype must be q's bfloat16, got float32"):
        checks.check_same_dtype(("q", q), kv=q.float())
    with pytest.raises(ValueError, match="weights: must be on q's device cpu, got meta"):
        checks.check_same_device(("q", q), k=q, weights=META)
