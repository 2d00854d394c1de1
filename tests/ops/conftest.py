"""What tests of bridges share: the kernels' way without a GPU."""

import contextlib
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import dsa.ops
from dsa import backends

BRIDGES = [name for _, name, is_package in pkgutil.walk_packages(dsa.ops.__path__, "dsa.ops.") if not is_package]
CTAS = 99  # what kernels that say how many CTAs they run with say here


class Kernel:
    """A kernel that notes its launches. Where a bridge expects a kernel and its number of CTAs, it is both."""

    def __init__(self, note: Callable[[tuple[Any, ...]], None]) -> None:
        self.note = note

    def __call__(self, *arguments: Any) -> None:
        self.note(arguments)

    def __iter__(self) -> Iterator[Any]:
        return iter((self, CTAS))


@pytest.fixture
def kernel_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU go the way of those on a Hopper GPU, up to the launch."""
    monkeypatch.setattr(backends, "runs_kernel", lambda *_: True)
    monkeypatch.setattr(backends, "arch_of", lambda _: "sm_90")
    monkeypatch.setattr(backends, "on_device", lambda _: contextlib.nullcontext())


@pytest.fixture
def named_launches(
    kernel_path: None, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, tuple[Any, ...], tuple[Any, ...]]]:
    """What ops would launch, (name, variant, arguments) each: NAME is from the function `_NAME_kernel` of a bridge,
    which chooses the kernel; nothing runs."""
    found: list[tuple[str, tuple[Any, ...], tuple[Any, ...]]] = []
    _record(monkeypatch, lambda *launch: found.append(launch))
    return found


@pytest.fixture
def launches(kernel_path: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """What ops would launch, (variant, arguments) each; nothing runs."""
    found: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []
    _record(monkeypatch, lambda _, variant, arguments: found.append((variant, arguments)))
    return found


def _record(monkeypatch: pytest.MonkeyPatch, note: Callable[..., None]) -> None:
    def recorder(name: str) -> Callable[..., Kernel]:
        return lambda kernels, *variant: Kernel(lambda arguments: note(name, variant, arguments))

    for bridge in map(importlib.import_module, BRIDGES):
        for function in filter(re.compile("_(.+_)?kernel").fullmatch, dir(bridge)):
            monkeypatch.setattr(bridge, function, recorder(function.removesuffix("_kernel").removeprefix("_")))
