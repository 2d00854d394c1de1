"""Prompts are computed between decoding passes: how long a sequence waits, and what is counted."""

from itertools import pairwise

import pytest

from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams
from tests.layers.generation.remembering_model import RememberingModel, next_token

CHUNK = 5


def continued(prompt, count, stateful=False):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, stateful))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_long_prompt_among_sequences_that_decode(drafts):
    """While it is computed, every other pass is a decoding pass of all others; each has a token of every pass."""
    model = RememberingModel(with_drafter=drafts > 0)
    generator = Generator(model, cache_tokens=400, prefill_chunk=CHUNK, draft_tokens=drafts)
    prompts = [[1], [2, 3], [4, 4], [i % 7 for i in range(61)]]
    params = [SamplingParams(max_tokens=n) for n in (60, 60, 60, 4)]
    got = generator.generate(prompts, params)
    assert [c.tokens for c in got] == [continued(p, one.max_tokens) for p, one in zip(prompts, params)]
    # The short prompts fill the first chunk.
    assert model.passes[0] == [1, 2, 2]
    decoding = [1 + drafts] * 3
    chunks, decodes = model.passes[2:26:2], model.passes[1:27:2]
    assert chunks == [[CHUNK]] * 12 and decodes[:12] == [decoding] * 12
    assert model.passes[26] == [1] and model.passes[27] == [1 + drafts] * 4  # the last chunk, and all of them
    counted = generator.throughput
    assert counted.prefill_tokens == sum(map(len, prompts)) and counted.decode_tokens == 59 * 3 + 3
    assert counted.prefill_seconds > 0 and counted.decode_seconds > 0


def test_a_running_sequence_waits_for_one_chunk_of_later_prompts_at_most(monkeypatch):
    """More prompts than run at a time: between two decoding passes of a sequence lies a chunk at most."""
    generator = Generator(RememberingModel(), cache_tokens=400, prefill_chunk=CHUNK, max_sequences=3)
    prompts = [[i % 7] * n for i, n in enumerate((3, 20, 9, 14, 1, 30, 2))]
    params = [SamplingParams(max_tokens=n) for n in (40, 5, 1, 30, 9, 12, 3)]
    passes, prefill, extend = [], generator.engine._cache.passes.prefill, generator.engine._cache.passes.extend

    def noted_prefill(work):
        assert sum(n for _, n in work) <= CHUNK
        passes.append(())
        return prefill(work)

    def noted_extend(sequences, throughput):
        passes.append([s.index for s in sequences])
        return extend(sequences, throughput)

    monkeypatch.setattr(generator.engine._cache.passes, "prefill", noted_prefill)
    monkeypatch.setattr(generator.engine._cache.passes, "extend", noted_extend)
    got = generator.generate(prompts, params)
    assert [c.tokens for c in got] == [continued(p, one.max_tokens) for p, one in zip(prompts, params)]
    assert () in passes[3:-3]  # prompts are computed while others decode
    for sequence, one in enumerate(params):
        own = [i for i, decoded in enumerate(passes) if sequence in decoded]
        assert len(own) == one.max_tokens - 1
        assert all(after - before <= 2 for before, after in pairwise(own))


def test_events_come_before_the_next_pass():
    """A prompt's first token is told before the decoding pass of the same step."""
    model = RememberingModel()
    stream = Generator(model, cache_tokens=64).stream([[1, 2], [3]], SamplingParams(max_tokens=3))
    told = [(next(stream).sequence, len(model.passes)) for _ in range(6)]
    assert told == [(0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)]
