"""References of the indexer's inputs: weights, roundings, bytes that stay, NaN, refusals."""

import math

import pytest
import torch

from dsa.cases import cases_of
from dsa.cases.indexer import by_slot
from dsa.reference import quantize_indexer_queries, read_indexer_cache, write_indexer_keys
from tests.reference.common import assert_same_bits

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
