"""Experts' first half is the product, the SwiGLU and the cast, one after the other."""

import re

import pytest
import torch

from dsa.reference import (
    fp4_block_scales,
    grouped_fp8_fp4_gemm_swiglu,
    grouped_fp8_gemm_nt,
    grouped_fp8_gemm_swiglu,
    swiglu_cast_to_fp8,
    widen_fp4,
)
from tests.reference.common import assert_refused, assert_same_bits, i32
from tests.reference.gemm.fp4 import e8m0, pack, random_codes

ENDS = i32([2, 2, 6])
ROWS = i32([4, 0, 0, 3, 1, 4])


def operands(columns=256, channels=160, tokens=5):
    torch.manual_seed(0)
    a = torch.randn(tokens, channels).to(torch.float8_e4m3fn), torch.rand(tokens, -(-channels // 128)) + 0.1
    packed, scale = pack(random_codes(3, columns, channels)), e8m0(torch.randint(-9, 1, (3, columns, channels // 32)))
    return a, (packed, scale)


@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("limit", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("columns", "ends"), [(256, [2, 2, 6]), (768, [2, 2, 6]), (256, [0, 1, 1]), (256, [0, 0, 0])])
def test_is_what_it_is_made_of(columns, ends, dtype, limit, use_ue8m0):
    """Also in rows from the last end on: their values and scales are NaN."""
    (a, packed), ends = operands(columns), i32(ends)
    b = widen_fp4(*packed)
    gate_up = grouped_fp8_gemm_nt(a, b, ends, dtype, rows=ROWS)
    gate, up = gate_up[:, : columns // 2], gate_up[:, columns // 2 :]
    expected = swiglu_cast_to_fp8(gate, up, use_ue8m0, limit=limit)
    assert expected[0].shape == (6, columns // 2) and expected[1].shape == (6, columns // 256)
    assert all(x[ends[-1] :].float().isnan().all() and not x[: ends[-1]].float().isnan().any() for x in expected)
    options = {"rows": ROWS, "limit": limit, "use_ue8m0": use_ue8m0, "dtype": dtype}
    assert_same_bits(grouped_fp8_gemm_swiglu(a, b, ends, **options), expected)
    assert_same_bits(grouped_fp8_fp4_gemm_swiglu(a, (*packed, fp4_block_scales(*packed)), ends, **options), expected)


def test_rows_as_they_are():
    (q, s), packed = operands(tokens=6)
    b = widen_fp4(*packed)
    every = torch.arange(6, dtype=torch.int32)
    assert_same_bits(grouped_fp8_gemm_swiglu((q, s), b, ENDS), grouped_fp8_gemm_swiglu((q, s), b, ENDS, rows=every))
    none = torch.zeros(3, dtype=torch.int32)
    values, scales = grouped_fp8_gemm_swiglu((q[:0], s[:0]), b, none)
    assert values.shape == (0, 128) and scales.shape == (0, 1)


@pytest.mark.parametrize("op", [grouped_fp8_gemm_swiglu, grouped_fp8_fp4_gemm_swiglu])
def test_half_of_the_columns_is_a_multiple_of_128(op):
    a, packed = operands(columns=384)
    b = widen_fp4(*packed) if op is grouped_fp8_gemm_swiglu else (*packed, fp4_block_scales(*packed))
    message = r"b\[0\]: must have 2 I rows, of gate and up, with I a multiple of 128, got N=384"
    assert_refused(message, op, a, b, ENDS, rows=ROWS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0.0}, "limit: must be positive or None, got 0.0"),
        ({"rows": ROWS + 1}, "rows: must be from 0 to 4, got 5 at 0"),
        ({"dtype": torch.float64}, "dtype: must be float32, bfloat16 or float16, got float64"),
        ({"rows": ROWS[:5]}, "ends: must ascend from at least 0 to at most M=5 (as of rows), got [2, 2, 6]"),
        ({"use_ue8m0": 1}, "use_ue8m0: must be True or False, got int"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    a, packed = operands()
    assert_refused(re.escape(message), grouped_fp8_gemm_swiglu, a, widen_fp4(*packed), ENDS, **{"rows": ROWS} | options)
