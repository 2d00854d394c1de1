"""Recorders of calls of functions and of PyTorch's operators, and a switch of the form of attention."""

from collections.abc import Callable
from types import ModuleType

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import dsa
from dsa_layers.engine import paged_attention


def record(monkeypatch: pytest.MonkeyPatch, *names: str, seen: Callable | None = None, owner: ModuleType = dsa) -> list:
    """Return a list to which each call of a function in `names` of `owner` appends its name or seen(its arguments)."""
    calls = []

    def recording(name, function):
        def call(*arguments, **options):
            calls.append(name if seen is None else seen(*arguments, **options))
            return function(*arguments, **options)

        return call

    for name in names:
        monkeypatch.setattr(owner, name, recording(name, getattr(owner, name)))
    return calls


class Operators(TorchDispatchMode):
    """A mode that calls seen(operator, result) after each of PyTorch's operators."""

    def __init__(self, seen: Callable) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen(func, result)
        return result


def use_multi_head_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make sparse prefills on a CPU use the multi-head form of attention (engine/attention_form.py)."""
    monkeypatch.setattr(paged_attention.PagedAttention, "_has_multi_head_kernel", lambda *_: True)
    monkeypatch.setattr(paged_attention, "multi_head_is_faster", lambda *_: True)
