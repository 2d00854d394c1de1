"""Tests of the size of an engine's cache."""

import pytest
import torch

from dsa_layers.cache.kv_cache import CacheSizes
from dsa_layers.generation import engine_options
from dsa_layers.io import gpu_plan
from dsa_layers.parallel.ranks import Ranks, gathered
from tests.layers.generation.remembering_model import RememberingModel, engine_of

GB = 2**30


@pytest.mark.parametrize(
    ("device", "on_cpu", "room", "pages"),
    [
        ("cpu", 40, 0, 1024),  # the whole context of a sequence, because CPU_CACHE_TOKENS is less
        ("cpu", 8000, 0, 2000),  # CPU_CACHE_TOKENS / 4
        ("cpu", 10**6, 0, 8 * 1024),  # the whole context of all sequences
        ("cuda", 40, 10**12, 8 * 1024),
        ("cuda", 40, 102 * 4 * 8, 101),  # 102 pages of 4 tokens of 8 bytes fit; one is for padding
    ],
)
def test_a_cache_follows_from_the_device_and_a_gpu_without_room_is_refused(device, on_cpu, room, pages, monkeypatch):
    monkeypatch.setattr(engine_options, "room_for_caches", lambda _: room)
    monkeypatch.setattr(engine_options, "CPU_CACHE_TOKENS", on_cpu)
    options = engine_options.EngineOptions(page_size=4, max_sequences=8)
    assert engine_options.Capacity(RememberingModel(context=4096), options, torch.device(device)).pages == pages
    monkeypatch.setattr(engine_options, "room_for_caches", lambda _: 10)
    with pytest.raises(ValueError, match="cache_tokens: the memory of cuda has no room for the model and a cache"):
        engine_options.Capacity(RememberingModel(), engine_options.EngineOptions(page_size=4), torch.device("cuda"))


def test_ranks_take_the_smallest_cache(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.all_gather_object", lambda out, own, group: out.__setitem__(1, own - 5))
    assert min(gathered(Ranks(0, 2), 70)) == 65


def test_the_room_of_a_gpu_leaves_a_tenth(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7 * GB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4 * GB)
    assert gpu_plan.room_for_caches(torch.device("cuda")) == pytest.approx(45 * GB)
    assert CacheSizes(page=10, slot=5, page_size=4).pages(100, 2) == 9
    assert CacheSizes(page=10, slot=5, page_size=4).pages(44, 99) == 2


def test_more_sequences_than_pages_take_no_room():
    assert engine_of(max_sequences=10**18).cache.state_slots.num_pages == 17  # a sequence per page, 64 / 4, and padding
