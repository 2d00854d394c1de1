"""Tests of paged caches and of the allocation of pages."""

import re

import pytest
import torch

from dsa_layers.cache.compressed_kv_cache import CompressedKVCache
from dsa_layers.cache.kv_cache import OutOfPages, PageAllocator, PagedKVCache
from dsa_layers.cache.windowed_kv_cache import WindowedKVCache


def test_every_page_is_allocated_to_one_owner():
    pages = PageAllocator(4)
    first, second = pages.allocate(2), pages.allocate(1)
    with pytest.raises(OutOfPages, match="2 pages are needed and 1 of 4 are free"):
        pages.allocate(2)
    (free,) = {0, 1, 2, 3} - {*first, *second}
    for wrong, message in [
        ([first[0], second[0], first[0]], "pages: must name each page once, got ["),
        ([*first, free], f"pages: [{free}] are not in use"),
        ([-1], "pages: [-1] are not in use"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            pages.release(wrong)
        assert pages.free == 1
    pages.release(first)
    with pytest.raises(ValueError, match="are not in use"):
        pages.release(first)
    assert sorted(pages.allocate(3)) == sorted([*first, free]) and pages.free == 0


SLOTS = "num_pages: must be at most {}, so that slots are int32, for pages of "


def paged(**changed):
    return PagedKVCache(**{"num_layers": 1, "num_pages": 2} | changed)


def windowed(**changed):
    options = {"window_layers": [1], "window": 4, "window_dim": 48, "window_dtype": torch.float32}
    return WindowedKVCache(**{"num_layers": 3, "num_pages": 2} | options | changed)


def compressed(**changed):
    options = {"layers": [], "num_pages": 2, "page_size": 256, "state_slots": 1, "window": 8, "dim": 512}
    return CompressedKVCache(**options | changed)


@pytest.mark.parametrize(
    ("make", "changed", "message"),
    [
        (paged, {"num_pages": -1}, "num_pages: must be at least 0, got -1"),
        (paged, {"num_pages": 2**26}, SLOTS.format(33554432) + "64"),
        (paged, {"page_size": 0}, "page_size: must be at least 1, got 0"),
        (paged, {"state_slots": 1.5}, "state_slots: must be an integer, got 1.5"),
        (paged, {"latent": "int4"}, "latent: must be 'fp8', torch.bfloat16, .*, got 'int4'"),
        (paged, {"index": torch.int8}, "index: must be 'fp8', torch.bfloat16, .*, got torch.int8"),
        (paged, {"latent": "fp8", "latent_dim": 48}, "latent_dim: must be 576"),
        (paged, {"sources": [1]}, "sources: must be 1 layers from 0 to 0, got \\[1\\]"),
        (windowed, {"window": 0}, "window: must be at least 1, got 0"),
        (windowed, {"window_dim": "a"}, "window_dim: must be an integer, got 'a'"),
        (windowed, {"window_layers": [1, 1]}, "window_layers: must be different layers below 3 in ascending order"),
        (windowed, {"window_dtype": "fp8"}, "window_dtype: must be a torch.dtype, got 'fp8'"),
        (compressed, {"entries": "int4"}, "entries: must be 'fp8', torch.bfloat16, .*, got 'int4'"),
        (compressed, {"num_pages": 2**24}, SLOTS.format(8388608) + "256"),
    ],
)
def test_impossible_caches_are_refused(make, changed, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(**changed)


def test_layers_have_pages_of_the_given_dtypes():
    cache = PagedKVCache(2, 5, 16, latent=torch.float32, index=torch.bfloat16, latent_dim=48, index_dim=32)
    assert cache.layer(0).latent.shape == (5, 16, 1, 48) and cache.layer(0).index.dtype == torch.bfloat16
    cache = PagedKVCache(3, 5, 16, latent="fp8", index="fp8", index_layers=[0, 2])
    assert cache.layer(1).latent.shape == (5, 16, 1, 656) and cache.nbytes == 5 * 16 * (3 * 656 + 2 * 132)
    assert cache.layer(1).index is None and cache.layer(2).index.shape == (5, 16, 1, 132)
    cache.layer(0).index.fill_(1)
    cache.layer(2).index.fill_(2)
    assert (cache.layer(0).index == 1).all()
