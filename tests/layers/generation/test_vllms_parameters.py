"""What SamplingParams has in common with vLLM, against vLLM's formulas written out: penalties, min_p, log-probabilities
and several sequences of a prompt."""

from collections import Counter

import pytest
import torch

from dsa_layers.generation.generator import Generator
from dsa_layers.generation.logprobs import logprobs_of
from dsa_layers.generation.penalties import penalised
from dsa_layers.generation.running_sequence import RunningSequence
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.generation.stop_strings import StopStrings
from dsa_layers.io.loading import load_model
from tests.layers.generation.guesses import Guesses, guess
from tests.layers.generation.test_sampling import draw

PROMPTS = [[5, 6, 7, 6], [9] * 12]
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.7}


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint, dtype=torch.float32, dequantize=True, drafter=True, progress=False)


def vllms(row, prompt, generated, p):
    """Penalties of one row of logits."""
    row, counts = row.clone(), Counter(generated)
    for token in {*prompt, *generated}:
        row[token] = row[token] / p.repetition_penalty if row[token] > 0 else row[token] * p.repetition_penalty
    for token, count in counts.items():
        row[token] -= p.frequency_penalty * count + p.presence_penalty
    return row


def test_penalties_count_the_prompt_the_generated_tokens_and_the_drafts_before():
    generator, params = torch.Generator().manual_seed(0), SamplingParams(**PENALTIES)
    logits = torch.randn(3, 3, 9, generator=generator)
    rest = [1, 2, 2], 99, StopStrings(None, ()), set()
    sequences = [RunningSequence(i, rest[0], one, *rest[1:], name="", request=i) for i, one in enumerate(
        (params, SamplingParams(), SamplingParams(frequency_penalty=-2))
    )]  # fmt: skip
    for generated in ([], [4], [4, 4, 2, 7]):
        for s in sequences:
            s.tokens, s.drafts = [1, 2, 2, *generated], [4, 8]
        got = penalised(logits, sequences)
        for b, s in enumerate(sequences):
            expected = [vllms(logits[b, i], [1, 2], [*generated, *s.drafts[:i]], s.params) for i in range(3)]
            torch.testing.assert_close(got[b], torch.stack(expected))
    assert penalised(logits, sequences[1:2] * 3) is logits


def test_min_p_keeps_what_is_likely_beside_the_likeliest():
    """At temperature 1 the others have 0.14, 0.37 and 0.05 of its probability; top_p is of those that are kept."""
    logits, p = torch.tensor([2.0, 0.0, 1.0, -1.0]), {"temperature": 1.0}
    expected = torch.tensor([1.0, 0, torch.e**-1, 0]) / (1 + torch.e**-1)
    torch.testing.assert_close(draw(logits, 500, min_p=0.3, **p), expected, atol=0.08, rtol=0)
    for kept, params in (
        ([1, 1, 1, 0], p | {"min_p": 0.1}),
        ([1, 0, 0, 0], p | {"min_p": 1.0}),
        ([1, 1, 1, 0], {"min_p": 0.3, "temperature": 2.0}),
        ([1, 0, 0, 0], p | {"min_p": 0.3, "top_p": 0.7}),
    ):
        assert (draw(logits, 200, **params) > 0).tolist() == kept


def test_logprobs_are_the_chosen_token_and_the_likeliest():
    logits = torch.tensor([[[1.0, 3.0, 2.0, 0.0]], [[0.0, 0.0, 5.0, 1.0]], [[1.0, 1.0, 1.0, 1.0]]])
    (first,), (second,), (third,) = logprobs_of(logits, [[2], [2], [None]], [2, 0, 1])
    values = logits.log_softmax(-1)
    assert list(first) == [2, 1] and first[2] == (values[0, 0, 2].item(), 2) and first[1] == (values[0, 0, 1].item(), 1)
    assert second == {2: (values[1, 0, 2].item(), 1)} and third is None


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_drafts_change_no_token_and_no_logprob(model, monkeypatch, temperature):
    params = SamplingParams(9, temperature, seed=3, logprobs=3, min_p=0.01 * temperature, **PENALTIES)
    expected = Generator(model, cache_tokens=1024).generate(PROMPTS, params)
    assert all(max(Counter(c.tokens).values()) <= 3 for c in expected)
    guess(monkeypatch, Guesses([c.tokens for c in expected], 2))
    generator = Generator(model, cache_tokens=1024, draft_tokens=2)
    got = generator.generate(PROMPTS, params)
    assert 0 < generator.throughput.taken < generator.throughput.drafted
    assert [c.tokens for c in got] == [c.tokens for c in expected]
    logprobs = [[own.logprob for c in run for token in c.logprobs for own in token.values()] for run in (got, expected)]
    torch.testing.assert_close(*map(torch.tensor, logprobs), atol=1e-3, rtol=0)


def test_n_sequences_of_a_prompt_draw_by_seeds_of_their_own(model):
    generator = Generator(model, cache_tokens=2048, prefix_cache=True)
    got = generator.generate(PROMPTS, SamplingParams(3, 1.0, seed=7, n=3))
    assert [c.prompt for c in got] == [0, 0, 0, 1, 1, 1]
    for i, c in enumerate(got):
        (alone,) = generator.generate([PROMPTS[i // 3]], SamplingParams(3, 1.0, seed=7 + i))
        assert c.tokens == alone.tokens
    one_each = generator.generate(PROMPTS, [SamplingParams(3, 1.0, seed=7, n=2), SamplingParams(3)])
    assert [c.tokens for c in one_each[:2]] == [c.tokens for c in got[:2]] and one_each[2].prompt == 1


def test_the_default_asks_for_nothing_more(model, monkeypatch):
    """No penalties, no transfer of log-probabilities, no tensor for min_p."""
    monkeypatch.setattr("dsa_layers.generation.penalties._penalised", None)
    monkeypatch.setattr(torch.Tensor, "log_softmax", None)
    assert Generator(model, cache_tokens=256).generate(PROMPTS[:1], SamplingParams(3, 1.0, seed=1))[0].logprobs is None
