"""What attention caches: small shapes, eps, roundings, NaN, wrong arguments."""

import math

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.reference import make_v4_cache, write_mla_cache
from tests.reference.common import assert_refused

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


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("kv", None, "kv: must be a torch.Tensor, got NoneType"),
        ("kv", torch.zeros(2, 576).double(), "kv: dtype must be .*, got float64"),
        ("kv", torch.zeros(2, 512), r"kv: shape must be \[T, 576\], got \[2, 512\]"),
        ("norm_weight", 1.0, "norm_weight: must be a torch.Tensor, got float"),
        ("norm_weight", torch.ones(512).bfloat16(), "norm_weight: dtype must be float32, got bfloat16"),
        ("norm_weight", torch.ones(2, 512), r"norm_weight: shape must be \[N\], got \[2, 512\]"),
        ("norm_weight", torch.ones(577), "norm_weight: must have 1 to 576 channels, as kv has them, got 577"),
        ("norm_weight", torch.ones(0), "norm_weight: must have 1 to 576 channels, as kv has them, got 0"),
        ("cos", torch.zeros(3, 32), r"cos: shape must be \[2, R / 2\], got \[3, 32\]"),
        ("sin", torch.zeros(2, 31), r"sin: shape must be \[2, 32\], got \[2, 31\]"),
        ("cache", torch.zeros(2, P, 1, 700).byte(), "cache: the last dimension of a byte cache must be"),
        ("slots", torch.tensor([0, 8]), r"slots: must be -1 or in \[0, 8\), got 8"),
        ("slots", torch.tensor([-2, 0]), r"slots: must be -1 or in \[0, 8\), got -2"),
        ("slots", torch.zeros(2), "slots: dtype must be int32 or int64, got float32"),
        ("out", torch.zeros(2, 576).half(), "out: dtype must be kv's float32, got float16"),
        ("out", torch.zeros(1, 576), r"out: shape must be \[2, 576\], got \[1, 576\]"),
        ("out", 1, "out: must be a torch.Tensor, got int"),
    ],
)
def test_refuses_and_writes_nothing(name, value, message):
    cache, out = torch.full((2, P, 1, 656), 0xFF, dtype=torch.uint8), torch.full((2, 576), math.nan)
    names = ("kv", "norm_weight", "cos", "sin")
    good = dict(zip(names, inputs(2)), cache=cache, slots=torch.tensor([0, 1]), out=out)
    assert_refused(message, dsa.write_mla_cache, **good | {name: value})
    assert cache.eq(0xFF).all() and out.isnan().all()


def test_v4_refuses_exact_scales():
    arguments = (*inputs(1, (512, 512, 64)), make_v4_cache(1, P), torch.tensor([0]))
    assert_refused("use_ue8m0: must be True for the V4 layout", dsa.write_mla_cache, *arguments, use_ue8m0=False)
