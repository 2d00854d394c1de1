"""What the benchmarks of several rows have in common: calls that their commands refuse, a line a row, and documents."""

import json
from pathlib import Path

import pytest

from dsa_bench.e2e import drafts, million, parallel

DOCS = Path(__file__).parents[2] / "docs"
RECEIPT = Path(__file__).parents[1] / "gpu" / "receipt.json"
ROWS = [{"shape": "a"}, {"shape": "b", "ms": 1.5}]
NOT_RUN = {"unverified": "has not run on a GPU"}


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (
            drafts,
            ["--sequences", "4", "6"],
            "--sequences: must be powers of two, which generation fills them up to, got 6",
        ),
        (million, ["--tokens", "100000"], "--tokens: must be multiples of 8192, at least 16384, got 100000"),
        (parallel, ["--gpus", "1"], "--gpus: must be at least 2, got 1"),
        (parallel, ["--models", "V5"], "argument --models: invalid choice: 'V5'"),
        (parallel, ["--runs", "prefill 5"], "argument --runs: invalid choice: 'prefill 5'"),
        *((command, [], "a benchmark needs a GPU with kernels: no GPU") for command in (drafts, million, parallel)),
    ],
)
def test_wrong_calls(command, arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("dsa.runtime.backends.why_no_kernels", lambda: "no GPU")
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "arguments", "asked"),
    [
        (drafts, ["--sequences", "2"], ([2],)),
        (million, ["--tokens", "131072", "--sequences", "2"], ([131072], [2])),
    ],
)
def test_a_line_a_row(command, arguments, asked, capsys, monkeypatch):
    given = []
    monkeypatch.setattr("dsa.runtime.backends.why_no_kernels", lambda: None)
    monkeypatch.setattr(command, "compile_ahead", lambda asked, tell: tell("compiled"))
    monkeypatch.setattr(command, "rows", lambda *given_, tell: given.append(given_) or iter(ROWS))
    assert command.main(["--models", "V4-Flash", *arguments]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == ROWS and "compiled" in err
    assert given == [(["V4-Flash"], *asked)]
    assert command.main(["--compile"]) == 0 and len(given) == 1
