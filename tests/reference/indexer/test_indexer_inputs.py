"""Norm, rope, Hadamard and quantisation of the indexer's inputs against plain arithmetic in float64."""

import math

import pytest
import torch
from torch.nn.functional import layer_norm

from dsa.cases.elementwise import rotated
from dsa.reference import quantize_indexer_queries, read_indexer_cache, write_indexer_keys
from tests.reference.common import assert_refused, assert_same_bits
from tests.reference.gemm import e4m3

D, P = 128, 4
HADAMARD = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(D)] for i in range(D)], dtype=torch.float64)
E4M3 = torch.tensor(e4m3.FINITE, dtype=torch.float64)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# R, interleaved, dims
ROPES = [(64, False, "first"), (64, True, "first"), (32, False, "last"), (128, True, "last"), (10, True, "last")]


def turning(tokens, channels=64):
    angles = 3 * torch.randn(tokens, channels // 2)
    return angles.cos(), angles.sin()


def transformed(rows, cos, sin, dtype, interleaved=False, dims="first"):
    """Rope and Hadamard, each of which rounds to `dtype`."""
    turned = rotated(rows, cos, sin, interleaved, dims).to(dtype).double()
    return (turned @ HADAMARD / D**0.5).to(dtype).double()


def assert_quantised(q, scale, rows, dtype, use_ue8m0):
    """Up to what a last bit of `dtype` changes, `scale` is each row's and every value a nearest one of e4m3."""
    eps, scale = torch.finfo(dtype).eps, scale.double()
    exact = rows.abs().amax(-1).clamp(min=1e-4) / 448
    if use_ue8m0:  # two candidates only close to a power of two
        low, high = ((exact * (1 + e)).log2().ceil().exp2() for e in (-4 * eps, 4 * eps))
        assert ((scale == low) | (scale == high)).all()
    else:
        torch.testing.assert_close(scale, exact, rtol=4 * eps, atol=0)
    quotients = rows / scale[..., None]
    nearest = (quotients[..., None] - E4M3).abs().amin(-1)
    assert ((quotients - q.double()).abs() <= nearest + eps * (quotients.abs() + 256)).all()


def poisoned_cache(pages=3):
    return torch.full((pages, P, 1, D + 4), 0xFF, dtype=torch.uint8)  # every e4m3 and every scale is NaN


def key_arguments(tokens=3, dtype=torch.float32, channels=64):
    k = (torch.randn(tokens, D) + 0.5).to(dtype)
    return k, 1 + 0.3 * torch.randn(D), 0.2 * torch.randn(D), *turning(tokens, channels)


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "interleaved", "dims"), ROPES)
def test_queries(channels, interleaved, dims, dtype, use_ue8m0):
    q = (torch.randn(3, 2, D) * torch.tensor([1e-3, 30.0])[:, None]).to(dtype)
    rope = turning(3, channels)
    options = {"interleaved": interleaved, "dims": dims}
    q8, scale = quantize_indexer_queries(q, torch.ones(3, 2), *rope, **options, use_ue8m0=use_ue8m0)
    assert q8.shape == q.shape and q8.dtype == torch.float8_e4m3fn
    assert_quantised(q8, scale, transformed(q, *rope, dtype, **options), dtype, use_ue8m0)


@pytest.mark.parametrize("use_ue8m0", [True, False])
def test_the_scale_folds_into_the_weight(use_ue8m0):
    q, rope, weights = torch.randn(4, 3, D), turning(4), torch.randn(4, 3)
    weights[0, 0], weights[1, 1] = 0.0, -1e30
    plain, scale = quantize_indexer_queries(q, torch.ones(4, 3), *rope, use_ue8m0=use_ue8m0)
    got = quantize_indexer_queries(q, weights, *rope, use_ue8m0=use_ue8m0)
    assert_same_bits(got, (plain, weights * scale))


@pytest.mark.parametrize("eps", [{}, {"eps": 0.7}])
@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "interleaved", "dims"), ROPES)
def test_keys(channels, interleaved, dims, dtype, use_ue8m0, eps):
    k, weight, bias, *rope = key_arguments(3, dtype, channels)
    k = k * torch.tensor([1e-3, 1.0, 30.0], dtype=dtype)[:, None]  # the first row's variance is near eps
    cache, slots, options = poisoned_cache(), torch.tensor([9, 2, 4]), {"interleaved": interleaved, "dims": dims}
    write_indexer_keys(k, weight, bias, *rope, cache, slots, **options, **eps, use_ue8m0=use_ue8m0)
    normed = layer_norm(k.double(), (D,), weight.double(), bias.double(), eps.get("eps", 1e-6)).to(dtype)
    rows = transformed(normed, *rope, dtype, **options)
    assert_quantised(*read_indexer_cache(cache, slots), rows, dtype, use_ue8m0)


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
    k8, scale = read_indexer_cache(cache, torch.tensor([0]))
    assert w8.item() == scale.item() == (torch.tensor(amax) / 448).item()
    assert q8.float().eq(448.0).all() and k8.float().eq(448.0).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_only_the_bytes_of_the_slots_change(dtype):
    arguments, packed = key_arguments(4), poisoned_cache()
    write_indexer_keys(*arguments, packed, torch.tensor([1, 5, 2, 6]))
    wide = torch.full((3, P * (D + 4) + 52), 0xFF, dtype=torch.uint8)
    cache = wide[:, : P * (D + 4)].unflatten(1, (P, 1, D + 4))
    write_indexer_keys(*arguments, cache, torch.tensor([9, -1, 0, 3], dtype=dtype))
    written, others = torch.tensor([9, 0, 3]), torch.tensor([1, 2, 4, 5, 6, 7, 8, 10, 11])
    assert_same_bits(read_indexer_cache(cache, written), read_indexer_cache(packed, torch.tensor([1, 2, 6])))
    assert all(x.float().isnan().all() for x in read_indexer_cache(cache, others))
    assert wide[:, P * (D + 4) :].eq(0xFF).all()


def test_no_tokens():
    q8, w8 = quantize_indexer_queries(torch.zeros(0, 5, D), torch.zeros(0, 5), *turning(0))
    assert (q8.shape, q8.dtype, w8.shape, w8.dtype) == ((0, 5, D), torch.float8_e4m3fn, (0, 5), torch.float32)
    for pages in (0, 2):
        cache = poisoned_cache(pages)
        write_indexer_keys(*key_arguments(0), cache, torch.zeros(0, dtype=torch.int32))
        assert cache.eq(0xFF).all()


def test_nan_stays_in_its_row():
    q, rope = torch.randn(2, 3, D), turning(2)
    k, *others = key_arguments(3)

    def both():
        cache = poisoned_cache()
        write_indexer_keys(k, *others, cache, torch.tensor([1, 5, 2]))
        queries = quantize_indexer_queries(q, torch.ones(2, 3), *rope)
        return *queries, *read_indexer_cache(cache, torch.tensor([1, 5, 2]))

    clean = both()
    q[1, 0, 77] = k[1, 3] = math.nan
    for got, expected, row in zip(both(), clean, ((1, 0), (1, 0), (1,), (1,))):
        assert got[row].float().isnan().all()
        got[row] = expected[row]
        assert_same_bits([got], [expected])


@pytest.mark.parametrize("dims", ["first", "last"])
def test_no_rope(dims):
    q, none = torch.randn(2, 1, D), torch.zeros(2, 0)
    got = quantize_indexer_queries(q, torch.ones(2, 1), none, none, dims=dims)
    assert_same_bits(got, quantize_indexer_queries(q, torch.ones(2, 1), torch.ones(2, 32), torch.zeros(2, 32)))


MANY = torch.ones(2, 65)
BAD_ROPE = [
    ({"cos": None}, "cos: must be a torch.Tensor, got NoneType"),
    ({"cos": torch.zeros(2)}, r"cos: shape must be \[2, R / 2\], got \[2\]"),
    ({"cos": torch.zeros(3, 32)}, r"cos: shape must be \[2, R / 2\], got \[3, 32\]"),
    ({"cos": torch.zeros(2, 32).bfloat16()}, "cos: dtype must be float32, got bfloat16"),
    ({"sin": [0.0]}, "sin: must be a torch.Tensor, got list"),
    ({"sin": torch.zeros(2, 31)}, r"sin: shape must be \[2, 32\], got \[2, 31\]"),
    ({"sin": torch.zeros(2, 32).double()}, "sin: dtype must be float32, got float64"),
    ({"dims": "middle"}, "dims: must be 'first' or 'last', got 'middle'"),
    ({"cos": MANY, "sin": MANY}, "[qk]: the last dimension must be at least 130 for these cos and sin, got 128"),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": [1.0]}, "q: must be a torch.Tensor, got list"),
        ({"q": torch.zeros(2, 3, D).double()}, "q: dtype must be float32, bfloat16 or float16"),
        ({"q": torch.zeros(2, D)}, r"q: shape must be \[T, H, 128\], got \[2, 128\]"),
        ({"q": torch.zeros(2, 3, 64)}, r"q: shape must be \[T, H, 128\], got \[2, 3, 64\]"),
        ({"weights": 1.0}, "weights: must be a torch.Tensor, got float"),
        ({"weights": torch.zeros(2, 4)}, r"weights: shape must be \[2, 3\], got \[2, 4\]"),
        ({"weights": torch.zeros(2, 3).bfloat16()}, "weights: dtype must be float32, got bfloat16"),
        *BAD_ROPE,
    ],
)
def test_queries_refuse(changes, message):
    good = {"q": torch.zeros(2, 3, D), "weights": torch.zeros(2, 3), "cos": torch.ones(2, 32), "sin": torch.ones(2, 32)}
    assert_refused(message, quantize_indexer_queries, **good | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": None}, "k: must be a torch.Tensor, got NoneType"),
        ({"k": torch.zeros(2, D, dtype=torch.int32)}, "k: dtype must be .*, got int32"),
        ({"k": torch.zeros(2, 1, D)}, r"k: shape must be \[T, 128\], got \[2, 1, 128\]"),
        ({"norm_weight": 1.0}, "norm_weight: must be a torch.Tensor, got float"),
        ({"norm_weight": torch.ones(D).half()}, "norm_weight: dtype must be float32, got float16"),
        ({"norm_bias": None}, "norm_bias: must be a torch.Tensor, got NoneType"),
        ({"norm_bias": torch.ones(1)}, r"norm_bias: shape must be \[128\], got \[1\]"),
        ({"cache": []}, "cache: must be a torch.Tensor, got list"),
        ({"cache": poisoned_cache().char()}, "cache: dtype must be uint8, got int8"),
        ({"cache": poisoned_cache().repeat(1, 1, 1, 2)[..., :132]}, "cache: every page must be contiguous"),
        ({"cache": poisoned_cache().view(3, 2 * P, 1, 66)}, r"cache: shape must be \[pages, P, 1, 132\], got"),
        ({"cache": poisoned_cache().squeeze(2)}, r"cache: shape must be \[pages, P, 1, 132\]"),
        ({"slots": [0, 1]}, "slots: must be a torch.Tensor, got list"),
        ({"slots": torch.zeros(2)}, "slots: dtype must be int32 or int64, got float32"),
        ({"slots": torch.tensor([0])}, r"slots: shape must be \[2\], got \[1\]"),
        ({"slots": torch.tensor([0, 12])}, r"slots: must be -1 or in \[0, 12\), got 12"),
        ({"slots": torch.tensor([-2, 0])}, r"slots: must be -1 or in \[0, 12\), got -2"),
        *BAD_ROPE,
    ],
)
def test_keys_refuse_and_write_nothing(changes, message):
    names = ("k", "norm_weight", "norm_bias", "cos", "sin")
    good = dict(zip(names, key_arguments(2)), cache=poisoned_cache(), slots=torch.tensor([0, 1]))
    assert_refused(message, write_indexer_keys, **good | changes)
    assert good["cache"].eq(0xFF).all()
