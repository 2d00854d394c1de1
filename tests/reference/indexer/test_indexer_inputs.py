"""Norm, rope, Hadamard and quantisation of the indexer's inputs against plain arithmetic in float64."""

import math
import struct

import pytest
import torch

from dsa.reference import quantize_indexer_queries, write_indexer_keys
from tests.reference.gemm import e4m3

D, P = 128, 4
HADAMARD = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(D)] for i in range(D)], dtype=torch.float64)
E4M3 = torch.tensor(e4m3.FINITE, dtype=torch.float64)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# R, interleaved, dims
ROPES = [(64, False, "first"), (64, True, "first"), (32, False, "last"), (128, True, "last"), (10, True, "last")]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def turning(tokens, rotated=64):
    angles = 3 * random(tokens, rotated // 2, seed=tokens)
    return angles.cos(), angles.sin()


def rounded(row, dtype):
    return torch.as_tensor(row, dtype=torch.float64).to(dtype).tolist()


def layer_norm(row, weight, bias, eps):
    mean = sum(row) / D
    deviation = math.sqrt(sum((x - mean) ** 2 for x in row) / D + eps)
    return [(x - mean) / deviation * w + b for x, w, b in zip(row, weight.tolist(), bias.tolist())]


def rope(row, cos, sin, interleaved, dims):
    half, out = len(cos), list(row)
    first = 0 if dims == "first" else D - 2 * half
    for i, (c, s) in enumerate(zip(cos.tolist(), sin.tolist())):
        a, b = (first + 2 * i, first + 2 * i + 1) if interleaved else (first + i, first + half + i)
        out[a], out[b] = row[a] * c - row[b] * s, row[a] * s + row[b] * c
    return out


def transformed(row, cos, sin, dtype, interleaved, dims):
    turned = torch.tensor(rounded(rope(row, cos, sin, interleaved, dims), dtype), dtype=torch.float64)
    return torch.tensor(rounded(HADAMARD @ turned / D**0.5, dtype), dtype=torch.float64)


def assert_quantised(key_bytes, scale, row, dtype, use_ue8m0):
    """Up to what a last bit of `dtype` changes, `scale` is the row's and every value a nearest one of e4m3."""
    eps = torch.finfo(dtype).eps
    exact = max(row.abs().max().item(), 1e-4) / 448
    if use_ue8m0:  # two candidates only beside a power of two
        assert scale in [2.0 ** math.ceil(math.log2(exact * (1 + e))) for e in (-4 * eps, 4 * eps)]
    else:
        assert scale == pytest.approx(exact, rel=4 * eps)
    quotients = row / scale
    got = torch.tensor([e4m3.decode(b) for b in key_bytes], dtype=torch.float64)
    nearest = (quotients[:, None] - E4M3).abs().amin(1)
    assert ((quotients - got).abs() <= nearest + eps * (quotients.abs() + 256)).all()


def poisoned_cache(pages=3):
    return torch.full((pages, P, 1, D + 4), 0xFF, dtype=torch.uint8)  # every e4m3 and every scale is NaN


def places(slot):
    """Page, and where in it the key's and the scale's bytes are."""
    page, offset = divmod(slot, P)
    return page, slice(offset * D, (offset + 1) * D), slice(P * D + 4 * offset, P * D + 4 * offset + 4)


def stored(cache, slot):
    page, key, scale = places(slot)
    raw = cache[page].flatten().tolist()
    return raw[key], struct.unpack("<f", bytes(raw[scale]))[0]


def key_arguments(tokens=3, dtype=torch.float32, rotated=64):
    k = (random(tokens, D) + 0.5).to(dtype)
    return k, 1 + 0.3 * random(D, seed=1), 0.2 * random(D, seed=2), *turning(tokens, rotated)


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rotated", "interleaved", "dims"), ROPES)
def test_queries(rotated, interleaved, dims, dtype, use_ue8m0):
    q = (random(3, 2, D) * torch.tensor([1e-3, 30.0])[:, None]).to(dtype)
    cos, sin = turning(3, rotated)
    options = {"interleaved": interleaved, "dims": dims, "use_ue8m0": use_ue8m0}
    q8, scale = quantize_indexer_queries(q, torch.ones(3, 2), cos, sin, **options)
    assert q8.shape == q.shape and q8.dtype == torch.float8_e4m3fn
    for t in range(3):
        for h in range(2):
            row = transformed(q[t, h].tolist(), cos[t], sin[t], dtype, interleaved, dims)
            assert_quantised(q8[t, h].view(torch.uint8).tolist(), scale[t, h].item(), row, dtype, use_ue8m0)


@pytest.mark.parametrize("use_ue8m0", [True, False])
def test_the_scale_folds_into_the_weight(use_ue8m0):
    q, (cos, sin) = random(4, 3, D), turning(4)
    weights = random(4, 3, seed=1)
    weights[0, 0], weights[1, 1] = 0.0, -1e30
    plain, scale = quantize_indexer_queries(q, torch.ones(4, 3), cos, sin, use_ue8m0=use_ue8m0)
    q8, w8 = quantize_indexer_queries(q, weights, cos, sin, use_ue8m0=use_ue8m0)
    assert w8.dtype == torch.float32 and torch.equal(w8, weights * scale)
    assert torch.equal(q8.view(torch.uint8), plain.view(torch.uint8))


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rotated", "interleaved", "dims"), ROPES)
def test_keys(rotated, interleaved, dims, dtype, use_ue8m0):
    k, weight, bias, cos, sin = key_arguments(3, dtype, rotated)
    k = k * torch.tensor([1e-3, 1.0, 30.0], dtype=dtype)[:, None]  # the first row's variance is near eps
    cache, slots = poisoned_cache(), [9, 2, 4]
    options = {"interleaved": interleaved, "dims": dims, "use_ue8m0": use_ue8m0}
    write_indexer_keys(k, weight, bias, cos, sin, cache, torch.tensor(slots), **options)
    for t, slot in enumerate(slots):
        normed = rounded(layer_norm(k[t].tolist(), weight, bias, 1e-6), dtype)
        row = transformed(normed, cos[t], sin[t], dtype, interleaved, dims)
        assert_quantised(*stored(cache, slot), row, dtype, use_ue8m0)


def test_eps():
    k, weight, bias, cos, sin = key_arguments(1)
    cache = poisoned_cache()
    write_indexer_keys(k, weight, bias, cos, sin, cache, torch.tensor([0]), eps=0.7, use_ue8m0=False)
    normed = layer_norm(k[0].tolist(), weight, bias, 0.7)
    row = transformed(normed, cos[0], sin[0], torch.float32, False, "first")
    assert_quantised(*stored(cache, 0), row, torch.float32, False)


def test_every_stage_rounds_to_the_dtype():
    def bf16(x):
        return torch.tensor(x).bfloat16().item()

    # Channel 0 alone holds 0.3: Hadamard spreads it evenly. Without any one of the three roundings the scale differs.
    amax = bf16(bf16(bf16(0.3) * 0.7) / 128**0.5)
    assert amax not in (bf16(bf16(0.3 * 0.7) / 128**0.5), bf16(bf16(0.3) * 0.7 / 128**0.5))
    one = torch.zeros(D)
    one[0] = 0.3
    cos, sin = torch.full((1, 32), 0.7), torch.zeros(1, 32)
    q8, w8 = quantize_indexer_queries(one.bfloat16().view(1, 1, D), torch.ones(1, 1), cos, sin, use_ue8m0=False)
    cache = poisoned_cache(1)
    k = torch.ones(1, D, dtype=torch.bfloat16)  # of no variance: the norm's bias is all there is
    write_indexer_keys(k, torch.ones(D), one, cos, sin, cache, torch.tensor([0]), use_ue8m0=False)
    expected = (torch.tensor(amax) / 448).item()
    assert w8.item() == expected and q8.float().eq(448.0).all()
    assert stored(cache, 0) == ([0x7E] * D, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_only_the_bytes_of_the_slots_change(dtype):
    arguments = key_arguments(4)
    wide = torch.full((3, P * (D + 4) + 52), 0xFF, dtype=torch.uint8)
    cache = wide[:, : P * (D + 4)].unflatten(1, (P, 1, D + 4))
    write_indexer_keys(*arguments, cache, torch.tensor([9, -1, 0, 3], dtype=dtype))
    packed = poisoned_cache()
    write_indexer_keys(*arguments, packed, torch.tensor([1, 5, 2, 6]))
    for slot, other in ((9, 1), (0, 2), (3, 6)):
        assert stored(cache, slot) == stored(packed, other)
        page, key, scale = places(slot)
        wide[page, key] = wide[page, scale] = 0xFF
    assert wide.eq(0xFF).all()


def test_no_tokens():
    cos, sin = turning(0)
    q8, w8 = quantize_indexer_queries(torch.zeros(0, 5, D), torch.zeros(0, 5), cos, sin)
    assert (q8.shape, q8.dtype, w8.shape, w8.dtype) == ((0, 5, D), torch.float8_e4m3fn, (0, 5), torch.float32)
    for pages in (0, 2):
        cache = poisoned_cache(pages)
        write_indexer_keys(*key_arguments(0), cache, torch.zeros(0, dtype=torch.int32))
        assert cache.eq(0xFF).all()


def test_nan_stays_in_its_row():
    q, (cos, sin) = random(2, 3, D), turning(2)
    clean, clean_scale = quantize_indexer_queries(q, torch.ones(2, 3), cos, sin)
    q[1, 0, 77] = math.nan
    q8, scale = quantize_indexer_queries(q, torch.ones(2, 3), cos, sin)
    assert q8[1, 0].float().isnan().all() and scale.isnan().nonzero().tolist() == [[1, 0]]
    q8[1, 0], scale[1, 0] = clean[1, 0], clean_scale[1, 0]
    assert torch.equal(q8.view(torch.uint8), clean.view(torch.uint8)) and torch.equal(scale, clean_scale)

    k, *others = key_arguments(3)
    cache, expected, slots = poisoned_cache(), poisoned_cache(), torch.tensor([1, 5, 2])
    write_indexer_keys(k, *others, expected, slots)
    k[1, 3] = math.nan
    write_indexer_keys(k, *others, cache, slots)
    key, scale = stored(cache, 5)
    assert {b & 0x7F for b in key} == {0x7F} and math.isnan(scale)
    assert stored(cache, 1) == stored(expected, 1) and stored(cache, 2) == stored(expected, 2)


@pytest.mark.parametrize("dims", ["first", "last"])
def test_no_rope(dims):
    q, none = random(2, 1, D), torch.zeros(2, 0)
    q8, _ = quantize_indexer_queries(q, torch.ones(2, 1), none, none, dims=dims)
    still, _ = quantize_indexer_queries(q, torch.ones(2, 1), torch.ones(2, 32), torch.zeros(2, 32))
    assert torch.equal(q8.view(torch.uint8), still.view(torch.uint8))


BAD_ROPE = [
    ("cos", None, TypeError, "cos: must be a torch.Tensor, got NoneType"),
    ("cos", torch.zeros(2), ValueError, r"cos: shape must be \[2, R / 2\], got \[2\]"),
    ("cos", torch.zeros(3, 32), ValueError, r"cos: shape must be \[2, R / 2\], got \[3, 32\]"),
    ("cos", torch.zeros(2, 32).bfloat16(), ValueError, "cos: dtype must be float32, got bfloat16"),
    ("sin", [0.0], TypeError, "sin: must be a torch.Tensor, got list"),
    ("sin", torch.zeros(2, 31), ValueError, r"sin: shape must be \[2, 32\], got \[2, 31\]"),
    ("sin", torch.zeros(2, 32).double(), ValueError, "sin: dtype must be float32, got float64"),
    ("dims", "middle", ValueError, "dims: must be 'first' or 'last', got 'middle'"),
]


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("q", [1.0], TypeError, "q: must be a torch.Tensor, got list"),
        ("q", torch.zeros(2, 3, D).double(), ValueError, "q: dtype must be float32, bfloat16 or float16"),
        ("q", torch.zeros(2, D), ValueError, r"q: shape must be \[T, H, 128\], got \[2, 128\]"),
        ("q", torch.zeros(2, 3, 64), ValueError, r"q: shape must be \[T, H, 128\], got \[2, 3, 64\]"),
        ("weights", 1.0, TypeError, "weights: must be a torch.Tensor, got float"),
        ("weights", torch.zeros(2, 4), ValueError, r"weights: shape must be \[2, 3\], got \[2, 4\]"),
        ("weights", torch.zeros(2, 3).bfloat16(), ValueError, "weights: dtype must be float32, got bfloat16"),
        *BAD_ROPE,
    ],
)
def test_queries_refuse(name, value, error, message):
    good = {"q": torch.zeros(2, 3, D), "weights": torch.zeros(2, 3), "cos": torch.ones(2, 32), "sin": torch.ones(2, 32)}
    quantize_indexer_queries(**good)
    with pytest.raises(error, match=message):
        quantize_indexer_queries(**{**good, name: value})


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("k", None, TypeError, "k: must be a torch.Tensor, got NoneType"),
        ("k", torch.zeros(2, D, dtype=torch.int32), ValueError, "k: dtype must be .*, got int32"),
        ("k", torch.zeros(2, 1, D), ValueError, r"k: shape must be \[T, 128\], got \[2, 1, 128\]"),
        ("norm_weight", 1.0, TypeError, "norm_weight: must be a torch.Tensor, got float"),
        ("norm_weight", torch.ones(D).half(), ValueError, "norm_weight: dtype must be float32, got float16"),
        ("norm_bias", None, TypeError, "norm_bias: must be a torch.Tensor, got NoneType"),
        ("norm_bias", torch.ones(1), ValueError, r"norm_bias: shape must be \[128\], got \[1\]"),
        ("cache", [], TypeError, "cache: must be a torch.Tensor, got list"),
        ("cache", poisoned_cache().char(), ValueError, "cache: dtype must be uint8, got int8"),
        ("cache", poisoned_cache().repeat(1, 1, 1, 2)[..., :132], ValueError, "cache: every page must be contiguous"),
        (
            "cache",
            poisoned_cache().view(3, 2 * P, 1, 66),
            ValueError,
            r"cache: shape must be \[pages, P, 1, 132\], got",
        ),
        ("cache", poisoned_cache().squeeze(2), ValueError, r"cache: shape must be \[pages, P, 1, 132\]"),
        ("slots", [0, 1], TypeError, "slots: must be a torch.Tensor, got list"),
        ("slots", torch.zeros(2), ValueError, "slots: dtype must be int32 or int64, got float32"),
        ("slots", torch.tensor([0]), ValueError, r"slots: shape must be \[2\], got \[1\]"),
        ("slots", torch.tensor([0, 12]), ValueError, r"slots: must be -1 or in \[0, 12\), got 12"),
        ("slots", torch.tensor([-2, 0]), ValueError, r"slots: must be -1 or in \[0, 12\), got -2"),
        *BAD_ROPE,
    ],
)
def test_keys_refuse_and_write_nothing(name, value, error, message):
    names = ("k", "norm_weight", "norm_bias", "cos", "sin")
    good = dict(zip(names, key_arguments(2)), cache=poisoned_cache(), slots=torch.tensor([0, 1]))
    write_indexer_keys(**{**good, "cache": poisoned_cache()})
    with pytest.raises(error, match=message):
        write_indexer_keys(**{**good, name: value})
    assert good["cache"].eq(0xFF).all()


def test_more_rotated_channels_than_there_are():
    many = torch.ones(2, 65)
    with pytest.raises(ValueError, match="q: the last dimension must be at least 130 for these cos and sin, got 128"):
        quantize_indexer_queries(torch.zeros(2, 3, D), torch.zeros(2, 3), many, many)
    k, weight, bias, _, _ = key_arguments(2)
    with pytest.raises(ValueError, match="k: the last dimension must be at least 130 for these cos and sin, got 128"):
        write_indexer_keys(k, weight, bias, many, many, poisoned_cache(), torch.tensor([0, 1]))
