"""Caches, and who owns which page."""

import pytest
import torch

from dsa_layers.cache.cache import OutOfPages, PageAllocator
from dsa_layers.cache.compressed_kv_cache import CompressedKVCache
from dsa_layers.cache.kv_cache import PagedKVCache


def test_pages_are_handed_out_once():
    """A failed allocation takes nothing."""
    pages = PageAllocator(4)
    first, second = pages.allocate(2), pages.allocate(1)
    with pytest.raises(OutOfPages, match="2 pages are needed and 1 of 4 are free"):
        pages.allocate(2)
    assert sorted(first + second + pages.allocate(1)) == [0, 1, 2, 3] and pages.free == 0
    pages.release(first)
    assert sorted(pages.allocate(2)) == sorted(first)


def test_a_page_is_never_in_two_hands():
    """Neither released twice nor named twice in a call; what is refused changes nothing."""
    pages = PageAllocator(4)
    own = pages.allocate(3)
    for wrong, message in [
        ([0, 1, 0], r"pages: must name each page once, got \[0, 1, 0\]"),
        ([0, 3], r"pages: \[3\] are not in use"),
        ([-1], r"pages: \[-1\] are not in use"),
    ]:
        with pytest.raises(ValueError, match=message):
            pages.release(wrong)
        assert pages.free == 1
    pages.release(own)
    pages.release([])
    assert sorted(pages.allocate(4)) == [0, 1, 2, 3]


SLOTS = "num_pages: must be at most {}, so that slots are int32, for pages of "


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_pages": -1}, ValueError, "num_pages: must be at least 0, got -1"),
        ({"num_pages": 2**26}, ValueError, SLOTS.format(33554432) + "64"),
        ({"page_size": 0}, ValueError, "page_size: must be at least 1, got 0"),
        ({"state_slots": 1.5}, TypeError, "state_slots: must be an integer, got 1.5"),
        ({"latent": "int4"}, ValueError, "latent: must be 'fp8', torch.bfloat16, .*, got 'int4'"),
        ({"index": torch.int8}, ValueError, "index: must be 'fp8', torch.bfloat16, .*, got torch.int8"),
        ({"latent": "fp8", "latent_dim": 48}, ValueError, "latent_dim: must be 576"),
    ],
)
def test_impossible_caches(change, error, message):
    with pytest.raises(error, match=message):
        PagedKVCache(**{"num_layers": 1, "num_pages": 2} | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"entries": "int4"}, r"entries: must be 'fp8', torch.bfloat16, .*, got 'int4'"),
        ({"page_size": 0}, "page_size: must be at least 1, got 0"),
        ({"num_pages": 2**24}, SLOTS.format(8388608) + "256"),
    ],
)
def test_impossible_compressed_caches(change, message):
    options = {"layers": [], "num_pages": 2, "page_size": 256, "state_slots": 1, "window": 8, "dim": 512}
    with pytest.raises(ValueError, match=message):
        CompressedKVCache(**options | change)


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
