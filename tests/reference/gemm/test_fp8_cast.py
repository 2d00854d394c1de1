"""Casts to FP8: bytes, by hand and by an exhaustive search, and what is not finite."""

import math

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.reference import (
    ceil_to_ue8m0,
    dequantize_per_token,
    per_block_cast_to_fp8,
    per_row_cast_to_fp8,
    per_token_cast_to_fp8,
)
from tests.reference.common import assert_refused
from tests.reference.gemm import e4m3

(TOKENS,) = cases_of("per_token_cast_to_fp8")
CAST, WEIGHT, *_ = cases_of("fp8_gemm_nt")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize(("shape", "gran_k"), [((2, 3, 128), 64), ((2, 3, 256), 128)])
def test_tokens_against_float64(shape, gran_k, use_ue8m0, hadamard, dtype):
    TOKENS.verify(shape=shape, gran_k=gran_k, use_ue8m0=use_ue8m0, hadamard=hadamard, dtype=dtype)


@pytest.mark.parametrize(("rows", "columns", "block"), [(576, 200, 128), (3, 200, 2**31 - 1), (10, 7, 4)])
@pytest.mark.parametrize("use_ue8m0", [True, False])
def test_weights_against_float64(use_ue8m0, rows, columns, block):
    """A block larger than the weight is the weight."""
    CAST.verify(rows=rows, columns=columns, block=block, use_ue8m0=use_ue8m0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        WEIGHT.verify(rows=rows, columns=columns, block=block, dtype=dtype)


def next_above(x):
    return torch.tensor(x).nextafter(torch.tensor(math.inf)).item()


def row(*values, length=128):
    return torch.tensor([[*values, *[0.0] * (length - len(values))]])


@pytest.mark.parametrize("exponent", [-126, -22, -1, 0, 1, 100])
def test_ue8m0_at_and_next_to_a_power_of_two(exponent):
    power = 2.0**exponent
    below = torch.tensor(power).nextafter(torch.tensor(0.0)).item() if exponent > -126 else power
    scales = torch.tensor([power, next_above(power), below])
    assert ceil_to_ue8m0(scales).tolist() == [power, 2 * power, power]


def test_ue8m0_keeps_nan_and_infinity():
    got = ceil_to_ue8m0(torch.tensor([math.inf, math.nan]))
    assert got[0] == math.inf and got[1].isnan()


@pytest.mark.parametrize(
    ("amax", "scale"), [(448.0, 1.0), (next_above(448.0), 2.0), (224.0, 0.5), (225.0, 1.0), (3.5, 2.0**-7)]
)
def test_scale_by_hand(amax, scale):
    q, got = per_token_cast_to_fp8(row(amax, -amax / 2))
    assert got.tolist() == [[scale]]
    assert q[0, 0].float().item() == e4m3.encode_value(amax / scale)
    assert q[0, 1].float().item() == e4m3.encode_value(-amax / 2 / scale)


def test_values_round_to_the_nearest_with_ties_to_even():
    # amax 448 makes the scale 1. Steps are 2 from 16 on and 32 from 256 on; 2^-10 is half the lowest step.
    x = row(448.0, 17.0, 19.0, 18.9, 300.0, 2.0**-10, 3 * 2.0**-10, -17.0)
    q, scale = per_token_cast_to_fp8(x)
    assert scale.item() == 1.0
    assert q[0, :8].float().tolist() == [448.0, 16.0, 20.0, 18.0, 288.0, 0.0, 2.0**-8, -16.0]
    assert q[0, :2].view(torch.uint8).tolist() == [0x7E, 0x58]


@pytest.mark.parametrize("use_ue8m0", [True, False])
def test_random_rows_against_an_exhaustive_search(use_ue8m0):
    """amax is at least 1e-4."""
    x = torch.randn(5, 256) * torch.tensor([[0.0], [1e-6], [1e-5], [1.0], [1e4]])
    q, scale = per_token_cast_to_fp8(x, use_ue8m0)
    assert scale.shape == (5, 2) and q.dtype == torch.float8_e4m3fn
    exact = x.double().unflatten(1, (2, 128)).abs().amax(2).clamp(min=1e-4) / 448
    exact = exact.log2().ceil().exp2() if use_ue8m0 else exact
    torch.testing.assert_close(scale.double(), exact, rtol=0 if use_ue8m0 else 1e-6, atol=0)
    quotients = (x / scale.repeat_interleave(128, 1)).clamp(-448, 448)
    assert q.float().flatten().tolist() == [e4m3.encode_value(v) for v in quotients.flatten().tolist()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_are_products_with_the_reciprocal(dtype):
    """DeepGEMM's bytes: in bf16, one in two thousand differs from the byte of the quotient."""
    x = torch.randn(4096, 128).to(dtype)
    q, scale = per_token_cast_to_fp8(x, use_ue8m0=False)
    assert torch.equal(scale, x.abs().amax(1, keepdim=True).float() / 448.0)
    as_bytes = [y.to(torch.float8_e4m3fn).view(torch.uint8) for y in (x * (1.0 / scale), x.float() / scale)]
    assert torch.equal(q.view(torch.uint8), as_bytes[0])
    assert dtype != torch.bfloat16 or not torch.equal(*as_bytes)
    blocks, scales = per_block_cast_to_fp8(x, use_ue8m0=False)
    full = scales.repeat_interleave(128, 0)
    assert torch.equal(blocks.view(torch.uint8), (x * (1.0 / full)).to(torch.float8_e4m3fn).view(torch.uint8))


def test_nan_and_infinity_stay_in_their_group():
    x = torch.ones(1, 384)
    x[0, 3], x[0, 200] = math.nan, math.inf
    q, scale = per_token_cast_to_fp8(x)
    assert scale[0, 0].isnan() and scale[0, 1] == math.inf and scale[0, 2] == 2.0**-8
    assert q[0, :128].float().isnan().all() and q[0, 200].float().isnan()
    assert q[0, 256:].float().eq(256.0).all()


def test_rows_of_any_length_and_no_rows():
    q, scale = per_row_cast_to_fp8(row(0.5, 896.0, length=7))
    assert scale.tolist() == [2.0] and q[0, :2].float().tolist() == [0.25, 448.0]
    q, scale = per_token_cast_to_fp8(torch.zeros(0, 256))
    assert q.shape == (0, 256) and scale.shape == (0, 2)


def test_dequantize_per_token():
    q, scale = torch.randn(300, 128).to(torch.float8_e4m3fn), torch.rand(300, 2)
    x = dequantize_per_token(q, scale)
    assert torch.equal(x, q.float() * scale.repeat_interleave(64, 1))
    assert torch.equal(dequantize_per_token(q, scale, torch.bfloat16), x.bfloat16())


W, INTS = torch.zeros(2, 128), torch.zeros(2, 128, dtype=torch.int32)
Q, SCALE = torch.zeros(130, 128).to(torch.float8_e4m3fn), torch.ones(2, 1)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (dsa.per_token_cast_to_fp8, (W[:, :100],), "x: the last dimension must be a multiple of gran_k=128, got 100"),
        (dsa.per_block_cast_to_fp8, (W[None],), r"w: shape must be \[O, I\], got \[1, 2, 128\]"),
        (dsa.per_block_cast_to_fp8, (INTS,), "w: dtype must be float32, bfloat16 or float16, got int32"),
        (dsa.per_block_cast_to_fp8, ([[1.0]],), "w: must be a torch.Tensor, got list"),
        (dsa.per_block_cast_to_fp8, (W, 1), "use_ue8m0: must be True or False, got int"),
        (dsa.per_block_cast_to_fp8, (W, True, 0), "block: must be at least 1, got 0"),
        (dsa.per_block_cast_to_fp8, (W, True, 1.0), "block: must be an int, got float"),
        (dsa.dequantize_per_block, (Q.float(), SCALE), "q: dtype must be float8_e4m3fn, got float32"),
        (dsa.dequantize_per_block, (Q, SCALE.double()), "scale: dtype must be float32 or float8_e8m0fnu, got float64"),
        (dsa.dequantize_per_block, (Q, SCALE.to("meta")), "scale: must be on q's device cpu, got meta"),
        (
            dsa.dequantize_per_block,
            (Q, SCALE, torch.int32),
            "dtype: must be float32, bfloat16, float16 or float64, got int",
        ),
        (dsa.dequantize_per_block, (Q, None), "scale: must be a torch.Tensor, got NoneType"),
        (
            dsa.dequantize_per_block,
            (Q, SCALE[:1]),
            r"scale: shape must be \[2, 1\], got \[1, 1\] \(sizes as of q and block",
        ),
    ],
)
def test_wrong_arguments_are_named(function, arguments, message):
    assert_refused(message, function, *arguments)
