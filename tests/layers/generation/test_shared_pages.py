"""Generation over shared pages with models of all families: tokens and drafts are those of a sequence by itself."""

import pytest
import torch

from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.io.loading import load_model
from tests.layers.generation.families import FAMILIES
from tests.layers.generation.guesses import guess
from tests.layers.generation.remembering_model import is_free

TEXT = [2 + i * i % 2000 for i in range(400)]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tiny_checkpoint):
    directory = tiny_checkpoint(request.param, quantized=False)
    return load_model(directory, dtype=torch.float32, drafter=True, progress=False)


def page_size(model):
    """Small, but of V4, whose entries stand for up to 128 tokens."""
    return 128 if model.config.model_type == "deepseek_v4" else 16


def calls(size):
    """Prompts that share one page, two or none, end with a page or in the middle of one, and come again."""
    first, second = TEXT[: 2 * size + 9], [*TEXT[: size + 1], *TEXT[300 : 300 + size // 2]]
    return [[first, second, TEXT[: 2 * size + 1]], [TEXT[: 2 * size], [*TEXT[:size], 7, 8, 9], second]]


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [2, 0])
def test_tokens_and_drafts_of_shared_pages(model, drafts, monkeypatch):
    size, seen = page_size(model), guess(monkeypatch)
    pages = 6  # fewer than the prompts have: some are taken from earlier ones
    options = {"page_size": size, "prefill_chunk": size + 7, "draft_tokens": drafts}
    shared = Generator(model, cache_tokens=pages * size, prefix_cache=True, **options)
    alone = Generator(model, cache_tokens=4 * size, max_sequences=1, **options)
    reused = []
    for prompts in calls(size):
        params = [SamplingParams(3 + i, temperature=i % 2, seed=i, top_k=8) for i in range(len(prompts))]
        seen.clear()
        expected = [alone.generate([prompt], one)[0].tokens for prompt, one in zip(prompts, params)]
        expected_drafts = list(seen)
        seen.clear()
        got = shared.generate(prompts, params)
        assert [c.tokens for c in got] == expected
        assert (len(expected_drafts) > 5) == (drafts > 0) and all(own in seen for own in expected_drafts)
        counted = shared.throughput
        assert counted.prefill_tokens + counted.reused_tokens == sum(map(len, prompts))
        reused.append(counted.reused_tokens // size)
        assert is_free(shared)
    assert reused[0] == 3 and reused[1] >= 1
