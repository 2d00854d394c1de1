"""What a user sets as torch's default dtype or device changes no model: neither its tensors nor what it generates."""

import pytest
import torch

from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.io.loading import load_model
from dsa_layers.io.tokenizer import Tokenizer
from tests.ops.test_torch_defaults import default_dtype


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4"])
def test_defaults_change_nothing(family, tiny_checkpoint):
    directory = tiny_checkpoint(family)
    model = load_model(directory, progress=False)
    expected = completions(model, directory)
    with torch.device("meta"):
        assert completions(model, directory) == expected
    with default_dtype(torch.bfloat16):
        loaded = load_model(directory, progress=False)
        assert completions(loaded, directory) == expected
    for (name, x), (_, y) in zip(loaded.state_dict().items(), model.state_dict().items(), strict=True):
        assert x.dtype == y.dtype, name


def completions(model, directory) -> list[list[int]]:
    generator = Generator(model, Tokenizer(directory), cache_tokens=256, prefill_chunk=8)
    found = generator.generate(["The lightning indexer", "a"], SamplingParams(max_tokens=2))
    return [c.tokens for c in found]
