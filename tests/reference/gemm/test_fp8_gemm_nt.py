"""Products of FP8 operands: the order of sums, rows of no expert, and contents that are refused."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dsa
from dsa.cases import cases_of
from dsa.reference import fp8_gemm_nt, grouped_fp8_gemm_nt
from tests.reference.common import assert_refused, i32

*_, ONE, GROUPED = cases_of("fp8_gemm_nt")
E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("rows", "columns", "channels"), [(1, 128, 128), (5, 576, 384), (3, 130, 256), (2, 7, 200), (4, 64, 100)]
)
def test_against_float64(rows, columns, channels):
    """With an error of 1e-5 at most, where kernels may have more."""
    assert ONE.verify(rows=rows, columns=columns, channels=channels) < 1e-5
    sizes = {"sizes": [rows, 0, 3], "columns": columns, "channels": channels}
    for tokens in (0, 4):
        assert GROUPED.verify(**sizes, tokens=tokens) < 1e-5


def test_blocks_are_added_in_order():
    # In fp32, 2^24 + 1 + 1 is 2^24 one by one, and 2^24 + 2 if the ones are added first.
    q = torch.zeros(1, 384).to(E4M3)
    q[0, 0], q[0, 128], q[0, 256] = 1.0, 1.0, 1.0
    scale = torch.tensor([[2.0**24, 1.0, 1.0]])
    assert fp8_gemm_nt((q, scale), (q, torch.ones(1, 3)), torch.float32).item() == 2.0**24
    scale = torch.tensor([[1.0, 1.0, 2.0**24]])
    assert fp8_gemm_nt((q, scale), (q, torch.ones(1, 3)), torch.float32).item() == 2.0**24 + 2


def exact(*rows, channels=256):
    """Integers whose scales are powers of two: their sums have the same bits in any order, so on any CPU."""
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
    """a with 9 rows, b with 4 weights, and ends for this many rows."""
    return exact(9), exact(4, 136), i32([2, 2, rows - 1, rows])


def test_numbers_of_rows_may_have_strides():
    rows = i32([3, 3, 8, 0, 5, 3, 1, 7, 3, 3, 2, 0, 8])
    a, b, ends = grouped(len(rows))
    expected = grouped_fp8_gemm_nt(a, b, ends, rows=rows)
    assert torch.equal(grouped_fp8_gemm_nt(a, b, ends, rows=torch.stack((rows, -rows), 1)[:, 0]), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [None, i32([8, 0, 0])])
def test_weights_multiply_sums_before_they_are_rounded(rows, dtype):
    count = 9 if rows is None else 3
    a, b, ends = grouped(count)
    weights = torch.rand(count)
    got = grouped_fp8_gemm_nt(a, b, ends, dtype, rows=rows, weights=weights)
    sums = grouped_fp8_gemm_nt(a, b, ends, torch.float32, rows=rows)
    assert torch.equal(got, (sums * weights[:, None]).to(dtype))


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 9),
    cuts=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    gathered=st.booleans(),
    weighted=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_rows_from_the_last_end_on_are_nan_and_not_read(count, cuts, gathered, weighted, dtype):
    """Neither their values, scales and weights nor their numbers are read."""
    (q, s), b, _ = grouped(9)
    ends = i32(sorted(min(cut, count) for cut in cuts))
    used = int(ends[-1])
    weights = torch.rand(count) if weighted else None
    options = {"weights": weights[:used] if weighted else None}
    if gathered:
        rows = torch.randint(0, 9, (count,), dtype=torch.int32)
        expected = grouped_fp8_gemm_nt((q, s), b, ends, dtype, rows=rows[:used], **options)
        rows[used:] = i32([-1, 9, 2**31 - 1]).repeat(3)[: count - used]
    else:
        q, s, rows = q[:count], s[:count], None
        expected = grouped_fp8_gemm_nt((q[:used], s[:used]), b, ends, dtype, **options)
        q.view(torch.uint8)[used:], s[used:] = 0x7F, torch.nan
    if weighted:
        weights[used:] = torch.nan
    got = grouped_fp8_gemm_nt((q, s), b, ends, dtype, rows=rows, weights=weights)
    assert got.shape == (count, 136) and torch.equal(got[:used], expected)
    assert not got[:used].isnan().any() and got[used:].isnan().all()


def test_no_weight_has_rows():
    """There may also be no weight, and no row."""
    a, (w, ws), _ = grouped(9)
    assert grouped_fp8_gemm_nt(tuple(x[:0] for x in a), (w, ws), i32([0] * 4)).shape == (0, 136)
    for weights in (4, 0):
        got = grouped_fp8_gemm_nt(a, (w[:weights], ws[:weights]), i32([0] * weights))
        assert got.shape == (9, 136) and got.isnan().all()


Q, S, W, WS = torch.zeros(2, 256).to(E4M3), torch.ones(2, 2), torch.zeros(576, 256).to(E4M3), torch.ones(5, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((Q, S), (W, WS[:4])), r"b\[1\]: shape must be \[5, 2\], got \[4, 2\]"),
        (((Q, S[:, :1]), (W, WS)), r"a\[1\]: shape must be \[2, 2\], got \[2, 1\]"),
        (((Q.float(), S), (W, WS)), r"a\[0\]: dtype must be float8_e4m3fn, got float32"),
        (((Q[:, :128], S), (W, WS)), r"a\[0\]: shape must be \[2, 256\], got \[2, 128\]"),
        (((Q, S), (W, WS), torch.int32), "out_dtype: must be float32, bfloat16 or float16"),
        ((Q, (W, WS)), "a: must be a pair"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    assert_refused(message, dsa.fp8_gemm_nt, *arguments)


ROWS = torch.arange(9, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"rows": i32([0, row, 1])}, f"rows: must be from 0 to 8, got {row} at 1") for row in (-1, 9, 2**31 - 1)),
        ({"weights": torch.ones(8)}, "weights: shape must be [9], got [8] (sizes as of a[0], without rows)"),
        ({"rows": ROWS, "weights": torch.ones(8)}, "weights: shape must be [9], got [8] (sizes as of rows)"),
        ({"rows": ROWS.long()}, "rows: dtype must be int32, got int64"),
        ({"weights": torch.ones(9).double()}, "weights: dtype must be float32, got float64"),
        ({"rows": ROWS[:2]}, "ends: must ascend from at least 0 to at most M=2 (as of rows), got [2, 2, 2, 3]"),
    ],
)
def test_wrong_arguments_of_groups_are_named(changes, message):
    a, b, ends = grouped(3)
    assert_refused(re.escape(message), dsa.grouped_fp8_gemm_nt, **{"a": a, "b": b, "ends": ends} | changes)


@pytest.mark.parametrize("ends", [[2, 1, 8, 9], [2, 3, 9, 8], [-1, 3, 8, 9], [-1, -1, -1, -1], [2, 3, 8, 10]])
def test_ends_that_do_not_ascend_are_refused(ends):
    message = re.escape(f"ends: must ascend from at least 0 to at most M=9 (as of a[0], without rows), got {ends}")
    assert_refused(message, grouped_fp8_gemm_nt, *grouped(9)[:2], i32(ends))
