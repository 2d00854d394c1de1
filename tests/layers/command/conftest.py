"""What tests of the `dsa` command share."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dsa_layers import Generator


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
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list]:
    """Make the generator give each list of events in turn, then none, and raise the exceptions among them. Return the
    list of (prompts, parameters) that reach it."""
    calls = []

    def install(*runs: list) -> list:
        waiting = iter(runs)

        def stream(self, prompts, params, on_prefill):
            calls.append((prompts, params))
            for event in next(waiting, ()):
                if isinstance(event, BaseException):
                    raise event
                yield event

        monkeypatch.setattr(Generator, "stream", stream)
        return calls

    return install


@pytest.fixture
def damaged(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint to damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "damaged"))
