"""How large a generator's cache is where nobody says it, and which CUDA graphs it keeps."""

import pytest
import torch

from dsa_layers.cache.kv_cache import OutOfPages
from dsa_layers.cache.sizes import CacheSizes
from dsa_layers.generation import engine_cache as module
from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.io import memory
from dsa_layers.parallel.process_group import least
from dsa_layers.parallel.ranks import Ranks
from tests.layers.generation.remembering_model import RememberingModel
from tests.layers.generation.replay import capture_passes

GB = 2**30


def test_a_cpus_cache_grows_for_a_long_prompt(monkeypatch, caplog):
    caplog.set_level("INFO", "dsa_layers")
    monkeypatch.setattr(module, "CPU_CACHE_TOKENS", 8)
    model = RememberingModel()
    model.config.max_position_embeddings = 4096
    generator = Generator(model, page_size=4, prefix_cache=True)
    first = generator.cache
    short, long = [1, 2, 3], [1, 2, 3, 4] * 10
    expected = Generator(model, page_size=4, cache_tokens=256).generate([long, short], SamplingParams(4))
    opened, later = generator.stream([short], SamplingParams(4)), generator.stream([long, short], SamplingParams(4))
    next(opened)
    with pytest.raises(RuntimeError, match="another stream"):
        next(later)
    assert len(list(opened)) == 3 and generator.cache is first
    assert sorted(event.token for event in later) == sorted(token for c in expected for token in c.tokens)
    assert generator.cache.allocator.num_pages == 12 and "holds 44 tokens" in caplog.text
    assert generator.generate([long, short], SamplingParams(4)) == expected
    monkeypatch.setattr(module, "room_for_caches", lambda device: 40 * 4 * 8)  # 8 bytes a token
    with pytest.raises(OutOfPages, match=r"need 51 pages of 4 tokens; the cache has 11 \(cache_tokens\)"):
        generator.generate([[1] * 200], SamplingParams(4))


def test_a_gpus_cache_is_what_is_left(monkeypatch):
    """The memory decides, up to the contexts of all sequences; all ranks take the smallest number."""
    model = RememberingModel()
    model.config.max_position_embeddings = 4096
    generator = Generator(model, page_size=4, cache_tokens=64, max_sequences=8)
    cache = generator.engine._cache
    cache._device, cache.grows = torch.device("cuda"), False
    for room, pages in ((102 * 4 * 8, 101), (10**12, 8 * 1024)):
        monkeypatch.setattr(module, "room_for_caches", lambda device, room=room: room)
        assert cache.default_capacity() == pages
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.all_gather_object", lambda out, own, group: out.__setitem__(1, own - 5))
    assert least(Ranks(0, 2), 70) == 65


def test_the_room_of_a_gpu_leaves_a_tenth(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7 * GB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4 * GB)
    assert memory.room_for_caches(torch.device("cuda")) == pytest.approx(45 * GB)
    assert CacheSizes(page=10, slot=5, page_size=4).pages(100, 2) == 9
    assert CacheSizes(page=10, slot=5, page_size=4).pages(44, 99) == 2


def test_graphs_are_captured_in_advance_and_the_least_used_goes(monkeypatch):
    model, prompts = RememberingModel(), [[1, 2, 3], [4, 5], [6]]
    expected = Generator(model, page_size=4, cache_tokens=64).generate(prompts, SamplingParams(4))
    captured = capture_passes(monkeypatch)
    generator = Generator(model, page_size=4, cache_tokens=64, max_sequences=4, max_graphs=9)
    with pytest.raises(
        ValueError, match=r"batch_sizes: .* up to 64 tokens \(max_tokens\) they need 15 graphs; .* at mos"
    ):
        generator.warm_up()
    generator.warm_up([1, 3, 4], max_tokens=12)
    sizes = [(inputs.count, inputs.pages) for _, inputs in captured]
    assert sizes == [(4, 4), (4, 2), (4, 1), (1, 4), (1, 2), (1, 1)]
    assert generator.generate(prompts, SamplingParams(4)) == expected
    assert len(captured) == 6 and generator.cache.allocator.free == 16
    few = Generator(model, page_size=4, cache_tokens=64, max_graphs=2)
    for tokens in (1, 5, 1, 9, 1, 5):
        few.generate([[1] * (tokens - 1)] if tokens > 1 else [[1]], SamplingParams(2))
    assert [inputs.pages for _, inputs in captured[6:]] == [1, 2, 4, 2]
