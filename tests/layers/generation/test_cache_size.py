"""The size of a cache that is not given, and which CUDA graphs are kept."""

import pytest
import torch

from dsa_layers.cache.cache import CacheSizes
from dsa_layers.generation import capacity
from dsa_layers.generation.engine_options import EngineOptions
from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.io import memory
from dsa_layers.parallel.process_group import least
from dsa_layers.parallel.ranks import Ranks
from tests.layers.generation.remembering_model import RememberingModel, engine_of
from tests.layers.generation.replay import capture_passes

GB = 2**30


@pytest.mark.parametrize(
    ("device", "room", "pages"),
    [
        ("cpu", 10**12, 1024),  # the whole context of a sequence
        ("cpu", 102 * 4 * 8, 101),  # what the memory has room for: 8 bytes per token, and a page for padding
        ("cpu", 0, 10),  # CPU_CACHE_TOKENS
        ("cpu", None, 1024),
        ("cuda", 10**12, 8 * 1024),  # the whole context of all sequences
        ("cuda", 102 * 4 * 8, 101),
    ],
)
def test_a_cache_follows_from_the_memory(device, room, pages, monkeypatch):
    monkeypatch.setattr(capacity, "room_for_caches", lambda _: room)
    monkeypatch.setattr(capacity, "CPU_CACHE_TOKENS", 40)
    options = EngineOptions(page_size=4, max_sequences=8)
    assert capacity.Capacity(RememberingModel(context=4096), options, torch.device(device)).pages == pages


def test_ranks_take_the_smallest_cache(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.all_gather_object", lambda out, own, group: out.__setitem__(1, own - 5))
    assert least(Ranks(0, 2), 70) == 65


def test_a_gpu_without_room_is_refused(monkeypatch):
    monkeypatch.setattr(capacity, "room_for_caches", lambda _: 10)
    with pytest.raises(ValueError, match="cache_tokens: the memory of cuda has no room for the model and a cache"):
        capacity.Capacity(RememberingModel(), EngineOptions(page_size=4), torch.device("cuda"))


def test_the_room_of_a_gpu_leaves_a_tenth(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7 * GB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4 * GB)
    assert memory.room_for_caches(torch.device("cuda")) == pytest.approx(45 * GB)
    assert CacheSizes(page=10, slot=5, page_size=4).pages(100, 2) == 9
    assert CacheSizes(page=10, slot=5, page_size=4).pages(44, 99) == 2


def test_graphs_are_captured_in_advance_and_the_least_used_goes(monkeypatch):
    prompts = [[1, 2, 3], [4, 5], [6]]
    expected = engine_of(Generator).generate(prompts, SamplingParams(4))
    captured = capture_passes(monkeypatch)
    generator = engine_of(Generator, max_sequences=4, max_graphs=9, prefill_chunk=100)
    with pytest.raises(
        ValueError, match=r"batch_sizes: .* up to 64 tokens \(max_tokens\) they need 15 graphs; .* at mos"
    ):
        generator.warm_up()
    generator.warm_up([1, 3, 4], max_tokens=12)
    sizes = [(inputs.count, inputs.pages) for _, inputs in captured]
    assert sizes == [(4, 4), (4, 2), (4, 1), (1, 4), (1, 2), (1, 1)]
    assert generator.generate(prompts, SamplingParams(4)) == expected
    assert len(captured) == 6 and generator.cache.allocator.free == 16
    generator.engine.add_request([1], SamplingParams(2))
    with pytest.raises(RuntimeError, match="warm_up: must be called while no request runs, got 1 unfinished"):
        generator.warm_up([1])
    few = engine_of(Generator, max_graphs=2)
    for tokens in (1, 5, 1, 9, 1, 5):
        few.generate([[1] * max(tokens - 1, 1)], SamplingParams(2))
    assert [inputs.pages for _, inputs in captured[6:]] == [1, 2, 4, 2]
