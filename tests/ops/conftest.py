"""What tests of bridges share: the kernels' way without a GPU."""

import contextlib
import re
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

    def kernel(kernels: object, *variant: Any) -> Any:
        return lambda *arguments: found.append((variant, arguments))

    for name in filter(re.compile("_(.+_)?kernel").fullmatch, dir(request.module.op)):
        monkeypatch.setattr(request.module.op, name, kernel)
    return found
