"""Fixtures: a separate compile cache per test, and ops that run the code for a GPU on a CPU."""

from pathlib import Path

import pytest

from dsa.runtime import compile_cache
from tests.ops.conftest import kernel_path  # noqa: F401


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a compile cache for this test. The folder does not exist yet."""
    monkeypatch.setenv("DSA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_cache, "_warned", set())
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _kernels_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the cache return the kernels themselves, without wrappers that record launches, because tests compare
    them."""
    monkeypatch.setattr(compile_cache, "noted", lambda kernel: kernel)
