"""The norm with a cast is the norm and its cast."""

import pytest
import torch

import dsa

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def inputs(tokens=5, channels=256, dtype=torch.bfloat16):
    x, residual = (torch.randn(tokens, channels).to(dtype) for _ in range(2))
    return x, residual, torch.randn(channels)


def same(got, expected):
    assert all(torch.equal(g.view(torch.uint8), e.view(torch.uint8)) for g, e in zip(got, expected, strict=True))


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_the_norm_and_its_cast(dtype, use_ue8m0):
    x, residual, weight = inputs(dtype=dtype)
    total = residual + x
    for h, (y, *cast) in (
        (x, dsa.rms_norm_cast_to_fp8(x, weight, 1e-3, use_ue8m0)),
        (total, dsa.add_rms_norm_cast_to_fp8(x, residual, weight, 1e-3, use_ue8m0)[1:]),
    ):
        same([y], [dsa.rms_norm(h, weight, 1e-3)])
        same(cast, dsa.per_token_cast_to_fp8(y, use_ue8m0))
        assert y.dtype == dtype
    same([dsa.add_rms_norm_cast_to_fp8(x, residual, weight)[0]], [total])
