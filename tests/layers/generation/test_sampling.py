"""Tests of sampling parameters, sampled tokens, log-probabilities and stop strings."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from dsa_layers import Generator, SamplingParams, load_model
from dsa_layers.errors import ConfigError
from dsa_layers.generation.requests import StopStrings
from dsa_layers.generation.sampler import draw, draw_of_likeliest, logprobs_of, penalised, sample
from dsa_layers.generation.sampling import sampling_defaults
from tests.layers.generation.guesses import Guesses, guess

PROMPTS = [[5, 6, 7, 6], [9] * 12]
COUNT = 5000
NUMBERS = (torch.arange(COUNT, dtype=torch.float64)[:, None] + 0.5) / COUNT  # evenly spaced: counts err by at most 1
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.7}


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint, dtype=torch.float32, dequantize=True, drafter=True, progress=False)


def sequences(params, drafts=(), tokens=(1,), prompt_len=1):
    return [
        SimpleNamespace(params=one, seed=i, tokens=list(tokens), drafts=list(drafts), prompt_len=prompt_len)
        for i, one in enumerate(params)
    ]


def arguments(logits, temperature, top_k, top_p, min_p):
    """Return arguments of `draw_of_likeliest` for COUNT equal rows. The first four are the arguments of `draw`."""
    each = [torch.full((COUNT, 1), value, dtype=torch.float64) for value in (temperature, top_k, top_p, min_p)]
    rows = logits.repeat(COUNT, 1)
    return rows, rows.amax(-1, keepdim=True), each[0], NUMBERS, each[1].long(), *each[2:], top_k


def probabilities(logits, temperature, top_k, top_p, min_p):
    """Return each token's probability by definition. Of tokens with equal logits, the lowest id ranks first."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])[:top_k]
    likely = torch.softmax(logits[order].double() / temperature, 0)
    order = [token for token, p in zip(order, likely) if p >= min_p * likely[0]]
    likely = torch.softmax(logits[order].double() / temperature, 0)
    kept = [i for i in range(len(order)) if likely[:i].sum() < top_p]
    result = torch.zeros(len(logits), dtype=torch.float64)
    result[torch.tensor(order)[kept]] = likely[kept] / likely[kept].sum()
    return result


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        *((40, 1.0, 0), (40, 0.9, 0), (40, 0.33, 0), (7, 1.0, 0), (7, 0.8, 0), (1, 1.0, 0), (40, 1e-9, 0)),
        *((40, 1.0, 0.3), (40, 0.7, 0.05), (7, 0.9, 0.3), (40, 1.0, 1)),
    ],
)
def test_a_token_comes_as_often_as_its_probability_says(temperature, top_k, top_p, min_p):
    logits = (torch.randn(40, generator=torch.Generator().manual_seed(1)) * 2).round()
    logits[3] = -torch.inf
    given = arguments(logits, temperature, top_k, top_p, min_p)
    expected = probabilities(logits, temperature, top_k, top_p, min_p)
    drawn = [draw_of_likeliest(*given)]
    if (top_k, top_p, min_p) == (40, 1.0, 0):
        drawn.append(draw(*given[:4]))
    for tokens in drawn:
        often = torch.bincount(tokens[:, 0], minlength=40)
        assert (often - COUNT * expected).abs().max() < 1.01 and often[expected == 0].sum() == 0


def test_a_row_depends_on_no_other():
    logits = torch.randn(64, 3001, generator=torch.Generator().manual_seed(2))
    top_k = torch.arange(1, 65)[:, None] * 40
    top_p, temperature, numbers = torch.rand(3, 64, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    logits[5, 7], logits[6, 8], logits[7] = torch.nan, torch.inf, -torch.inf
    rows = logits, logits.amax(-1, keepdim=True), temperature + 0.1, numbers
    likeliest, any_token = draw_of_likeliest(*rows, top_k, top_p, 0 * top_p, 2560), draw(*rows)
    for i in (0, 1, 4, 8, 30, 63):
        row = [each[i : i + 1] for each in (*rows, top_k, top_p, 0 * top_p)]
        assert likeliest[i] == draw_of_likeliest(*row, int(top_k[i])) == draw_of_likeliest(*row, 3001)
        assert any_token[i] == draw(*row[:4])


def test_the_largest_number_draws_a_token():
    """The sums of weights have 62 bits with this vocabulary, more than the 53 bits of the number 1 - 2^-53."""
    logits = torch.zeros(1, 129280)
    one = torch.ones(1, 1, dtype=torch.float64)
    rows = logits, logits.amax(-1, keepdim=True), one, one - 2**-53
    assert draw(*rows) == draw_of_likeliest(*rows, torch.tensor([[129280]]), one, 0 * one, 129280) == 129279


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_that_are_not_finite_have_no_token(temperature):
    inf, nan = torch.inf, torch.nan
    bad = torch.tensor([[0.0, nan, 1.0], [inf, 0.0, 1.0], [-inf, -inf, -inf], [inf, nan, -inf]])
    good = torch.tensor([[0.0, -inf, 0.5], [-inf, -inf, -1e30], [3.0, 3.0, 3.0]])
    rows = torch.stack([bad[0], good[0], bad[1], good[1], bad[2], good[2], bad[3]])[:, None]
    every = sequences([SamplingParams(temperature=temperature)] * 7)
    got = sample(rows, every)
    assert got[::2] == [[None]] * 4 and got[3] == [2]
    assert got[1::2] == sample(good[:, None], every[1::2])


def test_greedy_tokens_are_the_lowest_of_equals_and_end_after_the_first_wrong_draft():
    equal, nan, inf = [[0.0, 3.0, 3.0], [5.0, 3.0, 3.0]], [torch.nan, 0.0, 0.0], [torch.inf, 0.0, 0.0]
    logits = torch.tensor([equal, [equal[0], nan], [inf, equal[1]], [equal[0], equal[1]]])
    every = sequences([SamplingParams()] * 4)
    for s, draft in zip(every, (1, 1, 0, 0)):
        s.drafts = [draft]
    assert sample(logits, every) == [[1, 0], [1, None], [None], [1]]


def vllms(row, prompt, generated, p):
    """Return one row of logits after vLLM's penalties. p: the SamplingParams."""
    row, counts = row.clone(), Counter(generated)
    for token in {*prompt, *generated}:
        row[token] = row[token] / p.repetition_penalty if row[token] > 0 else row[token] * p.repetition_penalty
    for token, count in counts.items():
        row[token] -= p.frequency_penalty * count + p.presence_penalty
    return row


@pytest.mark.parametrize("generated", [[], [4], [4, 4, 2, 7]])
def test_penalties_count_the_prompt_the_generated_tokens_and_the_drafts_before(generated):
    params = [SamplingParams(**PENALTIES), SamplingParams(), SamplingParams(frequency_penalty=-2)]
    logits = torch.randn(3, 3, 9, generator=torch.Generator().manual_seed(0))
    every = sequences(params, [4, 8], [1, 2, 2, *generated], 3)
    got = penalised(logits, every)
    for b, s in enumerate(every):
        expected = [vllms(logits[b, i], [1, 2], [*generated, *s.drafts[:i]], s.params) for i in range(3)]
        torch.testing.assert_close(got[b], torch.stack(expected))
    assert penalised(logits, every[1:2] * 3) is logits


def test_logprobs_are_the_chosen_token_and_the_likeliest():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 0.0, 5.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    first, second = logprobs_of(logits, [2, 2], 2)
    values = logits.log_softmax(-1)
    assert list(first) == [2, 1] and first[2] == (values[0, 2].item(), 2) and first[1] == (values[0, 1].item(), 1)
    assert list(second) == [2, 3] and logprobs_of(logits, [1, 2], 0)[1] == {2: (values[1, 2].item(), 1)}


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


def test_n_sequences_of_a_prompt_have_seeds_of_their_own(model):
    generator = Generator(model, cache_tokens=2048, prefix_cache=True)
    got = generator.generate(PROMPTS, SamplingParams(3, 1.0, seed=7, n=3))
    assert [c.prompt for c in got] == [0, 0, 0, 1, 1, 1]
    for i, c in enumerate(got):
        (alone,) = generator.generate([PROMPTS[i // 3]], SamplingParams(3, 1.0, seed=7 + i))
        assert c.tokens == alone.tokens
    one_each = generator.generate(PROMPTS, [SamplingParams(3, 1.0, seed=7, n=2), SamplingParams(3)])
    assert [c.tokens for c in one_each[:2]] == [c.tokens for c in got[:2]] and one_each[2].prompt == 1
    assert one_each[0].logprobs is None


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: must be at least 1, got 0"),
        ({"temperature": float("nan")}, "temperature: must be a finite number of at least 0, got nan"),
        ({"temperature": 10**400}, "temperature: must be a finite number of at least 0, got inf"),
        ({"top_k": -1}, "top_k: must be at least 0"),
        ({"top_p": 0.0}, "top_p: must be above 0 and at most 1, got 0.0"),
        ({"seed": 2**63}, r"seed: must be at least 0 and below 2\^63, got 9223372036854775808"),
        ({"n": 2}, "n: must be 1 with temperature 0, which is greedy, got 2"),
        ({"min_p": 1.1}, "min_p: must be at least 0 and at most 1, got 1.1"),
        ({"repetition_penalty": 0}, "repetition_penalty: must be above 0, from 0.001 to 1000, got 0.0"),
        ({"presence_penalty": -2.1}, "presence_penalty: must be at least -2 and at most 2, got -2.1"),
        ({"logprobs": -1}, "logprobs: must be at least 0, got -1"),
        ({"stop": ("a", "")}, "stop: must not be empty, got ''"),
        *(({"stop": stop}, "stop: must be a string or a list of strings, got") for stop in (5, b"a", [None])),
    ],
)
def test_wrong_parameters(params, message):
    with pytest.raises((TypeError, ValueError), match=message):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("text", "stop", "shown", "stopped"),
    [
        ("abcabd", ("abd",), ["", "", "a", "b", "c", ""], True),
        ("abab", ("abac",), ["", "", "", "abab"], False),
        ("xaab", ("ab", "aabb"), ["", "", "", "xa"], True),
        ("ab", (), ["a", "b"], False),
    ],
)
def test_text_in_which_a_stop_string_may_begin_is_held_back(text, stop, shown, stopped):
    watch = StopStrings(SimpleNamespace(push=lambda token: token, flush=lambda: ""), stop)
    got = [watch.push(letter, last=i == len(text) - 1) for i, letter in enumerate(text)]
    assert [t for t, _ in got] == shown and got[-1][1] == stopped


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (None, {}),
        ({"eos_token_id": 1}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95}, {"temperature": 0.6, "top_p": 0.95}),
        ({"do_sample": True, "top_k": 20}, {"temperature": 1.0, "top_k": 20}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.95}, {"temperature": 0.0, "top_p": 0.95}),
        ({"do_sample": None, "temperature": None, "top_p": 0.9}, {"top_p": 0.9}),
    ],
)
def test_defaults_of_a_checkpoint(tmp_path, fields, expected):
    if fields is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    assert sampling_defaults(tmp_path) == expected


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"do_sample": 1}', "field do_sample: must be True or False, got 1"),
        ('{"temperature": "hot"}', "field temperature: must be a number, got 'hot'"),
        ('{"top_k": 2.5}', "field top_k: must be an integer, got 2.5"),
        ("[]", "must hold a JSON object, got []"),
    ],
)
def test_wrong_defaults_of_a_checkpoint(tmp_path, content, problem):
    path = tmp_path / "generation_config.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        sampling_defaults(tmp_path)
    assert str(caught.value).startswith(f"{path}: {problem}")
