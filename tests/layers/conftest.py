"""Fixtures for all tests of `dsa_layers`."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dsa_layers import tiny, write_tiny_checkpoint
from tests.layers.generation.families import FAMILIES


@pytest.fixture(scope="session", autouse=True)
def one_tokenizer_per_size():
    """Train only one tokenizer per vocabulary size, for all tiny checkpoints of that size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "train_tokenizer", functools.cache(tiny.train_tokenizer))
        yield


@pytest.fixture(scope="package", autouse=True)
def no_gpu():
    """Hide GPUs here and in subprocesses, so that models are loaded to the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Callable[..., Path]:
    """Return a function from (model, quantized=True) to a tiny checkpoint. Tests must not change its files."""
    made = {}

    def directory(model: str, quantized: bool = True) -> Path:
        if (model, quantized) not in made:
            made[model, quantized] = tmp_path_factory.mktemp(model)
            write_tiny_checkpoint(made[model, quantized], model=model, quantized=quantized)
        return made[model, quantized]

    return directory


@pytest.fixture(scope="session")
def checkpoint(tiny_checkpoint) -> Path:
    return tiny_checkpoint("deepseek_v32")


@pytest.fixture(scope="session")
def glm_checkpoint(tiny_checkpoint) -> Path:
    return tiny_checkpoint("glm_moe_dsa")


@pytest.fixture(scope="module", params=FAMILIES)
def model_type(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def directory(model_type, tiny_checkpoint) -> Path:
    """The directory of the family's tiny checkpoint."""
    return tiny_checkpoint(model_type)
