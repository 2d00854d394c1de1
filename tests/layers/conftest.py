"""What tests of layers, models and the command share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dsa_layers.tiny import write_tiny_checkpoint


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
