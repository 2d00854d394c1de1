"""What ranks do otherwise than others: it is the same after all, or all of them hear of it and nobody waits."""

import os

import pytest
import torch

from dsa_layers import Generator, SamplingParams, load_model
from tests.layers.parallel.processes import in_ranks

OPTIONS = {"dtype": torch.float32, "dequantize": True, "progress": False}


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint):
    return tiny_checkpoint("deepseek_v32", quantized=False)


class Ends:
    """A tokenizer of which a generator asks for the token that ends a text."""

    encode = stream = None

    def __init__(self, token):
        self.eos_token_id = token


def said_by(calls):
    """What each of several calls raises."""
    found = []
    for call in calls:
        with pytest.raises(ValueError) as raised:
            call()
        found.append(str(raised.value))
    return found


def of_other_calls(ranks, directory):
    """Tokens that are sampled without a seed, and what each of several calls raises that are not the same on all
    ranks."""
    model = load_model(directory, mesh=ranks, **OPTIONS)
    generator = Generator(model, None, cache_tokens=2048)
    calls = [
        lambda: generator.generate([[5, 6, 7 + ranks.rank]]),
        lambda: generator.generate([[5, 6, 7]], SamplingParams(max_tokens=4 + ranks.rank)),
        lambda: generator.generate([[5, 6, 7], *[[1]] * ranks.rank]),
        lambda: generator.generate([[5, 6, -ranks.rank]]),
        lambda: load_model(directory / ("" if ranks.rank == 0 else "none"), mesh=ranks, **OPTIONS),
        lambda: load_model(directory, mesh=ranks, **OPTIONS | {"dtype": (torch.float32, torch.bfloat16)[ranks.rank]}),
        lambda: Generator(model, None, cache_tokens=2048, prefill_chunk=100 + ranks.rank),
        lambda: Generator(model, None, cache_tokens=2048, prefill_chunk=1 - ranks.rank),
        lambda: Generator(model, Ends(7 + ranks.rank), cache_tokens=2048),
    ]
    (sampled,) = generator.generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=1.0))
    return sampled.tokens, said_by(calls)


def test_calls_that_differ(checkpoint):
    """All ranks hear of them; without a seed they draw the same numbers."""
    (tokens, first), (others, second) = in_ranks(2, of_other_calls, checkpoint)
    assert tokens == others
    for i, name in enumerate(("prompts", "params", "prompts")):
        assert first[i] == second[i] and first[i].startswith(
            f"{name}: must be the same on all ranks, got ones of digest"
        )
    assert first[3] == f"{second[3]} (rank 1)" and "prompts[0]" in second[3]
    assert first[4] == f"{second[4]} (rank 1)" and "none" in second[4]
    assert first[5] == second[5] and first[5].startswith("precision: must be the same on all ranks, got ")
    assert first[6] == second[6] == "prefill_chunk: must be the same on all ranks, got 100 on rank 0 and 101 on rank 1"
    assert first[7] == f"{second[7]} (rank 1)" and second[7] == "prefill_chunk: must be at least 1, got 0"
    assert first[8] == second[8] and first[8].startswith("tokens that end: must be the same on all ranks, got [")


def of_other_environments(ranks, directory, settings):
    """What each of several calls raises where ranks have other values of a setting, None for none."""
    for name in settings:
        os.environ.pop(name, None)
    model = load_model(directory, mesh=ranks, **OPTIONS)
    generator = Generator(model, None, cache_tokens=2048)
    calls = [
        lambda: load_model(directory, mesh=ranks, **OPTIONS),
        lambda: Generator(model, None, cache_tokens=2048),
        lambda: generator.generate([[5, 6, 7]]),
    ]
    found = {}
    for name, values in settings.items():
        if values[ranks.rank] is not None:
            os.environ[name] = values[ranks.rank]
        found[name] = said_by(calls)
        os.environ.pop(name, None)
    return found


def test_environments_that_differ(checkpoint):
    settings = {"DSA_BACKEND": ("cute", "reference"), "DSA_COMPARE_RANKS": (None, "1")}
    same = "must be the same on all ranks, got"
    told = {
        "DSA_BACKEND": [f"DSA_BACKEND: {same} cute on rank 0 and reference on rank 1"] * 3,
        "DSA_COMPARE_RANKS": [f"DSA_COMPARE_RANKS: {same} unset on rank 0 and 1 on rank 1"] * 3,
    }
    assert in_ranks(2, of_other_environments, checkpoint, settings) == [told] * 2
