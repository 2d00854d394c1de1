"""Tests of Generator: batches, streams, ends and failures."""

import dataclasses

import pytest
import torch

from dsa_layers import Generator, SamplingParams, Tokenizer, load_model
from tests.layers.generation.remembering_model import continued, engine_of, is_free

PROMPTS = ["The lightning indexer", "def forward(self, x): return", "a"]


@pytest.fixture(scope="module")
def model(checkpoint):
    """A dequantised model in fp32. With less precision, rounding could decide which token is best."""
    return load_model(checkpoint, dtype=torch.float32, dequantize=True, progress=False)


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return Tokenizer(checkpoint)


@pytest.fixture(scope="module")
def greedy(model, tokenizer):
    """Return the completion of each prompt, generated alone at temperature 0."""
    generator = Generator(model, tokenizer, cache_tokens=256)
    return [generator.generate([p], SamplingParams(max_tokens=10))[0] for p in PROMPTS]


def test_the_batch_gives_what_each_prompt_gives_alone(model, tokenizer, greedy):
    generator = Generator(model, tokenizer, cache_tokens=64, page_size=16, prefill_chunk=5)
    told = []
    got = generator.generate(PROMPTS, SamplingParams(max_tokens=10), on_event=told.append)
    assert [c.tokens for c in got] == [c.tokens for c in greedy] and len(told) == 30
    assert [c.prompt_tokens for c in got] == [len(tokenizer.encode(p)) for p in PROMPTS]
    assert all(c.finish_reason == "length" and len(c.tokens) == 10 for c in got) and is_free(generator)
    prefilled = sum(c.prompt_tokens for c in got)
    assert generator.throughput.prefill_tokens == prefilled and generator.throughput.decode_tokens == 3 * 9
    assert f"prefill: {prefilled} tokens" in str(generator.throughput) and generator.throughput.decode_seconds > 0


def test_streamed_text_is_the_text(model, tokenizer, greedy):
    told, generator = [], Generator(model, tokenizer, cache_tokens=256, prefill_chunk=5)
    params = SamplingParams(max_tokens=10)
    events = list(generator.stream(PROMPTS, params, on_prefill=lambda *counts: told.append(counts)))
    total = generator.throughput.prefill_tokens
    assert sorted({*told}) == [(done, total) for done in range(0, total, 5)] and told == sorted(told)
    for i, completion in enumerate(greedy):
        own = [e for e in events if e.sequence == i]
        assert "".join(e.text for e in own) == completion.text == tokenizer.decode(completion.tokens)
        assert [e.finish_reason for e in own] == [None] * 9 + ["length"]


def test_events_come_before_the_next_pass():
    generator = engine_of(Generator)
    stream = generator.stream([[1, 2], [3]], SamplingParams(max_tokens=3))
    told = [(next(stream).sequence, len(generator.model.passes)) for _ in range(6)]
    assert told == [(0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)]
    assert is_free(generator)  # although the stream has not raised StopIteration yet


def test_calls_while_a_stream_is_open():
    generator = engine_of(Generator)
    first, second = (generator.stream([prompt, [5]], SamplingParams(6)) for prompt in ([1, 2], [3]))
    events = [[next(first)], [next(second)]]
    assert [c.tokens for c in generator.generate([[4, 4]], SamplingParams(3))] == [continued([4, 4], 3)]
    for own, stream, prompt in zip(events, (first, second), ([1, 2], [3])):
        own += stream
        tokens = [[e.token for e in own if e.sequence == i] for i in range(2)]
        assert tokens == [continued(prompt, 6), continued([5], 6)]
    assert is_free(generator)


def test_calls_that_end_early_make_room():
    generator = engine_of(Generator)

    def stop(event):
        raise KeyboardInterrupt

    stream = generator.stream([[1], [2], [3, 4]], SamplingParams(10))
    next(stream)
    stream.close()
    assert list(stream) == [] and is_free(generator)
    with pytest.raises(KeyboardInterrupt) as kept:  # the kept traceback refers to the frames of `generate`
        generator.generate([[1], [2]], SamplingParams(10), on_event=stop)
    assert kept.tb is not None and is_free(generator)
    assert generator.generate([[1]], SamplingParams(10))[0].tokens == continued([1], 10)


def test_end_of_sequence(model, tokenizer, greedy, monkeypatch):
    generator = Generator(model, tokenizer, cache_tokens=256)
    third = greedy[0].tokens[2]
    monkeypatch.setattr(generator, "eos", {third})
    (got,) = generator.generate([PROMPTS[0]], SamplingParams(max_tokens=10))
    first = greedy[0].tokens.index(third)
    assert got.finish_reason == "eos" and got.tokens == greedy[0].tokens[: first + 1]


def test_the_context_ends_generation(model, monkeypatch):
    monkeypatch.setattr(model, "config", dataclasses.replace(model.config, max_position_embeddings=12))
    (got,) = Generator(model, cache_tokens=64).generate([list(range(10, 20))], SamplingParams(max_tokens=10))
    assert got.finish_reason == "length" and len(got.tokens) == 2
    with pytest.raises(ValueError, match=r"prompts\[0\]: has 12 tokens; the model's context holds 12"):
        Generator(model, cache_tokens=64).generate([list(range(12))])


def test_seeds(model, tokenizer):
    """If all prompts share one SamplingParams, prompt i uses (seed + i) modulo 2^63."""
    generator = Generator(model, tokenizer, cache_tokens=512)
    # top_k=8: with all 2048 candidates, rounding, which depends on the batch, could change a token.
    first, second, third = [SamplingParams(8, temperature=1.0, top_k=8, seed=s) for s in (2**63 - 2, 2**63 - 1, 0)]
    a, b, c = (completion.tokens for completion in generator.generate([PROMPTS[0]] * 3, [first, second, first]))
    (alone,) = generator.generate([PROMPTS[0]], second)
    assert a == c != b == alone.tokens
    of_one_seed = generator.generate([PROMPTS[0]] * 3, first)
    assert of_one_seed == generator.generate([PROMPTS[0]] * 3, [first, second, third])
    without = SamplingParams(8, temperature=1.0)
    assert generator.generate([PROMPTS[0]], without) != generator.generate([PROMPTS[0]], without)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_ends_its_sequence_alone(model, tokenizer, temperature):
    token = 77
    # Use token ids, because a text's ids depend on the tiny tokenizer, which is trained on dsa's source. Sequences 0, 2
    # and 4 must not generate `token`, whose embedding becomes NaN.
    prompts = [[5, 6, 7], [8, token, 9], [20, 21, 22, 23, 24, 25, 26], [token], [10, 11]]
    params = [SamplingParams(12, temperature=temperature, seed=i, top_k=8) for i in range(5)]
    generator = Generator(model, tokenizer, cache_tokens=64, page_size=16, max_sequences=2)
    embeddings = model.model.embed_tokens.weight
    kept = embeddings[token].clone()
    try:
        embeddings.data[token] = torch.nan
        first, second = (generator.generate(prompts, params) for _ in range(2))
        expected = [generator.generate([prompts[i]], params[i])[0] for i in (0, 2, 4)]
    finally:
        embeddings.data[token] = kept
    assert first == second and [first[i] for i in (0, 2, 4)] == expected
    assert all(one.error is None and one.finish_reason != "error" and one.tokens for one in expected)
    for i in (1, 3):
        assert (first[i].tokens, first[i].text, first[i].finish_reason) == ([], "", "error")
        told = f"prompts[{i}]: its logits after {len(prompts[i])} tokens hold NaN or infinity"
        assert first[i].error.startswith(told)
    assert is_free(generator)


def test_what_came_before_a_nan_is_kept(monkeypatch):
    generator = engine_of(Generator)
    decode = generator.passes._decode

    def broken(sequences):
        logits, states = decode(sequences)
        for row, sequence in enumerate(sequences):
            if sequence.name == "prompts[1]" and len(sequence.tokens) == 5:
                logits[row, 0, 3] = torch.nan
        return logits, states

    monkeypatch.setattr(generator.passes, "_decode", broken)
    prompts = [[1], [2, 3], [4]]
    got = generator.generate(prompts, SamplingParams(8))
    assert [c.tokens for c in got] == [continued(p, 3 if p == [2, 3] else 8) for p in prompts]
    assert got[1].finish_reason == "error" and "prompts[1]: its logits after 5 tokens" in got[1].error
    assert is_free(generator)


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_long_prompt_among_sequences_that_decode(drafts):
    generator = engine_of(Generator, cache_tokens=400, draft_tokens=drafts, max_sequences=64)
    prompts = [[1], [2, 3], [4, 4], [i % 7 for i in range(61)]]
    params = [SamplingParams(max_tokens=n) for n in (60, 60, 60, 4)]
    got = generator.generate(prompts, params)
    assert [c.tokens for c in got] == [continued(p, one.max_tokens) for p, one in zip(prompts, params)]
    passes = generator.model.passes
    assert passes[0] == [1, 2, 2]  # the short prompts fill the first chunk
    assert passes[2:26:2] == [[5]] * 12 and passes[1:25:2] == [[1 + drafts] * 3] * 12
    assert passes[26] == [1] and passes[27] == [1 + drafts] * 4  # the last chunk, then all four decode
    counted = generator.throughput
    assert counted.prefill_tokens == sum(map(len, prompts)) and counted.decode_tokens == 59 * 3 + 3
