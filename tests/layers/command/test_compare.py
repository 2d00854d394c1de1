"""`dsa compare`: what it measures, of which text, and what wrong calls are told."""

import json
import math
import re
from pathlib import Path

import pytest

from dsa_layers import SHIPPED_MODEL
from dsa_layers.command import compare as compare_command
from dsa_layers.command.compare import HELD_OUT_TEXT
from dsa_layers.command.main import main
from tests.layers.generation.families import FAMILIES


def compare(*options):
    return main(["compare", "--device", "cpu", *map(str, options)])


def measured(capsys):
    """The event that begins, and those of each attention by its name."""
    start, *rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return start, {row["attention"]: row for row in rows}


def test_sparse_attention_beside_dense_on_the_shipped_text(capsys):
    """The indexers' choice keeps nearly all that attention to all keys has; the latest keys, as many, do not."""
    assert compare("--json", "--length", 1024, "--max-tokens", 1024) == 0
    start, rows = measured(capsys)
    assert start == {
        "event": "start",
        "checkpoint": str(SHIPPED_MODEL),
        "device": "cpu",
        "backend": "reference",
        "dequantized": True,
        "text": str(HELD_OUT_TEXT),
        "sequences": 1,
        "length": 1024,
        "index_topk": 128,
    }
    assert list(rows) == ["sparse", "latest", "dense"]
    contexts = range(1, 1025)
    read, context = (sum(values) / 1024 for values in ([min(n, 128) for n in contexts], contexts))
    for name in ("sparse", "latest"):
        wanted = {"read": read, "dense": context, "context": context, "share": read / context}
        wanted |= {"most_read": 128, "most_dense": 1024, "longest_context": 1024}
        assert {key: rows[name][key] for key in wanted} == pytest.approx(wanted)
    assert (rows["dense"]["read"], rows["dense"]["share"], rows["dense"]["most_read"]) == (context, 1, 1024)
    loss = {name: row["loss"] for name, row in rows.items()}
    assert loss["sparse"] == pytest.approx(loss["dense"], abs=0.02)
    assert loss["latest"] > loss["dense"] + 0.05
    for row in rows.values():
        assert row["tokens"] == 1024 and row["seconds"] > 0
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))


def test_the_table(monkeypatch, capsys):
    """Its columns stand beneath their names, as in the example of docs/reference/cli.md."""
    monkeypatch.chdir(SHIPPED_MODEL.parent)
    assert compare("--length", 200, "--max-tokens", 500) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert captured.err == "" and lines[1] == f"{SHIPPED_MODEL.name}/held_out.txt: 2 x 200 tokens"
    head, *rows = lines[3:7]
    assert head in (Path(__file__).parents[3] / "docs" / "reference" / "cli.md").read_text().splitlines()
    ends = [match.end() for match in re.finditer(r"loss|perplexity|keys read a token|of context|seconds", head)]
    read = sum(min(n, 128) for n in range(1, 201)) / 200
    selected = [f"{read:.1f}", f"{read / 100.5:.0%}"]
    columns = {"sparse, top 128": selected, "the latest 128": selected, "dense, all keys": ["100.5", "100%"]}
    for row, (name, keys) in zip(rows, columns.items(), strict=True):
        assert row.startswith(f"{name} ") and row.removeprefix(name).split()[2:4] == keys, row
        # What comes before the first number is the attention's name, which has digits and spaces of its own.
        assert [match.end() for match in re.finditer(r"\S+", row)][-5:] == ends
    assert "All read the same keys" not in captured.out


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        (["--max-tokens", 2], (1, 2)),
        (["--max-tokens", 100], (1, 100)),
        (["--max-tokens", 100, "--length", 100], (1, 100)),
        (["--max-tokens", 100, "--length", 33], (3, 33)),
        (["--max-tokens", 5000], (2, 2048)),
        ([], (2, 2048)),
        (["--length", 1500], (2, 1500)),
    ],
)
def test_no_more_than_the_tokens_that_were_asked_for(monkeypatch, capsys, options, shape):
    """A sequence is shorter where they are fewer."""
    monkeypatch.setattr(compare_command, "_row", lambda loaded, name, sequences, *_: measured_of.append(sequences))
    monkeypatch.setattr(compare_command, "_event", lambda row: {})
    measured_of = []
    assert compare("--json", *options) == 0
    start = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (start["sequences"], start["length"]) == shape
    assert [[len(tokens) - 1 for tokens in sequences] for sequences in measured_of] == 3 * [shape[0] * [shape[1]]]


def test_sequences_that_selection_does_not_shorten(capsys):
    assert compare("--length", 100, "--max-tokens", 100) == 0
    expected = "All read the same keys: a token selects 128, and sequences of 100 tokens have no more to select from."
    assert expected in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tiny_checkpoint, capsys, family):
    """Dense attention reads all of what is in the cache, which in DeepSeek-V4 is less than the context has tokens."""
    checkpoint, size = tiny_checkpoint(family), ("--length", 450, "--max-tokens", 450, "--prefill-chunk", 128)
    assert compare(checkpoint, "--json", *size) == 0
    _, rows = measured(capsys)
    assert all(math.isfinite(row["loss"]) for row in rows.values())
    assert rows["sparse"]["loss"] != rows["dense"]["loss"] != rows["latest"]["loss"]
    assert rows["dense"]["share"] == 1 > rows["sparse"]["share"]
    assert rows["sparse"]["read"] == rows["latest"]["read"] < rows["dense"]["read"] <= rows["dense"]["context"] == 225.5


@pytest.mark.slow
def test_the_table_of_deepseek_v4(tiny_checkpoint, capsys):
    assert compare(tiny_checkpoint("deepseek_v4"), "--length", 450, "--max-tokens", 450) == 0
    out = capsys.readouterr().out
    head, *rows = out.split("\n\n")[1].splitlines()
    assert "of dense" in head and "context" not in head
    assert [re.search(r"(\d+)% +[\d.]+$", row)[1] == "100" for row in rows] == [False, False, True]
    dense = re.fullmatch(r"dense, all keys +\S+ +\S+ +(\S+) +100% +\S+", rows[-1])[1]
    assert f"compressed entries, each of several tokens: {dense} keys for 225.5 tokens of context." in out


def test_wrong_calls(tmp_path, error):
    (tmp_path / "short").write_text("a" * 50)
    (tmp_path / "empty").touch()
    (tmp_path / "one").write_text("a")
    (tmp_path / "binary").write_bytes(b"\xff")
    for options, problem in [
        (
            ["--text", tmp_path / "none"],
            f"--text: must be a readable file, got {tmp_path}/none: No such file or directory",
        ),
        (["--text", tmp_path / "binary"], rf"--text {tmp_path}/binary: must be UTF-8, got b'\xff'"),
        (
            ["--text", tmp_path / "empty"],
            f"--text: must have at least 2 tokens to predict, got {tmp_path}/empty with 0",
        ),
        (["--text", tmp_path / "one"], f"--text: must have at least 2 tokens to predict, got {tmp_path}/one with 1"),
        (
            ["--text", tmp_path / "short", "--length", 51],
            "--length: must be at most 50, the shorter of the model's context of 2048 tokens and the text's 50, got 51",
        ),
        (
            ["--length", 200, "--max-tokens", 199],
            "--max-tokens: must be at least the 200 of --length, one sequence, got 199",
        ),
        (["--length", 1], "argument --length: must be at least 2, got 1 (see dsa compare --help)"),
        (["--max-tokens", 1], "argument --max-tokens: must be at least 2, got 1 (see dsa compare --help)"),
        (["--max-tokens", "x"], "argument --max-tokens: must be an integer, got 'x' (see dsa compare --help)"),
        (["--device", "tpu"], "--device: must be cpu, cuda or cuda:N, got 'tpu'"),
        (["nowhere"], "nowhere: no such directory; a checkpoint holds config.json and safetensors"),
    ]:
        assert compare(*options) == 2
        assert error() in (f"dsa compare: {problem}", problem)
