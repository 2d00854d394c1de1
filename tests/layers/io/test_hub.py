"""Hub ids in place of directories. The tests fill the cache folder themselves and use no network."""

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
from dsa_layers.io.directory import INDEX_NAME, checkpoint_directory

ID = "dsa-test/tiny_model.1"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def fill(cache: Path, checkpoint: Path) -> Path:
    """Link the checkpoint's files into `cache` as huggingface_hub does. Return the folder with the links."""
    model = cache / f"models--{ID.replace('/', '--')}"
    snapshot = model / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    for path in checkpoint.iterdir():
        (snapshot / path.name).symlink_to(path)
    return snapshot


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder for huggingface_hub, which is offline. The working directory is tmp_path."""
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


def test_a_directory_goes_before_an_id(cache, checkpoint, tmp_path):
    fill(cache, checkpoint)
    (tmp_path / ID).mkdir(parents=True)
    assert checkpoint_directory(ID) == Path(ID)
    assert checkpoint_directory(SHIPPED_MODEL) == SHIPPED_MODEL


@pytest.mark.parametrize("name", ["nowhere", "a/b/c", "./a/b", "/a/b", "../b", "a b/c", "a/b@main", "ä/b", "~/b"])
def test_a_missing_path_that_is_no_id_is_not_looked_for_on_the_hub(cache, name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(CheckpointError, match=r"no such directory; accepted: a directory with config\.json and "):
        checkpoint_directory(name)


def test_without_the_extra_a_line_says_what_to_install(cache, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["generate", ID, "--prompt", "a"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"dsa generate: {ID}: no such directory; to find it on the hub, pip install 'dsa-kernels[hub]'"


LONG = f"dsa-test/{'x' * 100}"


@pytest.mark.parametrize(("name", "problem"), [(ID, "LocalEntryNotFoundError"), (LONG, "HFValidationError")])
@pytest.mark.parametrize("command", [["generate", "--prompt=a"], ["compare"], ["compile", "--model"]])
def test_an_id_that_is_not_there_is_one_line(cache, name, problem, command, capsys):
    assert main([*command, name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"dsa {command[0]}: {name}: no such directory; the hub does not give it: {problem}: ")


def test_files_at_the_top_of_the_repository_are_downloaded_except_other_formats(cache, monkeypatch, tmp_path):
    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: asked.update(options) or tmp_path)
    names = ["config.json", INDEX_NAME, "chat_template.jinja", "hf_quant_config.json", "tokenizer.json"]
    shards, others = ["model-1-of-2.safetensors"], ["consolidated.safetensors", "original/a.safetensors", "a.bin"]

    def downloaded():
        return sorted(huggingface_hub.utils.filter_repo_objects([*names, *shards, *others], **asked))

    assert checkpoint_directory(ID) == tmp_path and downloaded() == sorted(names + shards)
    assert checkpoint_directory(ID, weights=False) == tmp_path and downloaded() == sorted(names)
