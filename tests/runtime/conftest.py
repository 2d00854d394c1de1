"""A compile cache of a test's own, and the kernels' way without a GPU."""

from pathlib import Path

import pytest

from dsa.runtime import compile_cache
from tests.ops.conftest import kernel_path  # noqa: F401


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compile cache of the test's own, which is not there yet."""
    monkeypatch.setenv("DSA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_cache, "_warned", set())
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _kernels_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache gives the kernels themselves, which tests compare, and not what notes their launches."""
    monkeypatch.setattr(compile_cache, "noted", lambda kernel: kernel)
