"""Fixtures for tests of ops: run the code for a GPU on a CPU, up to the launches, and list the launches."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from dsa.runtime import backends, variants
from dsa.runtime.variants import Kernel, Variant


@pytest.fixture
def kernel_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ops treat tensors on the CPU like tensors on a Hopper GPU, up to the launch."""
    monkeypatch.setattr(backends, "runs_kernel", lambda *_: True)
    monkeypatch.setattr(backends, "arch_of", lambda _: "sm_90")
    monkeypatch.setattr(backends, "on_device", lambda _: contextlib.nullcontext())


@pytest.fixture
def named_launches(
    kernel_path: None, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, tuple[Any, ...], tuple[Any, ...]]]:
    """Return the list of launches by ops. A launch is (NAME, arguments of compile_NAME, arguments of the kernel). No
    kernel runs."""
    found: list[tuple[str, tuple[Any, ...], tuple[Any, ...]]] = []
    _record(monkeypatch, lambda *launch: found.append(launch))
    return found


@pytest.fixture
def launches(kernel_path: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Return the list of launches by ops. A launch is (arguments of the compile function, arguments of the kernel). No
    kernel runs."""
    found: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []
    _record(monkeypatch, lambda _, variant, arguments: found.append((variant, arguments)))
    return found


def _record(monkeypatch: pytest.MonkeyPatch, note: Callable[..., None]) -> None:
    def stand_in(variant: Variant) -> Kernel:
        name = variant.function.removeprefix("compile_")
        return lambda *arguments: note(name, variant.arguments, arguments)

    monkeypatch.setattr(variants, "stand_in", stand_in)
