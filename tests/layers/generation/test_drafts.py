"""Drafts and shared pages change no token. Drafts are those that the drafter computes for each sequence alone."""

import functools

import pytest
import torch

from dsa_layers import Generator, SamplingParams, SequenceBatch, load_model
from tests.layers.generation.families import DRAFTED
from tests.layers.generation.guesses import Guesses, guess
from tests.layers.generation.remembering_model import is_free
from tests.layers.generation.replay import capture_passes

# The first prompt is longer than the 128 keys that V3.2's indexer selects. Two prompts are longer than a chunk of 60.
TEXT = [2 + i * i % 2000 for i in range(400)]
PROMPTS = [TEXT[:170], [7, 8, 9], list(range(5, 80)), [3]]
LIMITS = [18, 13, 6, 15]


@pytest.fixture(scope="module", params=DRAFTED)
def model(request, tiny_checkpoint):
    directory = tiny_checkpoint(request.param, quantized=False)
    return load_model(directory, dtype=torch.float32, drafter=True, progress=False)


@pytest.fixture(scope="module")
def without_drafts(model):
    """Return a function of (temperature, number of prompts) that generates without drafts. Its results are cached."""
    return functools.cache(lambda temperature=0.0, prompts=None: generate(model, temperature, PROMPTS[:prompts]))


def generate(model, temperature=0.0, prompts=PROMPTS, **options):
    generator = Generator(model, cache_tokens=2048, prefill_chunk=60, **options)
    free = generator.cache.allocator.free, generator.cache.state_slots.free
    params = [SamplingParams(n, temperature=temperature, seed=i) for i, n in enumerate(LIMITS[: len(prompts)])]
    completions = generator.generate(prompts, params)
    assert (generator.cache.allocator.free, generator.cache.state_slots.free) == free
    return [c.tokens for c in completions], generator.throughput


@pytest.mark.parametrize(
    ("drafts", "temperature"),
    [*(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 0.0), (2, 1.0), (3, 0.0))), (3, 1.0)],
)
def test_tokens_are_those_without_drafts(model, without_drafts, drafts, temperature, monkeypatch):
    expected, without = without_drafts(temperature)
    guess(monkeypatch, Guesses(expected, drafts))
    got, throughput = generate(model, temperature, draft_tokens=drafts)
    assert got == expected
    assert throughput.decode_tokens == without.decode_tokens and without.drafted == 0
    assert throughput.drafted / 4 < throughput.taken < throughput.drafted  # some guesses are right, others wrong


@pytest.mark.slow
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("drafts", [1, 3])
def test_drafts_are_the_drafters(model, without_drafts, drafts, captured, monkeypatch):
    expected, _ = without_drafts(prompts=2)
    seen = guess(monkeypatch, Guesses(expected, drafts))
    if captured:
        capture_passes(monkeypatch)
    got, throughput = generate(model, draft_tokens=drafts, prompts=PROMPTS[:2])
    assert got == expected and 0 < throughput.taken < throughput.drafted
    assert len(seen) > 10
    for tokens, found in seen[::5]:
        assert found == drafted(model, tokens, drafts)


@torch.inference_mode()
def drafted(model, tokens, drafts):
    tokens, found = torch.tensor(tokens), []
    cache = model.drafter.make_cache(2, 256, state_slots=1)

    def batch(new, total):
        return SequenceBatch.paged([new], [total], [[1, 0]], 256, state_slots=[0])

    known = len(tokens) - 1
    states = model.states(tokens[:-1], SequenceBatch.without_cache([known]))
    last = model.drafter(tokens[1:], states, batch(known, known), cache)[-1:]
    for i in range(drafts):
        found.append(int(model.drafter.logits(last).argmax()))
        last = model.drafter(torch.tensor(found[-1:]), last, batch(1, known + i + 1), cache)
    return found


def calls(size):
    """Return the prompts of two calls. All begin with the same `size` tokens, and some with the same 2 * size."""
    first, second = TEXT[: 2 * size + 9], [*TEXT[: size + 1], *TEXT[300 : 300 + size // 2]]
    return [[first, second, TEXT[: 2 * size + 1]], [TEXT[: 2 * size], [*TEXT[:size], 7, 8, 9], second]]


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [2, 0])
def test_tokens_and_drafts_of_shared_pages(model, drafts, monkeypatch):
    # V4 needs a multiple of 128, because an entry compresses up to 128 tokens.
    size, seen = 128 if model.config.model_type == "deepseek_v4" else 16, guess(monkeypatch)
    pages = 6  # so few that, with drafts, a sequence evicts a page of an earlier prompt
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
