"""FP4 weights as float weights, and float weights in FP4."""

import re

import pytest
import torch

from dsa_layers.io.fp4 import dequantize_fp4, quantize_fp4
from tests.reference.gemm.fp4 import VALUES, e8m0, pack, random_codes, weight


def test_codes_and_nibbles():
    packed = torch.tensor([[0x21, 0x43, 0x65, 0x87, 0xA9, 0xCB, 0xED, 0x0F, *[0] * 8]], dtype=torch.uint8)
    got = dequantize_fp4(packed, e8m0(torch.tensor([[1]])))
    order = [*range(1, 16), 0]
    assert got[0, :16].tolist() == [2 * VALUES[code] for code in order]
    assert torch.equal(got, dequantize_fp4(packed.view(torch.int8), e8m0(torch.tensor([[1]]))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantises_exactly(dtype):
    codes = random_codes(130, 96)
    exponents = torch.randint(-125, 124, (130, 3), generator=torch.Generator().manual_seed(1))
    got = dequantize_fp4(pack(codes), e8m0(exponents), dtype)
    assert got.dtype == dtype
    assert torch.equal(got.double(), weight(codes, exponents))


def test_quantises_to_the_nearest_values():
    """Of all that codes can say under the group's scale, which is the least that reaches its largest magnitude."""
    w = torch.randn(130, 96, generator=torch.Generator().manual_seed(4))
    w = w * torch.exp2(torch.randint(-40, 40, (130, 1), generator=torch.Generator().manual_seed(5)))
    packed, scale = quantize_fp4(w)
    assert (packed.dtype, packed.shape) == (torch.int8, (130, 48))
    assert (scale.dtype, scale.shape) == (torch.float8_e8m0fnu, (130, 3))
    largest, power = w.unflatten(1, (-1, 32)).abs().amax(-1), scale.float()
    assert (largest <= 6 * power).all() and (largest > 3 * power).all()
    reachable = torch.tensor(VALUES) * power.repeat_interleave(32, 1)[..., None]
    least = (reachable - w[..., None]).abs().amin(-1)
    assert torch.equal((dequantize_fp4(packed, scale) - w).abs(), least)


def test_quantising_halves_and_zeros():
    """Halfway between two values the smaller one; a group of zeros has the scale 1."""
    w = torch.zeros(1, 64)
    w[0, :8] = torch.tensor([0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5, 6])
    packed, scale = quantize_fp4(w)
    assert dequantize_fp4(packed, scale)[0, :8].tolist() == [0, 0.5, -1, 1.5, 2, -3, 4, 6]
    assert scale.float().tolist() == [[1, 1]] and dequantize_fp4(packed, scale)[0, 8:].eq(0).all()


@pytest.mark.parametrize("shape", [(4, 40), (32,), (2, 2, 32)])
def test_shapes_that_are_not_quantised(shape):
    message = f"weight: must be a matrix [O, I] with I a multiple of 32, got torch.float32 {list(shape)}"
    with pytest.raises(ValueError, match=re.escape(message)):
        quantize_fp4(torch.zeros(shape))
