"""What ranks do differently from each other: these fail as long as the faults are there."""

import pytest
import torch
import torch.distributed as dist

from dsa_layers import Generator, SamplingParams, load_model
from dsa_layers.parallel.ranks import Ranks
from dsa_layers.tiny import write_tiny_checkpoint
from tests.layers.parallel.processes import in_ranks

OPTIONS = {"dtype": torch.float32, "dequantize": True, "progress": False}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_tiny_checkpoint(directory, model="deepseek_v32", quantized=False)
    return directory


def sampled(ranks, directory):
    generator = Generator(load_model(directory, mesh=ranks, **OPTIONS), None, cache_tokens=2048)
    params = SamplingParams(max_new_tokens=8, temperature=1.0)
    return [completion.tokens for completion in generator.generate([[5, 6, 7]], params)]


def test_sampling_without_a_seed(checkpoint):
    first, second = in_ranks(2, sampled, checkpoint)
    assert first == second


def outside(ranks, directory):
    group = dist.new_group([0, 1])
    try:
        load_model(directory, mesh=Ranks.of(group), **OPTIONS)
    except (ValueError, IndexError) as error:
        return type(error).__name__
    return "loaded"


def test_a_process_outside_of_the_group(checkpoint):
    assert in_ranks(3, outside, checkpoint) == ["loaded", "loaded", "ValueError"]
