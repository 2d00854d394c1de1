"""Records calls of functions and their arguments."""

from collections.abc import Callable
from types import ModuleType

import pytest

import dsa


def record(monkeypatch: pytest.MonkeyPatch, *names: str, seen: Callable | None = None, owner: ModuleType = dsa) -> list:
    """Records calls of functions of `owner` until the test ends. The returned list grows with each call, by the
    function's name, or by what `seen` returns for the call's arguments."""
    calls = []

    def recording(name, function):
        def call(*arguments, **options):
            calls.append(name if seen is None else seen(*arguments, **options))
            return function(*arguments, **options)

        return call

    for name in names:
        monkeypatch.setattr(owner, name, recording(name, getattr(owner, name)))
    return calls
