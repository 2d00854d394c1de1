"""What tests of the `dsa` command share."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def error(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Return the one line of a wrong call, which has no standard output."""

    def line() -> str:
        captured = capsys.readouterr()
        assert captured.out == ""
        (only,) = captured.err.splitlines()
        return only

    return line


@pytest.fixture
def damaged(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint to damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "damaged"))
