"""Norm and rope of what attention caches, against plain arithmetic in float64."""

import math

import pytest
import torch

from dsa.reference import make_v4_cache, read_kv_cache, write_kv_cache, write_mla_cache

P = 4
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# d, N, R: V3.2; V4; a small model's
SHAPES = [(576, 512, 64), (512, 512, 64), (48, 32, 16)]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(tokens=3, shape=(576, 512, 64), dtype=torch.float32):
    """kv, norm_weight, cos, sin"""
    d, n, rotated = shape
    angles = 3 * random(tokens, rotated // 2, seed=tokens)
    return (random(tokens, d) + 0.5).to(dtype), 1 + 0.3 * random(n, seed=1), angles.cos(), angles.sin()


def rounded(row, dtype):
    return torch.as_tensor(row, dtype=torch.float64).to(dtype).tolist()


def normed(row, weight, eps):
    head = row[: len(weight)]
    inverse = 1 / math.sqrt(sum(x * x for x in head) / len(head) + eps)
    return [x * inverse * w for x, w in zip(head, weight.tolist())] + row[len(weight) :]


def turned(row, cos, sin, interleaved):
    half, out = len(cos), list(row)
    first = len(row) - 2 * half
    for i, (c, s) in enumerate(zip(cos.tolist(), sin.tolist())):
        a, b = (first + 2 * i, first + 2 * i + 1) if interleaved else (first + i, first + half + i)
        out[a], out[b] = row[a] * c - row[b] * s, row[a] * s + row[b] * c
    return out


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows(shape, dtype, interleaved):
    kv, weight, cos, sin = inputs(3, shape, dtype)
    kv = kv * torch.tensor([1e-3, 1.0, 30.0], dtype=dtype)[:, None]  # the first row's square is near eps
    cache = torch.full((3, P, 1, shape[0]), math.nan, dtype=dtype)
    out = torch.full_like(kv, math.nan)
    slots = torch.tensor([9, 2, 4])
    write_mla_cache(kv, weight, cos, sin, cache, slots, interleaved=interleaved, out=out)
    for t in range(3):
        row = rounded(normed(kv[t].tolist(), weight, 1e-6), dtype)
        row = torch.tensor(turned(row, cos[t], sin[t], interleaved), dtype=torch.float64)
        # Once for each of the two roundings, the first of which may tip the other way.
        error = (out[t].double() - row).abs()
        assert (error <= 2 * torch.finfo(dtype).eps * (row.abs() + row[-shape[2] :].abs().max())).all()
    assert torch.equal(read_kv_cache(cache, slots, dtype=dtype), out)
    assert cache.isnan().sum() == 9 * shape[0]


def test_the_rope_key_is_not_normed():
    """V3.2: norm and rope touch different channels, so the rope key's length stays."""
    kv, weight, cos, sin = inputs(2)
    out = torch.empty_like(kv)
    write_mla_cache(kv, 0 * weight, cos, sin, torch.zeros(1, P, 1, 576), torch.tensor([0, 1]), out=out)
    assert not out[:, :512].any()
    assert torch.allclose(out[:, 512:].norm(dim=1), kv[:, 512:].norm(dim=1), rtol=1e-6)


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


def test_eps():
    kv, weight, cos, sin = inputs(1)
    out = torch.empty_like(kv)
    write_mla_cache(kv, weight, cos, sin, torch.zeros(1, P, 1, 576), torch.tensor([0]), eps=0.7, out=out)
    expected = torch.tensor(normed(kv[0].tolist(), weight, 0.7))[:512]
    assert torch.allclose(out[0, :512], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("d", [576, 512])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cache_gets_what_write_kv_cache_makes_of_the_rows(dtype, d, use_ue8m0):
    if d == 512 and not use_ue8m0:
        return
    kv, weight, cos, sin = inputs(5, (d, 512, 64), dtype)
    fused = torch.full((2, P, 1, 656), 0xFF, dtype=torch.uint8) if d == 576 else make_v4_cache(2, P)
    separate, rows, out = fused.clone(), torch.empty_like(kv), torch.empty_like(kv)
    slots = torch.tensor([7, -1, 0, 3, 4], dtype=torch.int32)
    write_mla_cache(kv, weight, cos, sin, fused, slots, use_ue8m0=use_ue8m0, out=out)
    write_mla_cache(kv, weight, cos, sin, torch.empty(0, P, 1, d), torch.full_like(slots, -1), out=rows)
    write_kv_cache(rows, separate, slots, use_ue8m0)
    assert torch.equal(fused, separate)
    # What is kept is what the cache gives back; the skipped token has a row, too.
    written = slots >= 0
    assert torch.equal(out[written], read_kv_cache(fused, slots[written], dtype=dtype))
    row = rounded(normed(kv[1].tolist(), weight, 1e-6), dtype)
    assert torch.allclose(rows[1, :448].double(), torch.tensor(row[:448], dtype=torch.float64), rtol=1e-2, atol=1e-3)
    write_kv_cache(rows, separate, torch.arange(5), use_ue8m0)
    assert torch.equal(out, read_kv_cache(separate, torch.arange(5), dtype=dtype)) and not torch.equal(out, rows)


def test_nan_stays_in_its_row_and_part():
    kv, weight, cos, sin = inputs(2)
    kv[0, 3], kv[1, 575] = math.nan, math.nan
    out = torch.empty_like(kv)
    write_mla_cache(kv, weight, cos, sin, torch.zeros(1, P, 1, 576), torch.tensor([0, 1]), out=out)
    assert out[0, :512].isnan().all() and not out[0, 512:].isnan().any()
    assert out[1].isnan().nonzero()[:, 0].tolist() == [574, 575]


def test_no_tokens():
    cache = torch.full((2, P, 1, 656), 0xFF, dtype=torch.uint8)
    write_mla_cache(*inputs(0), cache, torch.zeros(0, dtype=torch.int64), out=torch.empty(0, 576))
    assert cache.eq(0xFF).all()


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("kv", None, TypeError, "kv: must be a torch.Tensor, got NoneType"),
        ("kv", torch.zeros(2, 576).double(), ValueError, "kv: dtype must be .*, got float64"),
        ("kv", torch.zeros(2, 512), ValueError, r"kv: shape must be \[T, 576\], got \[2, 512\]"),
        ("norm_weight", 1.0, TypeError, "norm_weight: must be a torch.Tensor, got float"),
        ("norm_weight", torch.ones(512).bfloat16(), ValueError, "norm_weight: dtype must be float32, got bfloat16"),
        ("norm_weight", torch.ones(2, 512), ValueError, r"norm_weight: shape must be \[N\], got \[2, 512\]"),
        (
            "norm_weight",
            torch.ones(577),
            ValueError,
            "norm_weight: must have 1 to 576 channels, as kv has them, got 577",
        ),
        ("norm_weight", torch.ones(0), ValueError, "norm_weight: must have 1 to 576 channels, as kv has them, got 0"),
        ("cos", torch.zeros(3, 32), ValueError, r"cos: shape must be \[2, R / 2\], got \[3, 32\]"),
        ("sin", torch.zeros(2, 31), ValueError, r"sin: shape must be \[2, 32\], got \[2, 31\]"),
        ("cache", torch.zeros(2, P, 1, 700).byte(), ValueError, "cache: the last dimension of a byte cache must be"),
        ("slots", torch.tensor([0, 8]), ValueError, r"slots: must be -1 or in \[0, 8\), got 8"),
        ("slots", torch.tensor([-2, 0]), ValueError, r"slots: must be -1 or in \[0, 8\), got -2"),
        ("slots", torch.zeros(2), ValueError, "slots: dtype must be int32 or int64, got float32"),
        ("out", torch.zeros(2, 576).half(), ValueError, "out: dtype must be kv's float32, got float16"),
        ("out", torch.zeros(1, 576), ValueError, r"out: shape must be \[2, 576\], got \[1, 576\]"),
        ("out", 1, TypeError, "out: must be a torch.Tensor, got int"),
    ],
)
def test_refuses_and_writes_nothing(name, value, error, message):
    cache, out = torch.full((2, P, 1, 656), 0xFF, dtype=torch.uint8), torch.full((2, 576), math.nan)
    names = ("kv", "norm_weight", "cos", "sin")
    good = dict(zip(names, inputs(2)), cache=cache, slots=torch.tensor([0, 1]), out=out)
    write_mla_cache(**{**good, "cache": cache.clone(), "out": out.clone()})
    with pytest.raises(error, match=message):
        write_mla_cache(**{**good, name: value})
    assert cache.eq(0xFF).all() and out.isnan().all()


def test_v4_refuses_exact_scales():
    kv, weight, cos, sin = inputs(1, (512, 512, 64))
    with pytest.raises(ValueError, match="use_ue8m0: must be True for the V4 layout"):
        write_mla_cache(kv, weight, cos, sin, make_v4_cache(1, P), torch.tensor([0]), use_ue8m0=False)
