"""Choosing tokens, its parameters, and strings that end a text."""

import pytest
import torch

from dsa_layers.generation.draws import RandomStream
from dsa_layers.generation.sampling import SamplingParams, sample
from dsa_layers.generation.stop_strings import StopStrings


def draw(logits, n=4000, **params):
    drawn = sample(logits.expand(n, -1), [SamplingParams(**params)] * n, [RandomStream(i) for i in range(n)])
    return torch.bincount(torch.tensor(drawn), minlength=len(logits)) / n


def test_sampling_follows_the_probabilities():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    torch.testing.assert_close(draw(logits, temperature=0.7), (logits / 0.7).softmax(0), atol=0.03, rtol=0)
    kept = draw(logits, temperature=1.0, top_k=2)
    torch.testing.assert_close(kept, torch.cat((logits[:2].softmax(0), torch.zeros(2))), atol=0.03, rtol=0)
    # softmax: 0.64, 0.24, 0.09, 0.03. The first reaches 0.6 alone, the first two reach 0.65.
    assert draw(logits, 200, temperature=1.0, top_p=0.6).tolist() == [1, 0, 0, 0]
    assert (draw(logits, 500, temperature=1.0, top_p=0.65) > 0).tolist() == [True, True, False, False]
    assert draw(logits, 50, temperature=1e-30).tolist() == [1, 0, 0, 0]


def test_greedy_takes_the_lowest_of_equals():
    greedy, stream = SamplingParams(), RandomStream(None)
    assert sample(torch.tensor([[0.0, 3.0, 3.0], [5.0, 3.0, 3.0]]), [greedy] * 2, [stream] * 2) == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_that_are_not_finite_have_no_token(temperature):
    """And the others the one that they have alone. Single tokens may be ruled out by minus infinity."""
    inf, nan = torch.inf, torch.nan
    bad = torch.tensor([[0.0, nan, 1.0], [inf, 0.0, 1.0], [-inf, -inf, -inf], [inf, nan, -inf]])
    good = torch.tensor([[0.0, -inf, 0.5], [-inf, -inf, -1e30], [3.0, 3.0, 3.0]])
    params = [SamplingParams(temperature=temperature, seed=i) for i in range(7)]
    rows = torch.stack([bad[0], good[0], bad[1], good[1], bad[2], good[2], bad[3]])
    got = sample(rows, params, [RandomStream(one.seed) for one in params])
    assert got[::2] == [None] * 4 and got[3] == 2
    assert got[1::2] == sample(good, params[1::2], [RandomStream(one.seed) for one in params[1::2]])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: must be at least 1, got 0"),
        ({"temperature": -1.0}, "temperature: must be a finite number of at least 0, got -1.0"),
        ({"temperature": float("nan")}, "temperature: must be a finite"),
        ({"top_k": -1}, "top_k: must be at least 0"),
        ({"top_p": 0.0}, "top_p: must be above 0 and at most 1, got 0.0"),
        ({"seed": -1}, r"seed: must be at least 0 and below 2\^63, got -1"),
        ({"stop": ("a", "")}, r"stop\[1\]: must not be empty, got ''"),
        ({"stop": ""}, r"stop\[0\]: must not be empty, got ''"),
        ({"temperature": 10**400}, "temperature: must be a finite number of at least 0, got inf"),
        ({"top_p": float("nan")}, "top_p: must be above 0 and at most 1, got nan"),
        ({"seed": 2**63}, r"seed: must be at least 0 and below 2\^63, got 9223372036854775808"),
        ({"n": 0}, "n: must be at least 1, got 0"),
        ({"n": 2}, "n: must be 1 with temperature 0, which is greedy, got 2"),
        ({"min_p": 1.1}, "min_p: must be at least 0 and at most 1, got 1.1"),
        ({"min_p": float("nan")}, "min_p: must be at least 0"),
        ({"repetition_penalty": 0}, "repetition_penalty: must be above 0, from 0.001 to 1000, got 0.0"),
        ({"presence_penalty": -2.1}, "presence_penalty: must be at least -2 and at most 2, got -2.1"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty: must be at least -2"),
        ({"logprobs": -1}, "logprobs: must be at least 0, got -1"),
    ],
)
def test_sampling_parameters(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 2.0}, "max_tokens: must be an integer, got 2.0"),
        ({"max_tokens": True}, "max_tokens: must be an integer, got True"),
        ({"max_tokens": None}, "max_tokens: must be an integer, got None"),
        ({"temperature": "hot"}, "temperature: must be a number, got 'hot'"),
        ({"temperature": None}, "temperature: must be a number, got None"),
        ({"temperature": True}, "temperature: must be a number, got True"),
        ({"top_k": 1.5}, "top_k: must be an integer, got 1.5"),
        ({"top_p": [0.9]}, r"top_p: must be a number, got \[0.9\]"),
        ({"seed": "1"}, "seed: must be an integer, got '1'"),
        ({"stop": 5}, "stop: must be a string or a list of strings, got 5"),
        ({"stop": b"abc"}, "stop: must be a string or a list of strings, got b'abc'"),
        ({"stop": ("a", None)}, r"stop\[1\]: must be a string, got None"),
    ],
)
def test_sampling_parameters_of_other_types(params, message):
    with pytest.raises(TypeError, match=message):
        SamplingParams(**params)


def test_one_stop_string_is_not_its_letters():
    assert SamplingParams(stop="abc") == SamplingParams(stop=("abc",)) == SamplingParams(stop=["abc"])
    assert SamplingParams(stop="abc").stop == ("abc",) and SamplingParams(stop=None).stop == ()


def test_numbers_of_numpy_and_very_large_ones():
    import numpy

    params = SamplingParams(numpy.int32(4), numpy.float32(0.5), numpy.int64(3), 1, numpy.uint8(7))
    assert params == SamplingParams(4, 0.5, 3, 1.0, 7) and type(params.max_tokens) is int
    huge = SamplingParams(10**30, temperature=1e300, top_k=10**30, seed=0)
    assert sample(torch.tensor([[1.0, 2.0]]), [huge], [RandomStream(huge.seed)])[0] in (0, 1)


class Letters:
    """A decoder whose tokens are the letters themselves."""

    def push(self, token):
        return token

    def flush(self):
        return ""


@pytest.mark.parametrize(
    ("text", "stop", "shown", "stopped"),
    [
        ("abcabd", ("abd",), ["", "", "abc", "", "", ""], True),
        ("abab", ("abac",), ["", "", "", "abab"], False),
        ("xaab", ("ab", "aabb"), ["x", "", "", "a"], True),
    ],
)
def test_stop_strings_hold_back_what_may_become_one(text, stop, shown, stopped):
    watch = StopStrings(Letters(), stop)
    got = [watch.push(letter, last=i == len(text) - 1) for i, letter in enumerate(text)]
    assert [t for t, _ in got] == shown and got[-1][1] == stopped


def test_a_long_stop_string_is_compared_with_what_is_held_back():
    """And not all of its beginnings with that, which would take minutes."""
    watch = StopStrings(Letters(), ["b" * 10**6, "ab"])
    assert "".join(watch.push("a", last=i == 99)[0] for i in range(100)) == "a" * 100
