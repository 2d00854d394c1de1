"""References of the indexer's inputs: weights, roundings, bytes that stay, NaN, refusals."""

import math

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.indexer import by_slot
from dsa.reference import quantize_indexer_queries, read_indexer_cache, write_indexer_keys
from tests.reference.common import assert_refused, assert_same_bits

QUERIES, KEYS = cases_of("indexer_inputs")
D, P = 128, 4


def turning(tokens):
    angles = 3 * torch.randn(tokens, 32)
    return angles.cos(), angles.sin()


def poisoned_cache(pages=3):
    return torch.full((pages, P, 1, D + 4), 0xFF, dtype=torch.uint8)  # every e4m3 and every scale is NaN


def key_arguments(tokens=3):
    return torch.randn(tokens, D) + 0.5, 1 + 0.3 * torch.randn(D), 0.2 * torch.randn(D), *turning(tokens)


@pytest.mark.parametrize("eps", [1e-6, 0.7])
@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rotated", "interleaved", "dims"),
    [(64, False, "first"), (64, True, "first"), (32, False, "last"), (128, True, "last"), (10, True, "last")],
)
def test_against_float64(rotated, interleaved, dims, dtype, use_ue8m0, eps):
    """Rows of different sizes; the variance of small keys is near eps."""
    options = {"interleaved": interleaved, "dims": dims, "use_ue8m0": use_ue8m0}
    kind = {"tokens": 30, "rotated": rotated, "dtype": dtype, **options}
    for case, name, more in ((QUERIES, "q", {}), (KEYS, "k", {"eps": eps})):
        given = case.arguments(**kind, **more)
        given[name][::2] *= 1e-3
        given[name][1::3] *= 30
        before = {x: given[x].clone() for x in case.written}
        case.check(given | before, case.results(given))


def test_every_stage_rounds_to_the_dtype():
    def bf16(x):
        return torch.tensor(x).bfloat16().item()

    # Only channel 0 is not 0: Hadamard spreads it evenly. Without any of the three roundings the scale differs.
    amax = bf16(bf16(bf16(0.3) * 0.7) / 128**0.5)
    assert amax not in (bf16(bf16(0.3 * 0.7) / 128**0.5), bf16(bf16(0.3) * 0.7 / 128**0.5))
    one = torch.zeros(D)
    one[0] = 0.3
    cos, sin = torch.full((1, 32), 0.7), torch.zeros(1, 32)
    q8, w8 = quantize_indexer_queries(one.bfloat16().view(1, 1, D), torch.ones(1, 1), cos, sin, use_ue8m0=False)
    cache = poisoned_cache(1)
    k = torch.ones(1, D, dtype=torch.bfloat16)  # no variance: the norm's result is its bias
    write_indexer_keys(k, torch.ones(D), one, cos, sin, cache, torch.tensor([0]), use_ue8m0=False)
    k8, scale = read_indexer_cache(cache, torch.tensor([0]))
    assert w8.item() == scale.item() == (torch.tensor(amax) / 448).item()
    assert q8.float().eq(448.0).all() and k8.float().eq(448.0).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bytes_between_pages_stay(dtype):
    given = KEYS.arguments(tokens=9, page_size=P, slot_dtype=dtype)
    before, size = given["cache"], P * (D + 4)
    wide = torch.full((len(before), size + 52), 0xFF, dtype=torch.uint8)
    given["cache"] = wide[:, :size].unflatten(1, (P, 1, D + 4))
    KEYS.check(given | {"cache": before}, KEYS.results(given))
    assert wide[:, size:].eq(0xFF).all()


def test_no_tokens():
    q8, w8 = quantize_indexer_queries(torch.zeros(0, 5, D), torch.zeros(0, 5), *turning(0))
    assert (q8.shape, q8.dtype, w8.shape, w8.dtype) == ((0, 5, D), torch.float8_e4m3fn, (0, 5), torch.float32)
    for pages in (0, 2):
        cache = poisoned_cache(pages)
        write_indexer_keys(*key_arguments(0), cache, torch.zeros(0, dtype=torch.int32))
        assert cache.eq(0xFF).all()


def test_nan_stays_in_its_row():
    queries, keys = QUERIES.arguments(), KEYS.arguments(tokens=3)
    slot = int(keys["slots"][2])

    def run():
        cache = keys["cache"].clone()
        write_indexer_keys(**keys | {"cache": cache})
        return *quantize_indexer_queries(**queries), *by_slot(cache)

    clean = run()
    queries["q"][1, 0, 77] = keys["k"][2, 3] = math.nan
    for got, expected, row in zip(run(), clean, ((1, 0), (1, 0), slot, slot)):
        numbers = got[row].view(torch.float8_e4m3fn) if got.dtype == torch.uint8 else got[row]
        assert numbers.float().isnan().any()
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
    assert_refused(message, dsa.quantize_indexer_queries, **good | changes)


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
    assert_refused(message, dsa.write_indexer_keys, **good | changes)
    assert good["cache"].eq(0xFF).all()
