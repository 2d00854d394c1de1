"""The fixture that installs the plugin in vLLM."""

import pytest
import torch

from dsa_engines.vllm import install
from tests.engines.vllm import engine


@pytest.fixture
def plugin(monkeypatch):
    """Install the plugin, and run the test in inference mode, as vLLM runs all passes."""
    engine.put_in_place(monkeypatch)
    with torch.inference_mode():
        yield
    install.uninstall()
