"""What tests of bridges share: the kernels' way without a GPU."""

import contextlib
import re
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest

from dsa import backends


@pytest.fixture
def kernel_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU go the way of those on a Hopper GPU, up to the launch."""
    monkeypatch.setattr(backends, "runs_kernel", lambda *_: True)
    monkeypatch.setattr(backends, "arch_of", lambda _: "sm_90")
    monkeypatch.setattr(backends, "on_device", lambda _: contextlib.nullcontext())


@pytest.fixture
def launches(
    kernel_path: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """What the bridge `op` of the test's module would launch, (variant, arguments) each; nothing runs."""
    found: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []
    _record(monkeypatch, [request.module.op], lambda _, variant, arguments: found.append((variant, arguments)))
    return found


@pytest.fixture
def named_launches(
    kernel_path: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> list[tuple[str, tuple[Any, ...], tuple[Any, ...]]]:
    """What the `BRIDGES` of the test's module would launch, (name, variant, arguments) each: NAME is from the function
    `_NAME_kernel`, which chooses the kernel; nothing runs."""
    found: list[tuple[str, tuple[Any, ...], tuple[Any, ...]]] = []
    _record(monkeypatch, request.module.BRIDGES, lambda *launch: found.append(launch))
    return found


def _record(monkeypatch: pytest.MonkeyPatch, bridges: Iterable[ModuleType], note: Callable[..., None]) -> None:
    for bridge in bridges:
        for function in filter(re.compile("_(.+_)?kernel").fullmatch, dir(bridge)):
            monkeypatch.setattr(bridge, function, _recorder(function.removesuffix("_kernel").removeprefix("_"), note))


def _recorder(name: str, note: Callable[..., None]) -> Callable[..., Any]:
    return lambda kernels, *variant: lambda *arguments: note(name, variant, arguments)
