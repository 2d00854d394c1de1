"""What the bridge to the kernel of scaled products remembers from call to call."""

import pytest
import torch

from dsa.ops.gemm import fp8_gemm_nt as bridge


@pytest.fixture
def capturing(monkeypatch):
    """Says whether a graph is being captured; nothing is remembered yet."""
    state = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[0])
    monkeypatch.setattr(bridge, "_known_ends", {})
    return state


def test_what_a_capture_makes_is_not_kept(capturing):
    """A tensor of a graph that is never replayed holds anything: no other call may read it."""
    capturing[0] = True
    captured = bridge._all_rows(torch.device("cpu"))
    capturing[0] = False
    ends = bridge._all_rows(torch.device("cpu"))
    assert ends is not captured and ends.tolist() == [2**31 - 1]
    assert bridge._all_rows(torch.device("cpu")) is ends


def test_a_capture_uses_what_is_there(capturing):
    ends = bridge._all_rows(torch.device("cpu"))
    capturing[0] = True
    assert bridge._all_rows(torch.device("cpu")) is ends
