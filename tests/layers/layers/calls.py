"""A recorder of function calls for tests."""

from collections.abc import Callable
from types import ModuleType

import pytest

import dsa


def record(monkeypatch: pytest.MonkeyPatch, *names: str, seen: Callable | None = None, owner: ModuleType = dsa) -> list:
    """Record calls of the functions `names` of `owner` until `monkeypatch` is undone. Return a list to which each call
    appends the function's name or, with `seen`, the result of `seen` for the call's arguments."""
    calls = []

    def recording(name, function):
        def call(*arguments, **options):
            calls.append(name if seen is None else seen(*arguments, **options))
            return function(*arguments, **options)

        return call

    for name in names:
        monkeypatch.setattr(owner, name, recording(name, getattr(owner, name)))
    return calls
