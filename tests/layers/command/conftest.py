"""Fixtures for the tests of the `dsa` command."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dsa_layers import Generator


@pytest.fixture
def error(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Return a function that requires an empty standard output, and returns the only line of standard error."""

    def line() -> str:
        captured = capsys.readouterr()
        assert captured.out == ""
        (only,) = captured.err.splitlines()
        return only

    return line


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list]:
    """Return a function that replaces `Generator.stream`, and returns a growing list: the (prompts, params) of the
    calls. Call i yields the events of runs[i], or raises those that are exceptions. Further calls yield nothing."""
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
    """A copy of the checkpoint that a test may damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "damaged"))
