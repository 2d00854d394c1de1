"""Packed batches, pages and their allocator."""

import pytest
import torch

from dsa_layers.kv_cache import OutOfPages, PageAllocator, PagedKVCache
from dsa_layers.sequence_batch import SequenceBatch


def test_packed_tensors_by_hand():
    batch = SequenceBatch.paged([2, 1], [5, 3], [[7, 2], [4]], page_size=4)
    assert batch.positions.tolist() == [3, 4, 2]
    assert batch.block_table.tolist() == [[7, 2], [4, -1]] and batch.block_table.dtype == torch.int32
    assert batch.slots.tolist() == [31, 8, 18]
    assert batch.key_slots.tolist() == [28, 29, 30, 31, 8, 16, 17, 18]
    assert batch.key_starts.tolist() == [0, 0, 5] and batch.visible_keys.tolist() == [4, 5, 3]
    assert batch.last_tokens.tolist() == [1, 2] and batch.key_lens_tensor.tolist() == [5, 3]
    assert batch.max_key_len == 5 and not batch.is_decode
    assert SequenceBatch.paged([1, 1], [5, 3], [[7, 2], [4]], 4).is_decode


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0], [3], [[1]], 4), r"query_lens: every sequence needs at least one new token, got \[0\]"),
        (
            ([1], [5], [[1]], 4),
            r"key_lens\[0\]: must be between query_lens\[0\]=1 and the 4 tokens of its pages, got 5",
        ),
        (([3], [2], [[1]], 4), r"key_lens\[0\]: must be between"),
        (([1, 1], [2], [[1]], 4), "must have one entry a sequence, got 2, 1 and 1"),
    ],
)
def test_impossible_batches(arguments, message):
    with pytest.raises(ValueError, match=message):
        SequenceBatch.paged(*arguments)


def test_pages_are_handed_out_once():
    pages = PageAllocator(4)
    first, second = pages.allocate(2), pages.allocate(2)
    assert sorted(first + second) == [0, 1, 2, 3] and pages.free == 0
    with pytest.raises(OutOfPages, match="1 pages are needed and 0 of 4 are free"):
        pages.allocate(1)
    pages.release(first)
    assert sorted(pages.allocate(2)) == sorted(first)


def test_a_failed_allocation_takes_nothing():
    pages = PageAllocator(3)
    with pytest.raises(OutOfPages):
        pages.allocate(4)
    assert pages.free == 3


def test_releasing_a_free_page_is_an_error():
    pages = PageAllocator(3)
    own = pages.allocate(1)
    pages.release(own)
    for wrong in (own, [7]):
        with pytest.raises(ValueError, match="are not in use"):
            pages.release(wrong)


def test_cache_shapes():
    cache = PagedKVCache(2, 5, 16, latent="fp8", index="fp8")
    assert cache.layer(1).latent.shape == (5, 16, 1, 656) and cache.layer(1).index.shape == (5, 16, 1, 132)
    assert cache.nbytes == 2 * 5 * 16 * (656 + 132)
    cache = PagedKVCache(2, 5, 16, latent=torch.float32, index=torch.bfloat16, latent_dim=48, index_dim=32)
    assert cache.layer(0).latent.shape == (5, 16, 1, 48) and cache.layer(0).index.dtype == torch.bfloat16
    assert not cache.layer(0).latent_is_fp8 and cache.layer(0).page_size == 16
    cache = PagedKVCache(3, 5, 16, latent="fp8", index="fp8", index_layers=[0, 2])
    assert cache.layer(1).index is None and cache.layer(2).index.shape == (5, 16, 1, 132)
    cache.layer(0).index.fill_(1)
    cache.layer(2).index.fill_(2)
    assert (cache.layer(0).index == 1).all() and cache.nbytes == 5 * 16 * (3 * 656 + 2 * 132)
    with pytest.raises(ValueError, match="latent_dim: must be 576"):
        PagedKVCache(1, 1, latent="fp8", latent_dim=48)
