"""What the tests of both engines share."""

import pytest
import torch

from dsa_engines import first_use


@pytest.fixture
def nothing_is_compiled(monkeypatch):
    """Forget the shapes that are compiled. Without CUDA, torch cannot tell whether a stream is being captured."""
    monkeypatch.setattr(first_use, "_ready", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
