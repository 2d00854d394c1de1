"""The plugin in vLLM itself."""

import pytest
import torch

from dsa_engines.vllm import install
from tests.engines.vllm import engine


@pytest.fixture
def plugin(monkeypatch):
    """In inference mode, as all of vLLM's passes are."""
    engine.put_in_place(monkeypatch)
    with torch.inference_mode():
        yield
    install.uninstall()
