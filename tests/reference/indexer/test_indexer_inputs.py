"""The references of the ops that prepare the indexer's queries and keys: roundings, bytes between pages, NaN, no
tokens, and no rope channels."""

import pytest
import torch

from dsa.cases import cases_of
from dsa.cases.indexer import by_slot
from dsa.reference import quantize_indexer_queries, read_indexer_cache, write_indexer_keys
from tests.reference.common import BYTE, E4M3, F32, INT32, NAN, assert_same_bits, zeros

QUERIES, KEYS = cases_of("indexer_inputs")
D, P = 128, 4


def bf16(x):
    return torch.tensor(x).bfloat16().item()


def test_every_stage_rounds_to_the_dtype():
    """The Hadamard transform spreads channel 0 evenly. Three numbers are rounded to bf16: the input of rope (for keys,
    the norm's result), the result of rope, and the transform's result. Without one of these roundings the scale would
    differ."""
    amax = bf16(bf16(bf16(0.3) * 0.7) / 128**0.5)
    assert amax not in (bf16(bf16(0.3 * 0.7) / 128**0.5), bf16(bf16(0.3) * 0.7 / 128**0.5))
    one = zeros(D)
    one[0] = 0.3
    cos, sin = torch.full((1, 32), 0.7), zeros(1, 32)
    q8, w8 = quantize_indexer_queries(one.bfloat16().view(1, 1, D), torch.ones(1, 1), cos, sin, use_ue8m0=False)
    cache, slot = zeros(1, P, 1, D + 4, dtype=BYTE), torch.tensor([0])
    k = torch.ones(1, D).bfloat16()  # no variance, so the norm returns its bias, `one`
    write_indexer_keys(k, torch.ones(D), one, cos, sin, cache, slot, use_ue8m0=False)
    k8, scale = read_indexer_cache(cache, slot)
    assert w8.item() == scale.item() == (torch.tensor(amax) / 448).item()
    assert q8.float().eq(448.0).all() and k8.float().eq(448.0).all()


@pytest.mark.parametrize("dtype", [INT32, torch.int64])
def test_bytes_between_pages_stay(dtype):
    given = KEYS.arguments(tokens=9, page_size=P, slot_dtype=dtype)
    before, size = given["cache"], P * (D + 4)
    wide = torch.full((len(before), size + 52), 0xFF, dtype=BYTE)
    given["cache"] = wide[:, :size].unflatten(1, (P, 1, D + 4))
    KEYS.check(given | {"cache": before}, KEYS.results(given))
    assert wide[:, size:].eq(0xFF).all()


def test_no_queries():
    q8, w8 = QUERIES.run(QUERIES.arguments(tokens=0, heads=5))
    assert (q8.shape, q8.dtype, w8.shape, w8.dtype) == ((0, 5, D), E4M3, (0, 5), F32)


@pytest.mark.parametrize("pages", [0, 1])
def test_no_keys(pages):
    given = KEYS.arguments(tokens=0)
    before = given["cache"].clone()
    write_indexer_keys(**given | {"cache": given["cache"][:pages]})
    assert_same_bits([given["cache"]], [before])


def test_nan_stays_in_its_row():
    queries, keys = QUERIES.arguments(), KEYS.arguments(tokens=3)
    slot = int(keys["slots"][2])

    def run():
        cache = keys["cache"].clone()
        write_indexer_keys(**keys | {"cache": cache})
        return *quantize_indexer_queries(**queries), *by_slot(cache)

    clean = run()
    queries["q"][1, 0, 77] = keys["k"][2, 3] = NAN
    for got, expected, row in zip(run(), clean, ((1, 0), (1, 0), slot, slot)):
        numbers = got[row].view(E4M3) if got.dtype == BYTE else got[row]
        assert numbers.float().isnan().any()
        got[row] = expected[row]
        assert_same_bits([got], [expected])


@pytest.mark.parametrize("dims", ["first", "last"])
def test_without_rope_channels_nothing_is_rotated(dims):
    q, weights = torch.randn(2, 1, D), torch.ones(2, 1)
    expected = quantize_indexer_queries(q, weights, torch.ones(2, 32), zeros(2, 32))
    assert_same_bits(quantize_indexer_queries(q, weights, zeros(2, 0), zeros(2, 0), dims=dims), expected)
