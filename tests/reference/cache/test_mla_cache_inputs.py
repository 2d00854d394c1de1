"""What attention caches: small shapes, eps, roundings, NaN, wrong arguments."""

import math

import pytest
import torch

from dsa.cases import cases_of
from dsa.reference import write_mla_cache

CASE = cases_of("mla_cache_inputs")[0]
P = 4
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# d, N, R: V3.2; V4; a small model's
SHAPES = [(576, 512, 64), (512, 512, 64), (48, 32, 16)]


def inputs(tokens=3, shape=(576, 512, 64), dtype=torch.float32):
    """kv, norm_weight, cos, sin"""
    d, n, channels = shape
    angles = 3 * torch.randn(tokens, channels // 2)
    return (torch.randn(tokens, d) + 0.5).to(dtype), 1 + 0.3 * torch.randn(n), angles.cos(), angles.sin()


@pytest.mark.parametrize("eps", [1e-6, 0.7])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape, dtype, interleaved, eps):
    """The squares of the first row are near eps."""
    kv, weight, cos, sin = inputs(3, shape, dtype)
    kv = kv * torch.tensor([1e-3, 1.0, 30.0], dtype=dtype)[:, None]
    options = {"eps": eps, "interleaved": interleaved, "use_ue8m0": True}
    tensors = {"kv": kv, "norm_weight": weight, "cos": cos, "sin": sin, "slots": torch.tensor([9, 2, 4])}
    before = torch.full((3, P, 1, shape[0]), math.nan, dtype=dtype)
    cache, out = before.clone(), torch.full_like(kv, math.nan)
    write_mla_cache(**tensors, **options, cache=cache, out=out)
    CASE.check(tensors | options | {"cache": before, "out": None}, [cache, out])


def test_norm_and_rope_round_to_the_dtype():
    def bf16(x):
        return torch.tensor(x).bfloat16().item()

    # All channels 1 but for eps: the norm gives the weight, 0.3, and rope 0.7 of it.
    assert bf16(bf16(0.3) * 0.7) != bf16(0.3 * 0.7)
    kv = torch.ones(1, 512, dtype=torch.bfloat16)
    cos, sin = torch.full((1, 32), 0.7), torch.zeros(1, 32)
    cache = torch.zeros(1, 1, 1, 512)
    write_mla_cache(kv, torch.full((512,), 0.3), cos, sin, cache, torch.tensor([0]), eps=0.0)
    assert cache[0, 0, 0, :448].eq(bf16(0.3)).all() and cache[0, 0, 0, 448:].eq(bf16(bf16(0.3) * 0.7)).all()


def test_nan_stays_in_its_row_and_part():
    kv, weight, cos, sin = inputs(2)
    kv[0, 3], kv[1, 575] = math.nan, math.nan
    out = torch.empty_like(kv)
    write_mla_cache(kv, weight, cos, sin, torch.zeros(1, P, 1, 576), torch.tensor([0, 1]), out=out)
    assert out[0, :512].isnan().all() and not out[0, 512:].isnan().any()
    assert out[1].isnan().nonzero()[:, 0].tolist() == [574, 575]
