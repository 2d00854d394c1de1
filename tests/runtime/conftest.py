"""A compile cache of a test's own."""

from pathlib import Path

import pytest

from dsa.runtime import compile_cache


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compile cache of the test's own, which is not there yet."""
    monkeypatch.setenv("DSA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_cache, "_warned", set())
    return tmp_path / "cache"
