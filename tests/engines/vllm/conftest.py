"""The plugin in vLLM itself."""

import pytest

from dsa_engines.vllm import install
from tests.engines.vllm import engine


@pytest.fixture
def plugin(monkeypatch):
    engine.put_in_place(monkeypatch)
    yield
    install.uninstall()
