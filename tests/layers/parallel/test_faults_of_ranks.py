"""What ranks do otherwise than others: it is the same after all, or all of them hear of it and nobody waits."""

import os

import pytest
import torch
import torch.distributed as dist

from dsa_layers import Generator, SamplingParams, load_model
from dsa_layers.parallel.ranks import Ranks
from tests.layers.parallel.processes import in_ranks

OPTIONS = {"dtype": torch.float32, "dequantize": True, "progress": False}


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint):
    return tiny_checkpoint("deepseek_v32", quantized=False)


def sampled(ranks, directory):
    generator = Generator(load_model(directory, mesh=ranks, **OPTIONS), None, cache_tokens=2048)
    params = SamplingParams(max_new_tokens=8, temperature=1.0)
    return [completion.tokens for completion in generator.generate([[5, 6, 7]], params)]


def test_sampling_without_a_seed(checkpoint):
    first, second = in_ranks(2, sampled, checkpoint)
    assert first == second


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
    """What each of several calls raises that are not the same on all ranks."""
    model = load_model(directory, mesh=ranks, **OPTIONS)
    generator = Generator(model, None, cache_tokens=2048)
    calls = [
        lambda: generator.generate([[5, 6, 7 + ranks.rank]]),
        lambda: generator.generate([[5, 6, 7]], SamplingParams(max_new_tokens=4 + ranks.rank)),
        lambda: generator.generate([[5, 6, 7], *[[1]] * ranks.rank]),
        lambda: generator.generate([[5, 6, -ranks.rank]]),
        lambda: load_model(directory / ("" if ranks.rank == 0 else "none"), mesh=ranks, **OPTIONS),
        lambda: load_model(directory, mesh=ranks, **OPTIONS | {"dtype": (torch.float32, torch.bfloat16)[ranks.rank]}),
        lambda: Generator(model, None, cache_tokens=2048, prefill_chunk=100 + ranks.rank),
        lambda: Generator(model, None, cache_tokens=2048, prefill_chunk=1 - ranks.rank),
        lambda: Generator(model, Ends(7 + ranks.rank), cache_tokens=2048),
    ]
    return said_by(calls)


def test_calls_that_differ(checkpoint):
    first, second = in_ranks(2, of_other_calls, checkpoint)
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


def of_other_environments(ranks, directory, name, values):
    """What each of several calls raises where ranks have other values of a setting, None for none."""
    os.environ.pop(name, None)
    model = load_model(directory, mesh=ranks, **OPTIONS)
    generator = Generator(model, None, cache_tokens=2048)
    calls = [
        lambda: load_model(directory, mesh=ranks, **OPTIONS),
        lambda: Generator(model, None, cache_tokens=2048),
        lambda: generator.generate([[5, 6, 7]]),
    ]
    if values[ranks.rank] is not None:
        os.environ[name] = values[ranks.rank]
    return said_by(calls)


@pytest.mark.parametrize(
    ("name", "values"), [("DSA_BACKEND", ("cute", "reference")), ("DSA_COMPARE_RANKS", (None, "1"))]
)
def test_environments_that_differ(checkpoint, name, values):
    told = "{}: must be the same on all ranks, got {} on rank 0 and {} on rank 1"
    told = told.format(name, *(value or "unset" for value in values))
    assert in_ranks(2, of_other_environments, checkpoint, name, values) == [[told] * 3] * 2


def outside(ranks, directory):
    group = dist.new_group([0, 1])
    try:
        load_model(directory, mesh=Ranks.of(group), **OPTIONS)
    except (ValueError, IndexError) as error:
        return type(error).__name__
    return "loaded"


def test_a_process_outside_of_the_group(checkpoint):
    assert in_ranks(3, outside, checkpoint) == ["loaded", "loaded", "ValueError"]
