"""The bridge of the norm with a cast, on the CPU: dispatch, what it launches, torch.compile, errors with a name."""

import pytest
import torch

import dsa
from dsa.ops.elementwise import rms_norm_cast as op  # noqa: F401 -- `launches` looks at it

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


def test_parts_of_larger_tensors_are_used_where_they_are(launches):
    x, residual, weight = inputs(6, 512)
    dsa.add_rms_norm_cast_to_fp8(x[::2, :256], residual[:3, 128:384], weight[:256])
    assert [t.stride() for t in launches[0][1][:2]] == [(1024, 1), (512, 1)]
