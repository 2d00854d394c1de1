"""The `dsa` command, run in this process: what it prints, where, and with which exit code; test_generate has
`dsa generate`, test_compare `dsa compare`."""

import errno
import importlib.metadata
import os
import tomllib
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
from safetensors import SafetensorError

import dsa
from dsa_layers.command import health
from dsa_layers.command.main import main
from dsa_layers.io import shards

MANY_JOBS = f"--jobs: must be at most {4 * os.cpu_count()}, 4 for each of {os.cpu_count()} CPUs, got 100000"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([], "required: command"),
        (["train"], "invalid choice: 'train'"),
        (
            ["generate", "x", "--dequant", "--promp", "y"],
            "dsa generate: unrecognized arguments: --dequant --promp y (see dsa generate --help)",
        ),
        (["--promp", "y", "check"], "dsa: argument command: invalid choice: 'y'"),
        (["--promp", "check"], "dsa: unrecognized arguments: --promp (see dsa --help)"),
        (["tiny", "x", "--model", "llama"], "--model: invalid choice: 'llama'"),
        (["generate", "x", "--prompt", "y", "--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["generate", "x", "--prompt", "y", "--top-k", "many"], "--top-k: must be an integer, got 'many'"),
        (["generate", "x", "--prompt", "y", "--temperature", "hot"], "--temperature: must be a number, got 'hot'"),
        (["generate", "x", "--prompt", "y", "--kv-cache", "int4"], "--kv-cache: invalid choice: 'int4'"),
        (["generate", "", "--prompt", "y"], "checkpoint: must not be empty"),
        (["generate", "--prompt", "y", "--logprobs", "1"], "--logprobs: needs --json"),
        (["check", "more"], "unrecognized arguments: more"),
        (["bench"], "required: op"),
        (["tune", "x", "--jobs", "0"], "--jobs: must be at least 1, got 0"),
        (["tune", "x", "--jobs", "100000"], MANY_JOBS),
        (["compile", "--jobs", "100000"], MANY_JOBS),
        (["tiny", ""], "directory: must not be empty"),
        (["tiny", "x", "--seed", "-1"], r"--seed: must be at least 0 and below 2^63, got -1"),
        (["tiny", "x", "--seed", "9" * 30], r"--seed: must be at least 0 and below 2^63, got 999"),
        (["tiny", "x", "--seed", "1.5"], "--seed: must be an integer, got '1.5'"),
    ],
)
def test_wrong_calls(error, arguments, shown):
    assert main(arguments) == 2 and shown in error()


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0 and capsys.readouterr().out == f"dsa {dsa.__version__}\n"
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["version"] == dsa.__version__


def test_version_of_a_checkout_that_is_not_installed(monkeypatch, capsys):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"dsa {dsa.__version__}\n"


def test_warnings_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr(health, "check", lambda seeds: warnings.warn("mind this", stacklevel=1) or True)
    assert main(["check"]) == 0
    assert capsys.readouterr().err == "Warning: mind this\n"


def test_tiny(tmp_path, capsys):
    directory = tmp_path / "new" / "tiny"
    assert main(["tiny", str(directory), "--seed", "3"]) == 0
    assert capsys.readouterr().out == f"wrote {directory}\n"
    first = sorted(directory.glob("*.safetensors"))[0].read_bytes()
    assert main(["tiny", str(directory)]) == 0  # replaces its own
    assert sorted(directory.glob("*.safetensors"))[0].read_bytes() != first
    size = ["--max-tokens", "2", "--cache-tokens", "256", "--device", "cpu"]
    assert main(["generate", str(directory), "--prompt", "a", *size]) == 0


def test_tiny_writes_files_that_the_umask_allows(tmp_path):
    before = os.umask(0o027)
    try:
        assert main(["tiny", str(tmp_path)]) == 0
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


def test_tiny_names_the_file_that_a_full_disk_does_not_take(tmp_path, monkeypatch, error):
    full = OSError(errno.ENOSPC, "No space left on device")  # as `write` raises it
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", Mock(side_effect=full))
        assert main(["tiny", str(tmp_path)]) == 2
    assert error().endswith("/config.json: No space left on device")
    monkeypatch.setattr(shards, "save_file", Mock(side_effect=SafetensorError("No space left")))
    assert main(["tiny", str(tmp_path)]) == 2
    assert error().startswith(f"dsa tiny: {tmp_path}/model-00001-of-") and not (tmp_path / "config.json").exists()


def test_tiny_replaces_nothing_else(tmp_path, error):
    (tmp_path / "thesis.tex").write_text("years of work")
    file = tmp_path / "thesis.tex"
    for directory, problem in [
        (tmp_path, f"{tmp_path}: holds 'thesis.tex', which is not part of a tiny checkpoint"),
        (file, f"directory: must be a directory, got the file {file}"),
        (file / "within", f"{file / 'within'}: Not a directory"),
    ]:
        assert main(["tiny", str(directory)]) == 2
        assert error().startswith(f"dsa tiny: {problem}")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
