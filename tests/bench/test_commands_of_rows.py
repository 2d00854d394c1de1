"""The commands of several rows: calls that they refuse, and a line per row."""

import json

import pytest

from dsa_bench.e2e import command as shared
from dsa_bench.e2e import drafts, latency, million, one_of_many, parallel

ROWS = [{"shape": "a"}, {"shape": "b", "ms": 1.5}]
EVERY = (drafts, latency, million, one_of_many, parallel)


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (parallel, ["--gpus", "1"], "--gpus: must be at least 2, got 1"),
        (parallel, ["--models", "V5"], "argument --models: invalid choice: 'V5'"),
        (one_of_many, ["--runs", "prefill 5"], "argument --runs: invalid choice: 'prefill 5'"),
        *((command, [], "a benchmark needs a GPU with kernels: no GPU") for command in EVERY),
    ],
)
def test_wrong_calls(command, arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("dsa.runtime.backends.why_no_kernels", lambda: "no GPU")
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "choice"),
    [
        *((command, (["V4-Flash"],)) for command in (drafts, latency, million)),
        (one_of_many, (8, ["V4-Flash"], None, None)),
    ],
)
def test_a_command_prints_a_line_per_row_or_only_compiles(command, choice, capsys, monkeypatch):
    given = []
    monkeypatch.setattr("dsa.runtime.backends.why_no_kernels", lambda: None)
    monkeypatch.setattr(shared, "compile_ahead", lambda asked, tell: tell("compiled"))
    monkeypatch.setattr(command, "rows", lambda *given_, tell: given.append(given_) or iter(ROWS))
    assert command.main(["--models", "V4-Flash"]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == ROWS and "compiled" in err
    assert given == [choice]
    assert command.main(["--compile"]) == 0 and len(given) == 1
