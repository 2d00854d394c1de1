"""What tests of layers, models and the command share."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dsa_layers import tiny
from dsa_layers.tiny import write_tiny_checkpoint


@pytest.fixture(scope="session", autouse=True)
def one_tokenizer_of_a_size():
    """Training one is most of the time that a tiny checkpoint takes, and a checkpoint's is only written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "train_tokenizer", functools.cache(tiny.train_tokenizer))
        yield


@pytest.fixture(scope="package", autouse=True)
def no_gpu():
    """These tests run on a CPU, also where there is a GPU, to which models would be loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Callable[..., Path]:
    """A function of (model, quantized=True) that gives the tiny checkpoint's directory, to be read only. Writing one
    takes a second."""
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
