"""Tests of `dsa compare`: its figures, the sequences that it makes of a text, and its error messages."""

import json
import math
import re
from pathlib import Path

import pytest

from dsa_layers import SHIPPED_MODEL, Tokenizer, read_config
from dsa_layers.command import compare as command
from dsa_layers.command.main import main
from dsa_layers.command.parser import HELD_OUT_TEXT, make_parser


def compare(*options):
    return main(["compare", "--device", "cpu", *map(str, options)])


def measured(capsys):
    start, *rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return start, {row["attention"]: row for row in rows}


def test_the_indexers_keys_lose_little_and_the_latest_keys_lose_much(capsys):
    assert compare("--json", "--length", 1024, "--max-tokens", 1024) == 0
    start, rows = measured(capsys)
    place = {"checkpoint": str(SHIPPED_MODEL), "device": "cpu", "backend": "reference", "dequantized": True}
    shape = {"text": str(HELD_OUT_TEXT), "sequences": 1, "length": 1024, "index_topk": 128}
    assert start == {"event": "start"} | place | shape
    assert list(rows) == ["sparse", "latest", "dense"]
    contexts = range(1, 1025)
    read, context = (sum(values) / 1024 for values in ([min(n, 128) for n in contexts], contexts))
    for name in ("sparse", "latest"):
        wanted = {"read": read, "dense": context, "context": context, "share": read / context}
        assert {key: rows[name][key] for key in wanted} == pytest.approx(wanted)
    assert (rows["dense"]["read"], rows["dense"]["share"]) == (context, 1)
    loss = {name: row["loss"] for name, row in rows.items()}
    assert loss["sparse"] == pytest.approx(loss["dense"], abs=0.02)
    assert loss["latest"] > loss["dense"] + 0.05
    for row in rows.values():
        assert row["tokens"] == 1024 and row["seconds"] > 0
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))


def test_the_table_is_aligned_and_documented(capsys):
    assert compare("--length", 100, "--max-tokens", 250) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"{HELD_OUT_TEXT}: 2 x 100 tokens"
    head, *rows = lines[3:7]
    assert head in (Path(__file__).parents[3] / "docs" / "reference" / "cli.md").read_text().splitlines()
    ends = [match.end() for match in re.finditer(r"loss|perplexity|keys read a token|of dense|seconds", head)]
    for row, name in zip(rows, ("sparse, top 128", "the latest 128", "dense, all keys"), strict=True):
        assert row.startswith(f"{name} ") and row.removeprefix(name).split()[2:4] == ["50.5", "100%"], row
        assert [match.end() for match in re.finditer(r"\S+", row)][-5:] == ends
    assert lines[-1].startswith("All read the same keys: a token selects 128, and sequences of 100 tokens have no more")


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ("--max-tokens 2", (1, 2)),
        ("--max-tokens 100 --length 33", (3, 33)),
        ("--max-tokens 100 --length 133", (1, 133)),
        ("--max-tokens 5000", (2, 2048)),
        ("", (2, 2048)),
    ],
)
def test_options_limit_the_number_and_length_of_sequences(options, shape):
    args = make_parser().parse_args(["compare", *options.split()])
    config, tokenizer = read_config(SHIPPED_MODEL), Tokenizer(SHIPPED_MODEL)
    sequences, length = command.pieces(args, config, tokenizer, HELD_OUT_TEXT.read_text())
    assert (len(sequences), length) == shape and {len(tokens) for tokens in sequences} == {length + 1}


@pytest.mark.slow
def test_dense_attention_reads_the_whole_cache_of_every_family(directory, capsys):
    assert compare(directory, "--json", "--length", 450, "--max-tokens", 450, "--prefill-chunk", 128) == 0
    _, rows = measured(capsys)
    assert all(math.isfinite(row["loss"]) for row in rows.values())
    assert rows["sparse"]["loss"] != rows["dense"]["loss"] != rows["latest"]["loss"]
    assert rows["dense"]["share"] == 1 > rows["sparse"]["share"]
    assert rows["sparse"]["read"] == rows["latest"]["read"] < rows["dense"]["read"] <= rows["dense"]["context"] == 225.5


def test_wrong_texts_and_lengths_are_named(tmp_path, error):
    (tmp_path / "short").write_text("a" * 50)
    (tmp_path / "one").write_text("a")
    (tmp_path / "binary").write_bytes(b"\xff")
    shortest = "the shorter of the model's context of 2048 tokens and the text's 50"
    for options, problem in [
        (["--text", tmp_path / "none"], f"{tmp_path}/none: No such file or directory"),
        (["--text", tmp_path / "binary"], rf"--text {tmp_path}/binary: must be UTF-8, got b'\xff'"),
        (["--text", tmp_path / "one"], f"--text: must have at least 2 tokens to predict, got {tmp_path}/one with 1"),
        (["--text", tmp_path / "short", "--length", 51], f"--length: must be at most 50, {shortest}, got 51"),
    ]:
        assert compare(*options) == 2
        assert error() == f"dsa compare: {problem}"
