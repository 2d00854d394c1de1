"""The references of casts to FP8: values by hand, values compared with a search over all e4m3 numbers, NaN and
infinity."""

import pytest
import torch

from dsa.reference import (
    ceil_to_ue8m0,
    dequantize_per_token,
    per_block_cast_to_fp8,
    per_row_cast_to_fp8,
    per_token_cast_to_fp8,
)
from tests.reference.common import BF16, BYTE, E4M3, F16, F32, INF, NAN
from tests.reference.gemm import e4m3


def next_above(x):
    return torch.tensor(x).nextafter(torch.tensor(INF)).item()


def row(*values, length=128):
    return torch.tensor([[*values, *[0.0] * (length - len(values))]])


@pytest.mark.parametrize("exponent", [-126, -22, -1, 0, 1, 100])
def test_ue8m0_at_and_next_to_a_power_of_two(exponent):
    power = 2.0**exponent
    below = torch.tensor(power).nextafter(torch.tensor(0.0)).item() if exponent > -126 else power
    scales = torch.tensor([power, next_above(power), below])
    assert ceil_to_ue8m0(scales).tolist() == [power, 2 * power, power]


def test_ue8m0_keeps_nan_and_infinity():
    got = ceil_to_ue8m0(torch.tensor([INF, NAN]))
    assert got[0] == INF and got[1].isnan()


@pytest.mark.parametrize(
    ("amax", "scale"), [(448.0, 1.0), (next_above(448.0), 2.0), (224.0, 0.5), (225.0, 1.0), (3.5, 2.0**-7)]
)
def test_scale_by_hand(amax, scale):
    q, got = per_token_cast_to_fp8(row(amax, -amax / 2))
    assert got.tolist() == [[scale]]
    assert q[0, :2].float().tolist() == [e4m3.encode_value(x / scale) for x in (amax, -amax / 2)]


def test_values_round_to_the_nearest_with_ties_to_even():
    # With amax 448 the scale is 1. Adjacent e4m3 values differ by 2 from 16 on, and by 32 from 256 on. 2^-10 is half
    # the smallest positive value.
    q, scale = per_token_cast_to_fp8(row(448.0, 17.0, 19.0, 18.9, 300.0, 2.0**-10, 3 * 2.0**-10, -17.0))
    assert scale.item() == 1.0
    assert q[0, :8].float().tolist() == [448.0, 16.0, 20.0, 18.0, 288.0, 0.0, 2.0**-8, -16.0]
    assert q[0, :2].view(BYTE).tolist() == [0x7E, 0x58]


@pytest.mark.parametrize("use_ue8m0", [True, False])
def test_values_are_those_of_an_exhaustive_search(use_ue8m0):
    x = torch.randn(5, 256) * torch.tensor([[0.0], [1e-6], [1e-5], [1.0], [1e4]])
    q, scale = per_token_cast_to_fp8(x, use_ue8m0)
    quotients = (x / scale.repeat_interleave(128, 1)).clamp(-448, 448)
    assert q.float().flatten().tolist() == [e4m3.encode_value(v) for v in quotients.flatten().tolist()]


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_values_are_products_with_the_reciprocal(dtype):
    """As in DeepGEMM, x is multiplied by 1 / scale. In bf16, about one in two thousand bytes depends on this."""
    x = torch.randn(4096, 128).to(dtype)
    q, scale = per_token_cast_to_fp8(x, use_ue8m0=False)
    assert torch.equal(scale, x.abs().amax(1, keepdim=True).float() / 448.0)
    product, quotient = (y.to(E4M3).view(BYTE) for y in (x * (1.0 / scale), x.float() / scale))
    assert torch.equal(q.view(BYTE), product)
    assert dtype != BF16 or not torch.equal(product, quotient)
    blocks, scales = per_block_cast_to_fp8(x, use_ue8m0=False)
    full = scales.repeat_interleave(128, 0)
    assert torch.equal(blocks.view(BYTE), (x * (1.0 / full)).to(E4M3).view(BYTE))


def test_nan_and_infinity_stay_in_their_group():
    x = torch.ones(1, 384)
    x[0, 3], x[0, 200] = NAN, INF
    q, scale = per_token_cast_to_fp8(x)
    assert scale[0, 0].isnan() and scale[0, 1] == INF and scale[0, 2] == 2.0**-8
    assert q[0, :128].float().isnan().all() and q[0, 200].float().isnan()
    assert q[0, 256:].float().eq(256.0).all()


def test_rows_of_any_length_and_no_rows():
    q, scale = per_row_cast_to_fp8(row(0.5, 896.0, length=7))
    assert scale.tolist() == [2.0] and q[0, :2].float().tolist() == [0.25, 448.0]
    q, scale = per_token_cast_to_fp8(torch.zeros(0, 256))
    assert q.shape == (0, 256) and scale.shape == (0, 2)


def test_dequantize_per_token():
    q, scale = torch.randn(300, 128).to(E4M3), torch.rand(300, 2)
    x = dequantize_per_token(q, scale)
    assert torch.equal(x, q.float() * scale.repeat_interleave(64, 1))
    assert torch.equal(dequantize_per_token(q, scale, BF16), x.bfloat16())
