"""The references of FP8 products: errors, the order of sums, strides, weights of rows, and rows that belong to no
expert."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa.cases import cases_of
from dsa.reference import fp8_gemm_nt, grouped_fp8_gemm_nt
from tests.reference.common import BF16, BYTE, E4M3, F16, F32, NAN, i32

*_, ONE, GROUPED = cases_of("fp8_gemm_nt")


@pytest.mark.parametrize(
    ("rows", "columns", "channels"), [(1, 128, 128), (5, 576, 384), (3, 130, 256), (2, 7, 200), (4, 64, 100)]
)
def test_errors_are_at_most_1e_5(rows, columns, channels):
    """The references' errors must be smaller than those that the kernels' tests allow."""
    assert ONE.verify(rows=rows, columns=columns, channels=channels) < 1e-5
    for tokens in (0, 4):
        sizes = {"sizes": [rows, 0, 3], "columns": columns, "channels": channels}
        assert GROUPED.verify(**sizes, tokens=tokens) < 1e-5


@pytest.mark.parametrize(("scales", "total"), [([2.0**24, 1.0, 1.0], 2.0**24), ([1.0, 1.0, 2.0**24], 2.0**24 + 2)])
def test_blocks_are_added_in_order(scales, total):
    """In fp32, 2^24 + 1 + 1 is 2^24, but 1 + 1 + 2^24 is 2^24 + 2."""
    q = torch.zeros(1, 384).to(E4M3)
    q[0, ::128] = 1.0
    assert fp8_gemm_nt((q, torch.tensor([scales])), (q, torch.ones(1, 3)), F32).item() == total


def exact(*rows, channels=256):
    """Return (small integers in e4m3, power-of-two scales). Sums of their products have the same bits in any order and
    on any CPU.

    rows: (M,) for activations, or (E, N) for weights.
    """
    blocks = rows if len(rows) == 1 else (rows[0], -(-rows[1] // 128))
    return torch.randint(-4, 5, (*rows, channels)).float().to(E4M3), 2.0 ** torch.randint(-3, 3, (*blocks, 2))


def test_leading_dimensions_and_empty_inputs():
    (q, s), (w, ws) = exact(6), tuple(x[0] for x in exact(1, 130))
    flat = fp8_gemm_nt((q, s), (w, ws))
    assert torch.equal(fp8_gemm_nt((q.view(2, 3, 256), s.view(2, 3, 2)), (w, ws)), flat.view(2, 3, 130))
    assert torch.equal(fp8_gemm_nt((q[4], s[4]), (w, ws)), flat[4])
    assert fp8_gemm_nt((q[:0], s[:0]), (w, ws)).shape == (0, 130)
    assert fp8_gemm_nt((q[:, :0], s[:, :0]), (w[:, :0], ws[:, :0])).eq(0).all()


def grouped(rows):
    return exact(9), exact(4, 136), i32([2, 2, rows - 1, rows])


def test_numbers_of_rows_may_have_strides():
    rows = i32([3, 3, 8, 0, 5, 3, 1, 7, 3, 3, 2, 0, 8])
    a, b, ends = grouped(len(rows))
    expected = grouped_fp8_gemm_nt(a, b, ends, rows=rows)
    assert torch.equal(grouped_fp8_gemm_nt(a, b, ends, rows=torch.stack((rows, -rows), 1)[:, 0]), expected)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("rows", [None, i32([8, 0, 0])])
def test_weights_multiply_sums_before_they_are_rounded(rows, dtype):
    count = 9 if rows is None else 3
    a, b, ends = grouped(count)
    weights = torch.rand(count)
    got = grouped_fp8_gemm_nt(a, b, ends, dtype, rows=rows, weights=weights)
    sums = grouped_fp8_gemm_nt(a, b, ends, F32, rows=rows)
    assert torch.equal(got, (sums * weights[:, None]).to(dtype))


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 9),
    cuts=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    gathered=st.booleans(),
    dtype=st.sampled_from([F32, BF16, F16]),
)
def test_rows_from_the_last_end_on_are_nan_and_not_read(count, cuts, gathered, dtype):
    (q, s), b, _ = grouped(9)
    ends = i32(sorted(min(cut, count) for cut in cuts))
    used, weights, rows = int(ends[-1]), torch.rand(count), None
    if gathered:
        rows = torch.randint(0, 9, (count,), dtype=torch.int32)
        expected = grouped_fp8_gemm_nt((q, s), b, ends, dtype, rows=rows[:used], weights=weights[:used])
        rows[used:] = i32([-1, 9, 2**31 - 1]).repeat(3)[: count - used]
    else:
        q, s = q[:count], s[:count]
        expected = grouped_fp8_gemm_nt((q[:used], s[:used]), b, ends, dtype, weights=weights[:used])
        q.view(BYTE)[used:], s[used:] = 0x7F, NAN
    weights[used:] = NAN
    got = grouped_fp8_gemm_nt((q, s), b, ends, dtype, rows=rows, weights=weights)
    assert got.shape == (count, 136) and torch.equal(got[:used], expected)
    assert not got[:used].isnan().any() and got[used:].isnan().all()


@pytest.mark.parametrize(("rows", "weights"), [(0, 4), (9, 4), (9, 0)])
def test_no_weight_has_rows(rows, weights):
    """The calls have no rows, no row with a matrix, and no matrices."""
    a, b, _ = grouped(9)
    got = grouped_fp8_gemm_nt([x[:rows] for x in a], [x[:weights] for x in b], i32([0] * weights))
    assert got.shape == (rows, 136) and got.isnan().all()
