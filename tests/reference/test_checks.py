"""The argument checks: what they accept, and messages that name the argument, what it got and what is accepted."""

import math

import pytest
import torch

from dsa.reference import checks


def refused(check, *arguments, **others):
    with pytest.raises((TypeError, ValueError)) as error:
        check(*arguments, **others)
    return str(error.value)


def test_tensors():
    shape = (3, "K")
    checks.check_tensor("x", torch.zeros(3, 7), checks.FLOATS, shape)
    assert refused(checks.check_tensor, "x", [1.0], checks.FLOATS, shape) == "x: must be a torch.Tensor, got list"
    message = "x: dtype must be float32, bfloat16 or float16, got int32"
    assert refused(checks.check_tensor, "x", torch.zeros(3, 7).int(), checks.FLOATS, shape) == message
    message = "x: shape must be [3, K], got [2, 7] (sizes as of q)"
    assert refused(checks.check_tensor, "x", torch.zeros(2, 7), checks.FLOATS, shape, "q") == message
    assert refused(checks.check_tensor, "x", torch.zeros(3), checks.FLOATS, shape).endswith("got [3]")


def test_same_dtype():
    q = torch.zeros(1).bfloat16()
    checks.check_same_dtype(("q", q), k=q, sink=None)
    assert refused(checks.check_same_dtype, ("q", q), kv=q.float()) == "kv: dtype must be q's bfloat16, got float32"


def test_same_device():
    here, there = torch.zeros(1), torch.zeros(1, device="meta")
    checks.check_same_device(("q", here), k=here, weights=here, sink=None)
    message = "weights: must be on q's device cpu, got meta"
    assert refused(checks.check_same_device, ("q", here), k=here, weights=there) == message
    checks.check_memory("q", here)
    assert refused(checks.check_memory, "q", there) == "q: must be on a device with memory, got a tensor on meta"


def test_writable():
    checks.check_writable("x", torch.zeros(3, 4)[:, 1:2])
    checks.check_writable("x", torch.zeros(1, 4).expand(1, 4))
    checks.check_writable("x", torch.zeros(3).as_strided((1, 3), (0, 1)))
    assert "x: its numbers must not share memory" in refused(checks.check_writable, "x", torch.zeros(1, 4).expand(3, 4))
    # Pages that overlap, with a page stride below a page; dimensions in another order; no numbers at all.
    pages = torch.zeros(64).as_strided((2, 2, 1, 8), (8, 8, 8, 1))
    assert "got strides [8, 8, 8, 1]" in refused(checks.check_writable, "x", pages)
    checks.check_writable("x", torch.zeros(64).as_strided((2, 2, 1, 8), (32, 8, 1, 1)))
    checks.check_writable("x", torch.zeros(3, 4, 5).permute(2, 0, 1))
    checks.check_writable("x", torch.zeros(4, 0, 3))
    watched = torch.zeros(3, requires_grad=True)
    assert "x: is written in place" in refused(checks.check_writable, "x", watched)
    with torch.no_grad():
        checks.check_writable("x", watched)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (True, "n: must be an int, got bool"),
        (2.0, "n: must be an int, got float"),
        (None, "n: must be an int, got NoneType"),
        (0, "n: must be at least 1, got 0"),
        (-(2**63), f"n: must be at least 1, got {-(2**63)}"),
        (2**31, f"n: must be at most {2**31 - 1}, got {2**31}"),
        (1 << 5000, f"n: must be at most {2**31 - 1}, got an int of 5001 bits"),
    ],
)
def test_ints(value, message):
    assert refused(checks.check_positive, "n", value) == message


def test_ints_in_range():
    checks.check_positive("n", 2**31 - 1)
    checks.check_int("n", 0, 0)
    assert refused(checks.check_positive, "n", 9, 8) == "n: must be at most 8, got 9"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39, -(10**400)])
def test_numbers_that_fp32_does_not_have(value):
    assert "eps: must be finite in fp32, got" in refused(checks.check_number, "eps", value)


@pytest.mark.parametrize("value", [True, "1", None, torch.tensor(1.0), [1.0]])
def test_what_is_no_number(value):
    assert "eps: must be a number, got" in refused(checks.check_number, "eps", value)


def test_numbers():
    for value in (0, -1, 1e-300, -3.4e38):
        checks.check_number("scale", value)
    checks.check_number("eps", 0.0, 0)
    assert refused(checks.check_number, "eps", -1e-9, 0) == "eps: must be at least 0, got -1e-09"


@pytest.mark.parametrize("value", [0, 1, 0.0, None, "yes", [], torch.tensor(True)])
def test_what_is_no_flag(value):
    assert refused(checks.check_flag, "causal", value).startswith("causal: must be True or False, got ")


def test_choices_and_dtypes():
    checks.check_choice("dims", "last", ("first", "last"))
    for value in ("all", "", None, ["last"]):
        assert refused(checks.check_choice, "dims", value, ("first", "last")).startswith(
            "dims: must be 'first' or 'last', got "
        )
    checks.check_dtype("out", torch.float16, checks.FLOATS)
    for value in (torch.int8, "float16", None, torch.zeros(3)):
        assert refused(checks.check_dtype, "out", value, checks.FLOATS).startswith("out: must be ")


def test_pairs():
    assert checks.check_pair("kv", [1, 2], "(keys, scales)") == (1, 2)
    assert refused(checks.check_pair, "kv", (1, 2, 3), "(keys, scales)") == (
        "kv: must be a pair (keys, scales), got 3 of them"
    )
    assert refused(checks.check_pair, "kv", "ab", "(keys, scales)") == "kv: must be a pair (keys, scales), got str"
