"""Commands of the documents that a user runs first, and every Python block of the documents."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.documents import ROOT, python_blocks

README, COMMANDS = ((ROOT / page).read_text() for page in ("README.md", "docs/reference/cli.md"))


def dsa_command(line, directory):
    words = shlex.split(line, comments=True)
    assert words[0] == "dsa"
    command = [sys.executable, "-m", "dsa_layers.command.main", *words[1:]]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(autouse=True)
def _this_checkout(monkeypatch):
    """Commands use this checkout's code, though they run in another folder."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))


def test_check(tmp_path):
    report = dsa_command("dsa check", tmp_path).stdout
    found = dict(re.findall(r"^  (\w+) +(kernel|reference) +[\d.]+ s  ok$", report, re.M))
    assert set(found.values()) == {"kernel"}
    assert report.endswith(f"{len(found)} of {len(found)} ops passed\n")


def test_the_shipped_model_writes(tmp_path):
    (line,) = [line for line in re.findall(r"^dsa generate .*", README, re.M) if "CHECKPOINT" not in line]
    done = dsa_command(line, tmp_path)
    assert done.stdout.strip() and "backend cute" in done.stderr


def test_the_shipped_model_with_sparse_and_dense_attention(tmp_path):
    start, *rows = map(json.loads, dsa_command("dsa compare --json", tmp_path).stdout.splitlines())
    loss = {row["attention"]: row["loss"] for row in rows}
    assert start["backend"] == "cute" and not start["dequantized"]
    assert abs(loss["sparse"] - loss["dense"]) < 0.02 < loss["latest"] - loss["dense"]
    assert rows[0]["read"] < start["index_topk"] < rows[-1]["read"] == (start["length"] + 1) / 2


@pytest.mark.parametrize("name", re.findall(r"^dsa tiny \.([\w-]+)", COMMANDS, re.M))
def test_the_tiny_families(name, tmp_path):
    lines = [line for line in re.findall(r"^dsa (?:tiny|generate) \..*", COMMANDS, re.M) if f" .{name} " in f"{line} "]
    assert [line.split()[1] for line in lines] == ["tiny", "generate"]
    dsa_command(lines[0], tmp_path)
    done = dsa_command(lines[1], tmp_path)
    assert done.stdout and "backend cute" in done.stderr


@pytest.mark.parametrize("model", ["", "deepseek_v32", "glm_moe_dsa", "deepseek_v4"])
def test_what_is_compiled_in_advance_is_all_that_runs(model, tmp_path, monkeypatch):
    """`dsa compile` fills a folder with compiled kernels, without a GPU. Generation with this folder as cache must add
    no kernel."""
    out = tmp_path / "kernels"
    checkpoint = ".tiny" if model else ""
    if model:
        dsa_command(f"dsa tiny .tiny --model {model}", tmp_path)
    with monkeypatch.context() as hidden:
        hidden.setenv("CUDA_VISIBLE_DEVICES", "")
        dsa_command(f"dsa compile {checkpoint and '--model .tiny'} --out {out}", tmp_path)
    compiled = {path.name for path in out.glob("*.o")}
    monkeypatch.setenv("DSA_CACHE_DIR", str(out))
    (tmp_path / "long.txt").write_text("The indexer scores all keys. " * 60)
    short = "--prompt a --prompt 'The lightning indexer scores'"
    for options in (
        "--prompt a",
        short,
        "--prompt-file long.txt",
        f"{short} --prompt-file long.txt --prefill-chunk 300",
    ):
        done = dsa_command(f"dsa generate {checkpoint} --raw {options} --max-tokens 40", tmp_path)
        assert "backend cute" in done.stderr
    assert len(compiled) > 30 and {path.name for path in out.glob("*.o")} == compiled


@pytest.mark.parametrize("block", python_blocks(), ids=lambda block: f"{len(block)} characters")
def test_the_documents_python(block, tmp_path):
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
