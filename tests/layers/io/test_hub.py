"""Hub ids in the place of directories, with a cache folder that is made here and no network."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from dsa_layers import SHIPPED_MODEL, Tokenizer, load_model
from dsa_layers.command.main import main
from dsa_layers.errors import CheckpointError
from dsa_layers.generation.sampling import sampling_defaults
from dsa_layers.io.directory import INDEX_NAME
from dsa_layers.io.hub import checkpoint_directory

ID = "dsa-test/tiny_model.1"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def fill(cache: Path, checkpoint: Path, leave_out: tuple[str, ...] = ()) -> Path:
    """The checkpoint as huggingface_hub keeps it: links to the files. Returns the folder with the links."""
    model = cache / f"models--{ID.replace('/', '--')}"
    snapshot = model / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    for path in checkpoint.iterdir():
        if path.name not in leave_out:
            (snapshot / path.name).symlink_to(path)
    return snapshot


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The hub's cache, empty, and no hub."""
    directory = tmp_path / "hub"
    directory.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(directory))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return directory


def test_everything_takes_an_id(cache, checkpoint, capsys):
    snapshot = fill(cache, checkpoint)
    assert checkpoint_directory(ID) == checkpoint_directory(Path(ID), weights=False) == snapshot
    model, expected = (load_model(name, dequantize=True, progress=False) for name in (ID, checkpoint))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    assert Tokenizer(ID).encode("def f(") == Tokenizer(checkpoint).encode("def f(")
    assert sampling_defaults(ID) == sampling_defaults(checkpoint)
    options = "--device cpu --prompt a --max-tokens 1 --cache-tokens 64 --temperature 0".split()
    assert main(["generate", ID, *options]) == 0 and capsys.readouterr().out.startswith("a")


@pytest.mark.parametrize("command", ["generate", "plan"])
def test_a_url_is_no_id(command, capsys):
    options = ["--prompt", "x"] if command == "generate" else []
    assert main([command, "https://huggingface.co/deepseek-ai/DeepSeek-V3.2", *options]) == 2
    told = "https:/huggingface.co/deepseek-ai/DeepSeek-V3.2: is a URL; accepted: a directory or a hub id, OWNER/NAME"
    assert capsys.readouterr().err == f"dsa {command}: {told}\n"


def test_a_process_with_the_hubs_own_variables(tmp_path):
    """As a user calls it: HF_HOME, offline."""
    fill(tmp_path / "hub", SHIPPED_MODEL, leave_out=("held_out.txt",))
    command = [sys.executable, "-m", "dsa_layers.command", "generate", ID, "--device", "cpu", "--seed", "1"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_"))}
    done = subprocess.run(
        [*command, "--prompt", "def f(", "--max-tokens", "2", "--cache-tokens", "256"],
        env=environment | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0 and done.stdout.startswith("def f("), done.stderr


def test_a_directory_wins(cache, checkpoint, tmp_path):
    fill(cache, checkpoint)
    (tmp_path / "dsa-test").mkdir()
    (tmp_path / ID).mkdir()
    assert checkpoint_directory(ID) == Path(ID)
    assert checkpoint_directory(SHIPPED_MODEL) == SHIPPED_MODEL


@pytest.mark.parametrize(
    "name", ["nowhere", "a/b/c", "./a/b", "/a/b", "../b", "a/b/", "a b/c", "a/b@main", "ä/b", "~/b"]
)
def test_what_is_no_id_is_a_path(cache, name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    if name != "a/b/":  # which pathlib takes for a/b
        assert checkpoint_directory(name) == Path(name)


def test_without_the_extra_a_line_says_what_to_install(cache, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "huggingface_hub" else find_spec(name)
    )
    assert main(["generate", ID, "--prompt", "a"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"dsa generate: {ID}: no such directory; to find it on the hub, pip install 'dsa-kernels[hub]'"
    assert checkpoint_directory("nowhere") == Path("nowhere")


@pytest.mark.parametrize(
    "name, problem",
    [
        (ID, "the hub's cache does not hold it, and the hub is not reached"),
        ("dsa-test/tiny--model", "it is no hub id: "),
        ("dsa-test/tiny.git", "it is no hub id: "),
        (f"dsa-test/{'x' * 100}", "it is no hub id: "),
    ],
)
def test_an_id_that_is_not_there_is_one_line(cache, name, problem, capsys):
    with pytest.raises(CheckpointError, match=f"^{name}: no such directory; {problem}"):
        load_model(name)
    for command in (["generate", name, "--prompt", "a"], ["compare", name], ["compile", "--model", name]):
        assert main(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"dsa {command[0]}: {name}: no such directory; {problem}"), line


def test_weights_that_the_cache_lacks(cache, checkpoint):
    shards = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    snapshot = fill(cache, checkpoint, leave_out=(shards[0],))
    assert checkpoint_directory(ID, weights=False) == snapshot
    with pytest.raises(CheckpointError, match=rf"{ID}: .* lacks 1 of {len(shards)} weight files, as {shards[0]}"):
        load_model(ID)


def test_ranks_finish_a_download_that_was_interrupted(cache, checkpoint, monkeypatch):
    """What is checked before they start needs no weights."""
    started = []
    monkeypatch.setattr("dsa_layers.parallel.launch.launch", lambda *call: started.append(call) or 0)
    fill(cache, checkpoint, leave_out=(min(path.name for path in checkpoint.glob("*.safetensors")),))
    assert main(["generate", ID, "--device", "cpu", "--gpus", "2", "--prompt", "a"]) == 0 and started


@pytest.mark.parametrize(
    ("index", "message"),
    [
        # A link that leads nowhere: the model is not taken for one without an index.
        (None, f"{INDEX_NAME}: no such file: the link leads nowhere"),
        (b"{", INDEX_NAME),
        (b'{"weight_map": 1}', INDEX_NAME),
        (b'{"weight_map": {"a": "../b"}}', INDEX_NAME),
        (b'{"weight_map": {"a": "*"}}', INDEX_NAME),
    ],
)
def test_a_lost_or_damaged_index_is_the_loaders_to_refuse(cache, checkpoint, index, message):
    path = fill(cache, checkpoint, leave_out=(INDEX_NAME,)) / INDEX_NAME
    path.symlink_to("nowhere") if index is None else path.write_bytes(index)
    with pytest.raises(CheckpointError, match=message):
        load_model(ID)


def test_what_is_downloaded(cache, checkpoint, monkeypatch):
    """First what says which weights there are, then these, of the same commit; and nothing else."""
    snapshot, calls = fill(cache, checkpoint), []

    def download(name, *, revision, allow_patterns):
        calls.append((name, revision, set(allow_patterns)))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    checkpoint_directory(ID)
    shards = {path.name for path in checkpoint.glob("*.safetensors")}
    (first, second) = calls
    assert first[:2] == (ID, None) and second == (ID, COMMIT, shards)
    others = {path.name for path in checkpoint.iterdir()} - shards
    assert others <= first[2] and not any("*" in pattern for pattern in first[2])
