"""What tests of the `dsa` command share."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def error(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """The one line of a wrong call; nothing went to the standard output."""

    def line() -> str:
        captured = capsys.readouterr()
        assert captured.out == ""
        (only,) = captured.err.splitlines()
        return only

    return line


@pytest.fixture
def damaged(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, its files links: to damage one, replace it."""
    directory = tmp_path / "damaged"
    directory.mkdir()
    for path in checkpoint.iterdir():
        (directory / path.name).symlink_to(path)
    return directory
