"""The comparisons in dsa.testing and `poisoned`, with cases computed by hand."""

import math

import pytest
import torch

from dsa.testing import assert_close, calc_diff, poisoned

INF, NAN = math.inf, math.nan


def tensor(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        ((1.0, 2.0, 3.0), (1.0, 2.0, 3.0), 0.0),
        ((1.0, 0.0), (0.0, 1.0), 1.0),
        ((1.0, 2.0), (-1.0, -2.0), 2.0),
        ((1.0, 1.0), (2.0, 2.0), 1 - 2 * 4 / (2 + 8)),
        ((3.0, 4.0), (4.0, 3.0), 1 - 2 * 24 / (25 + 25)),
        ((1.0, 2.0), (0.0, 0.0), 1.0),
        ((0.0, 0.0), (0.0, 0.0), 0.0),
        ((), (), 0.0),
        # Equal infinities and NaN are left out.
        ((-INF, INF, NAN, 1.0), (-INF, INF, NAN, 1.0), 0.0),
        ((-INF, 1.0, 1.0), (-INF, 2.0, 2.0), 1 - 2 * 4 / (2 + 8)),
        ((INF, INF), (INF, INF), 0.0),
        ((INF, 1.0), (-INF, 1.0), INF),
        ((INF, 1.0), (NAN, 1.0), INF),
        ((-INF, 1.0), (NAN, 1.0), INF),
        ((NAN, 1.0), (1.0, 1.0), INF),
        ((1.0, 1.0), (1.0, -INF), INF),
        ((-INF, 1.0), (-3.4e38, 1.0), INF),
        ((-INF, 1.0), (1.0, -INF), INF),
    ],
)
def test_calc_diff(x, y, expected):
    assert calc_diff(tensor(*x), tensor(*y)) == calc_diff(tensor(*y), tensor(*x)) == pytest.approx(expected, abs=1e-15)


def test_calc_diff_computes_in_fp64():
    x = torch.full((1000,), 1e30)
    assert calc_diff(x, x * 2) == pytest.approx(0.2)  # the squares overflow fp32
    assert calc_diff(x * 0 + 1, x * 0 + 1 + 2**-20) == pytest.approx(2**-41, rel=1e-3)  # below fp32's resolution
    assert calc_diff(tensor(1.0, 2.0).bfloat16(), tensor(1.0, 2.0).to(torch.float8_e4m3fn)) == 0


def test_calc_diff_needs_equal_shapes():
    with pytest.raises(ValueError, match=r"y: must have x's shape \[2\], got \[2, 1\]"):
        calc_diff(torch.ones(2), torch.ones(2, 1))


def close(got, expected, abs_tol=0.1, rel_tol=0.01, **options):
    return assert_close("name", got, expected, abs_tol=abs_tol, rel_tol=rel_tol, **{"cos_tol": 1.0, **options})


@pytest.mark.parametrize(
    ("got", "expected", "largest"),
    [
        (tensor(1.0, 2.0625, -3.03125), tensor(1.0, 2.0, -3.0), 0.0625),
        (tensor(-INF, 1.03125), tensor(-INF, 1.0), 0.03125),
        (tensor(NAN, INF), tensor(NAN, INF), 0),
        (torch.empty(0, 3), torch.empty(0, 3), 0),
        (torch.tensor(2.0), torch.tensor(2.0), 0),
        (tensor(1.0).bfloat16(), tensor(1.03125, dtype=torch.float64), 0.03125),
        (tensor(5, dtype=torch.int32), tensor(5.0), 0),
        (tensor(0.09), tensor(0.0), pytest.approx(0.09)),  # within 0.1, though not within 1 % of 0
        (tensor(100.9), tensor(100.0), pytest.approx(0.9, abs=1e-5)),  # within 1 %, though not within 0.1
    ],
)
def test_assert_close_returns_the_largest_error(got, expected, largest):
    assert close(got, expected) == largest


@pytest.mark.parametrize(
    ("got", "expected", "options", "message"),
    [
        *((tensor(got), tensor(100.0), {}, "differ by more") for got in (101.1, 98.9, -100.0)),
        (tensor(0.11), tensor(0.0), {}, "differ by more"),
        (tensor(1.11), tensor(1.0), {}, "differ by more"),
        # The relative tolerance refers to the expected value.
        (tensor(100.0), tensor(90.0), {"abs_tol": 0, "rel_tol": 0.1}, "differ by more"),
        (torch.tensor(1.0), torch.tensor(2.0), {}, r"first at \(\): 1 for 2"),
        (torch.ones(2), torch.ones(1, 2), {}, r"name: expected shape \[1, 2\], got \[2\]"),
        (tensor(0.05, 0.0), tensor(0.0, 0.05), {"cos_tol": 0.5}, r"name: calc_diff 1 is above 0\.5"),
        *(
            (tensor(*got), tensor(*expected), {"abs_tol": INF, "rel_tol": INF}, f"name: .*{shown}")
            for got, expected, shown in [
                ((1.0, INF), (1.0, -INF), r"1 non-finite entries differ, first at \(1,\): inf for -inf"),
                ((NAN, 1.0), (0.0, 1.0), r"1 non-finite entries differ, first at \(0,\): nan for 0.0"),
                ((0.0, INF), (NAN, 0.0), "2 non-finite entries differ"),
                ((3.4e38, 1.0), (INF, 1.0), "for inf"),
            ]
        ),
    ],
)
def test_assert_close_refuses_what_differs(got, expected, options, message):
    with pytest.raises(AssertionError, match=message):
        close(got, expected, **options)


def test_assert_close_says_where_and_how_far():
    got, expected = torch.zeros(2, 3), torch.zeros(2, 3)
    got[0, 2], got[1, 1] = 0.25, -0.5
    message = (
        "name: 2 of 6 entries differ by more than 0.1 and 0.01 relative; first at (0, 2): 0.25 for 0; largest error 0.5"
    )
    with pytest.raises(AssertionError) as raised:
        close(got, expected)
    assert str(raised.value) == message


def test_assert_close_bounds_the_cosine_unless_it_is_told_not_to():
    got, expected = tensor(0.05, 0.0), tensor(0.0, 0.05)
    close(got, expected)
    with pytest.raises(AssertionError, match="is above 1e-06"):
        assert_close("name", got, expected, abs_tol=0.1, rel_tol=0.01)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2],
    ids=str,
)
def test_poisoned_floats_are_nan(dtype):
    out = poisoned((2, 3), dtype)
    assert out.dtype == dtype and out.shape == (2, 3) and out.float().isnan().all()


def test_poisoned_integers():
    data = poisoned((16,), torch.uint8)
    assert (data == 0xFF).all()
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float32):
        assert data.view(dtype).float().isnan().all()
    assert (poisoned((2,), torch.int32) == -(2**31)).all() and (poisoned((2,), torch.int64) == -(2**63)).all()
    assert poisoned([0, 4], torch.int32).shape == (0, 4)
