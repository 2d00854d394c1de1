"""The cache copies against their references on the GPU, bit for bit."""

import pytest
import torch

import dsa
from dsa.reference.cache import indexer_cache as reference
from dsa.testing import poisoned
from tests.gpu.cache.poisoned_caches import with_slots_outside
from tests.gpu.op_checks import assert_compiles, assert_same_bits, far_apart, replays


def case(tokens, dim=128, page_size=64):
    k = torch.randint(0, 256, (tokens, dim), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    pages = 2 * -(-tokens // page_size) + 1
    slots = torch.randperm(pages * page_size, device="cuda")[:tokens]
    return k, torch.randn(tokens, device="cuda"), slots, (pages, page_size, 1, dim + 4)


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_size", [4, 64, 1000])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_write_and_read(dim, page_size, slot_dtype):
    """Also slots outside the cache: nothing is written there, and zeros are read."""
    k, scale, slots, shape = case(777, dim, page_size)
    got, expected = poisoned(shape, torch.uint8, "cuda"), poisoned(shape, torch.uint8, "cuda")
    slots, skipped = with_slots_outside(slots, shape[0] * page_size, slot_dtype)
    dsa.write_indexer_cache(k, scale, got, slots)
    reference.write_indexer_cache(k, scale, expected, skipped)
    assert torch.equal(got, expected)
    assert_same_bits(dsa.read_indexer_cache(got, slots), reference.read_indexer_cache(expected, skipped))


@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_few_tokens_and_strided_rows(tokens):
    k, scale, slots, shape = case(tokens)
    wide = torch.zeros(tokens, 256, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    wide[:, 128:] = k
    cache = poisoned(shape, torch.uint8, "cuda")
    dsa.write_indexer_cache(wide[:, 128:], scale, cache, slots)
    assert_same_bits(dsa.read_indexer_cache(cache, slots), (k, scale))


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_into_tensors_of_the_callers(dim):
    """Rows and scales any distance apart; what is between them stays as it is."""
    k, scale, slots, shape = case(777, dim)
    cache = poisoned(shape, torch.uint8, "cuda")
    dsa.write_indexer_cache(k, scale, cache, slots)
    slots[3], slots[4] = -1, shape[0] * shape[1]
    expected = reference.read_indexer_cache(cache, slots)
    rows = torch.full((779, dim + 48), 77, dtype=torch.uint8, device="cuda")
    scales = torch.full((779, 3), 77.0, device="cuda")
    got = dsa.read_indexer_cache(cache, slots, rows.view(torch.float8_e4m3fn)[1:-1, 16 : 16 + dim], scales[1:-1, 1])
    assert_same_bits(got, expected)
    rows[1:-1, 16 : 16 + dim], scales[1:-1, 1] = 77, 77
    assert (rows == 77).all() and (scales == 77).all()


def test_no_pages():
    k, scale = dsa.read_indexer_cache(
        torch.empty(0, 64, 1, 132, dtype=torch.uint8, device="cuda"), torch.zeros(5, dtype=torch.int64, device="cuda")
    )
    assert not k.float().any() and not scale.any() and k.shape == (5, 128)


def test_pages_far_apart():
    k, scale, slots, shape = case(300)
    cache = far_apart(poisoned(shape, torch.uint8, "cuda"))
    dsa.write_indexer_cache(k, scale, cache, slots)
    assert_same_bits(dsa.read_indexer_cache(cache, slots), (k, scale))


def test_graph_replay_and_torch_compile():
    k, scale, slots, shape = case(64)
    cache, numbers = poisoned(shape, torch.uint8, "cuda"), k.view(torch.uint8)

    def run(numbers, slots):
        cache.fill_(0xFF)
        dsa.write_indexer_cache(numbers.view(torch.float8_e4m3fn), scale, cache, slots)
        return dsa.read_indexer_cache(cache, slots.flip(0))

    def renew():
        return torch.randint_like(numbers, 256), slots.roll(3)

    for got in replays(run, (numbers, slots), renew):
        assert_same_bits(got, (numbers.flip(0).view(k.dtype), scale.flip(0)))
    assert_compiles(run, numbers, slots)
