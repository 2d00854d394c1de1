import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa.reference import fp8_gemm_nt, grouped_fp8_gemm_nt


def operands(m, n, k, seed=0):
    g = torch.Generator().manual_seed(seed)
    q = (torch.randn(m, k, generator=g) * 50).to(torch.float8_e4m3fn)
    w = (torch.randn(n, k, generator=g) * 50).to(torch.float8_e4m3fn)
    s = torch.rand(m, -(-k // 128), generator=g) + 0.1
    ws = torch.rand(-(-n // 128), -(-k // 128), generator=g) + 0.1
    return q, s, w, ws


def oracle(q, s, w, ws):
    qd, wd = q.double(), w.double()
    for i in range(wd.shape[0]):
        for g in range(ws.shape[1]):
            wd[i, g * 128 : (g + 1) * 128] *= ws[i // 128, g].double()
    for g in range(s.shape[1]):
        qd[:, g * 128 : (g + 1) * 128] *= s[:, g, None].double()
    return qd @ wd.T


@pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 128), (5, 576, 384), (3, 130, 256), (2, 7, 200), (4, 64, 100)])
def test_against_float64(m, n, k):
    q, s, w, ws = operands(m, n, k)
    expected = oracle(q, s, w, ws)
    got = fp8_gemm_nt((q, s), (w, ws), torch.float32)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    assert torch.equal(fp8_gemm_nt((q, s), (w, ws)), got.bfloat16())


def test_the_last_block_of_576_rows_has_its_own_scale():
    q = torch.ones(1, 128).to(torch.float8_e4m3fn)
    w = torch.ones(576, 128).to(torch.float8_e4m3fn)
    ws = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]])
    y = fp8_gemm_nt((q, torch.ones(1, 1)), (w, ws), torch.float32)[0]
    assert y.tolist() == [128.0] * 128 + [256.0] * 128 + [384.0] * 128 + [512.0] * 128 + [640.0] * 64


def test_scales_by_hand():
    q = torch.zeros(1, 256).to(torch.float8_e4m3fn)
    w = torch.zeros(1, 256).to(torch.float8_e4m3fn)
    q[0, 0], q[0, 255], w[0, 0], w[0, 255] = 2.0, 3.0, 5.0, 7.0
    y = fp8_gemm_nt((q, torch.tensor([[10.0, 100.0]])), (w, torch.tensor([[0.5, 0.25]])), torch.float32)
    assert y.item() == 2 * 5 * 10 * 0.5 + 3 * 7 * 100 * 0.25


def test_blocks_are_added_in_order():
    # 2^24 + 1 + 1 in fp32 is 2^24 added one by one, 2^24 + 2 if the ones are added first.
    q = torch.zeros(1, 384).to(torch.float8_e4m3fn)
    q[0, 0], q[0, 128], q[0, 256] = 1.0, 1.0, 1.0
    scale = torch.tensor([[2.0**24, 1.0, 1.0]])
    assert fp8_gemm_nt((q, scale), (q, torch.ones(1, 3)), torch.float32).item() == 2.0**24
    scale = torch.tensor([[1.0, 1.0, 2.0**24]])
    assert fp8_gemm_nt((q, scale), (q, torch.ones(1, 3)), torch.float32).item() == 2.0**24 + 2


def test_leading_dimensions_and_empty_inputs():
    q, s, w, ws = operands(6, 130, 256)
    flat = fp8_gemm_nt((q, s), (w, ws))
    assert torch.equal(fp8_gemm_nt((q.view(2, 3, 256), s.view(2, 3, 2)), (w, ws)), flat.view(2, 3, 130))
    assert torch.equal(fp8_gemm_nt((q[4], s[4]), (w, ws)), flat[4])
    assert fp8_gemm_nt((q[:0], s[:0]), (w, ws)).shape == (0, 130)
    assert fp8_gemm_nt((q[:, :0], s[:, :0]), (w[:, :0], ws[:, :0])).eq(0).all()


def test_refuses_bad_arguments():
    q, s, w, ws = operands(2, 576, 256)
    with pytest.raises(ValueError, match=r"b\[1\]: shape must be \[5, 2\], got \[4, 2\]"):
        fp8_gemm_nt((q, s), (w, ws[:4]))
    with pytest.raises(ValueError, match=r"a\[1\]: shape must be \[2, 2\], got \[2, 1\]"):
        fp8_gemm_nt((q, s[:, :1]), (w, ws))
    with pytest.raises(ValueError, match=r"a\[0\]: dtype must be float8_e4m3fn, got float32"):
        fp8_gemm_nt((q.float(), s), (w, ws))
    with pytest.raises(ValueError, match=r"a\[0\]: shape must be \[2, 256\], got \[2, 128\]"):
        fp8_gemm_nt((q[:, :128], s), (w, ws))
    with pytest.raises(ValueError, match="out_dtype: must be float32, bfloat16 or float16"):
        fp8_gemm_nt((q, s), (w, ws), torch.int32)
    with pytest.raises(TypeError, match="a: must be a pair"):
        fp8_gemm_nt(q, (w, ws))


def test_groups_are_single_products():
    torch.manual_seed(4)
    q, w = torch.randn(9, 256).to(torch.float8_e4m3fn), torch.randn(4, 136, 256).to(torch.float8_e4m3fn)
    s, ws = torch.rand(9, 2), torch.rand(4, 2, 2)
    got = grouped_fp8_gemm_nt((q, s), (w, ws), torch.tensor([2, 2, 8, 9], dtype=torch.int32), torch.float32)
    for rows, e in ((slice(0, 2), 0), (slice(2, 8), 2), (slice(8, 9), 3)):
        assert torch.equal(got[rows], fp8_gemm_nt((q[rows], s[rows]), (w[e], ws[e]), torch.float32))
    none = torch.zeros(4, dtype=torch.int32)
    assert grouped_fp8_gemm_nt((q[:0], s[:0]), (w, ws), none).shape == (0, 136)


def grouped(rows, columns=136):
    """a of 9 rows, b of 4 weights, and the ends of so many rows."""
    torch.manual_seed(5)
    a = torch.randn(9, 256).to(torch.float8_e4m3fn), torch.rand(9, 2)
    b = torch.randn(4, columns, 256).to(torch.float8_e4m3fn), torch.rand(4, -(-columns // 128), 2)
    return a, b, torch.tensor([2, 2, rows - 1, rows], dtype=torch.int32)


def test_rows_are_gathered():
    """In any order, several times or not at all; strided too."""
    rows = torch.tensor([3, 3, 8, 0, 5, 3, 1, 7, 3, 3, 2, 0, 8], dtype=torch.int32)
    (q, s), b, ends = grouped(len(rows))
    copied = q.view(torch.uint8)[rows].view(q.dtype), s[rows]
    expected = grouped_fp8_gemm_nt(copied, b, ends, torch.float32)
    assert torch.equal(grouped_fp8_gemm_nt((q, s), b, ends, torch.float32, rows=rows), expected)
    every_second = torch.stack((rows, -rows), 1)[:, 0]
    assert torch.equal(grouped_fp8_gemm_nt((q, s), b, ends, torch.float32, rows=every_second), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_multiply_sums_before_they_are_rounded(dtype):
    a, b, ends = grouped(9)
    weights = torch.rand(9)
    got = grouped_fp8_gemm_nt(a, b, ends, dtype, weights=weights)
    sums = grouped_fp8_gemm_nt(a, b, ends, torch.float32)
    assert torch.equal(got, (sums * weights[:, None]).to(dtype))
    rows = torch.tensor([8, 0, 0], dtype=torch.int32)
    both = grouped_fp8_gemm_nt(a, b, torch.tensor([0, 1, 1, 3]).int(), dtype, rows=rows, weights=weights[:3])
    for m, (row, e) in enumerate(((8, 1), (0, 3), (0, 3))):
        one = fp8_gemm_nt(tuple(x[row : row + 1] for x in a), tuple(x[e] for x in b), torch.float32)
        assert torch.equal(both[m], (one[0] * weights[m]).to(dtype))


@pytest.mark.parametrize("row", [-1, 9, 2**31 - 1, -(2**31)])
def test_rows_that_are_not_there(row):
    a, b, ends = grouped(3)
    rows = torch.tensor([0, row, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match=f"rows: must be from 0 to 8, got {row} at 1"):
        grouped_fp8_gemm_nt(a, b, ends, rows=rows)


def test_rows_and_weights_have_one_length():
    a, b, ends = grouped(9)
    rows, weights = torch.arange(9, dtype=torch.int32), torch.ones(8)
    for options, message in [
        ({"weights": weights}, r"weights: shape must be \[9\], got \[8\] \(sizes as of a\[0\], without rows\)"),
        ({"rows": rows, "weights": weights}, r"weights: shape must be \[9\], got \[8\] \(sizes as of rows\)"),
        ({"rows": rows.long()}, "rows: dtype must be int32, got int64"),
        ({"weights": weights.double()}, "weights: dtype must be float32, got float64"),
        ({"rows": rows[:8]}, r"ends: must ascend from at least 0 to at most M=8 \(as of rows\), got \[2, 2, 8, 9\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            grouped_fp8_gemm_nt(a, b, ends, **options)


def of_the_rows_in_use(a, b, ends, dtype, rows, weights):
    """The product of those rows alone that a weight has, whatever the others hold."""
    used = int(ends[-1])
    if rows is None:
        a, weights = tuple(x[:used] for x in a), None if weights is None else weights[:used]
        return grouped_fp8_gemm_nt(a, b, ends, dtype, weights=weights)
    return grouped_fp8_gemm_nt(a, b, ends, dtype, rows=rows[:used], weights=None if weights is None else weights[:used])


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 9),
    cuts=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    gathered=st.booleans(),
    weighted=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_rows_behind_the_last_end_are_nobodys(count, cuts, gathered, weighted, dtype):
    """They are NaN, and nothing that stands there is read: values, scales, numbers of rows and weights."""
    (q, s), b, _ = grouped(9)
    ends = torch.tensor(sorted(min(cut, count) for cut in cuts), dtype=torch.int32)
    used = int(ends[-1])
    rows = torch.randint(0, 9, (count,), dtype=torch.int32) if gathered else None
    weights = torch.rand(count) if weighted else None
    a = (q, s) if gathered else (q[:count], s[:count])
    expected = of_the_rows_in_use(a, b, ends, dtype, rows, weights)
    if gathered:
        rows[used:] = torch.tensor([-1, 9, 2**31 - 1]).repeat(3)[: count - used]
    else:
        a = tuple(x.clone() for x in a)
        a[0].view(torch.uint8)[used:], a[1][used:] = 0x7F, torch.nan
    if weighted:
        weights[used:] = torch.nan
    got = grouped_fp8_gemm_nt(a, b, ends, dtype, rows=rows, weights=weights)
    assert got.shape == (count, 136) and torch.equal(got[:used], expected)
    assert not got[:used].isnan().any() and got[used:].isnan().all()


def test_no_weight_has_rows():
    """Nor need there be a weight."""
    a, (w, ws), _ = grouped(9)
    got = grouped_fp8_gemm_nt(a, (w, ws), torch.zeros(4, dtype=torch.int32))
    assert got.shape == (9, 136) and got.isnan().all()
    got = grouped_fp8_gemm_nt(a, (w[:0], ws[:0]), torch.zeros(0, dtype=torch.int32))
    assert got.shape == (9, 136) and got.isnan().all()


@pytest.mark.parametrize("ends", [[2, 1, 8, 9], [2, 3, 9, 8], [-1, 3, 8, 9], [-1, -1, -1, -1], [2, 3, 8, 10]])
def test_ends_that_are_none(ends):
    q, w = torch.zeros(9, 128).to(torch.float8_e4m3fn), torch.zeros(4, 8, 128).to(torch.float8_e4m3fn)
    message = re.escape(f"ends: must ascend from at least 0 to at most M=9 (as of a[0], without rows), got {ends}")
    with pytest.raises(ValueError, match=message):
        grouped_fp8_gemm_nt((q, torch.ones(9, 1)), (w, torch.ones(4, 1, 1)), torch.tensor(ends, dtype=torch.int32))
