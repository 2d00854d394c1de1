"""Damaged files, wrong indexes and other tools' files are refused with one error."""

import os
import re

import pytest
import torch

from dsa_layers.errors import CheckpointError, ConfigError
from dsa_layers.io.directory import INDEX_NAME, SINGLE_NAME, Checkpoint
from dsa_layers.models.family import read_config
from tests.layers.io.stand_ins import LFS_POINTER, write

FIRST = {"a": torch.ones(2, 3).bfloat16(), "b": torch.zeros(4, dtype=torch.int8)}
SECOND = {"c": torch.ones(5)}
MISSING_FILES = {"weight_map": {str(i): f"{i}.st" for i in range(1000)}}


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def replaced_by_link(path):
    path.unlink()
    path.symlink_to("nowhere")


def replaced_by_pipe(path):  # opening a pipe would block
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda p: p.unlink(), f"2.st: missing, though {INDEX_NAME} lists it"),
        (cut, "2.st: not a safetensors file, or cut short at "),
        (lambda p: os.truncate(p, 3), "2.st: not a safetensors file, or cut short at "),
        (lambda p: p.write_bytes(p.read_bytes() + b"x"), "file not fully covered"),
        (lambda p: p.write_bytes(b"<!DOCTYPE html><html>" * 100), "header too large"),
        (lambda p: p.write_bytes(LFS_POINTER), "2.st: is a git-LFS pointer in place of the file"),
        (replaced_by_link, f"2.st: missing, though {INDEX_NAME} lists it"),
        (replaced_by_pipe, "2.st: must be a file"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, damage, expected):
    write(tmp_path, FIRST, SECOND)
    Checkpoint(tmp_path)
    damage(tmp_path / "2.st")
    told = f"^{re.escape(str(tmp_path))}: 1 problem, nothing was loaded:\n  .*{re.escape(expected)}"
    with pytest.raises(CheckpointError, match=told):
        Checkpoint(tmp_path)


def test_every_damaged_file_is_named(tmp_path):
    write(tmp_path, FIRST, SECOND, {"z": torch.ones(3)})
    cut(tmp_path / "1.st")
    (tmp_path / "3.st").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)2 problems.*1\.st: not a safetensors file.*3\.st: missing"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ({"weight_map": {"a": "../1.st"}}, "the file '../1.st'; accepted: the name of a file in this directory"),
        ({"weight_map": {"a": 1}}, "weight_map gives 'a' the file 1; accepted: the name of a file"),
        ({"weight_map": {"a": "a\0b"}}, "the file 'a\\x00b'; accepted: the name of a file"),
        ({"weight_map": {"a": ".."}}, "..: must be a file"),
        ({"weight_map": ["a"]}, 'expected {"weight_map": {tensor: file, ...}}'),
        ({}, 'expected {"weight_map": {tensor: file, ...}}, got {}'),
        (MISSING_FILES, "998 problems, nothing was loaded:\n  0.st: missing"),
        ("{", "not valid JSON: Expecting property name"),
        ('{"a":' * 100_000, "not valid JSON: maximum recursion depth"),
        (" " * 2**25 + "{}", "accepted: at most 33554432"),
        (LFS_POINTER.decode(), f"{INDEX_NAME}: is a git-LFS pointer"),
    ],
)
def test_an_index_that_is_damaged_or_disagrees_is_refused(tmp_path, index, expected):
    write(tmp_path, FIRST, SECOND, index=index)
    with pytest.raises(CheckpointError, match=re.escape(expected)) as error:
        Checkpoint(tmp_path)
    assert len(str(error.value)) < 4000


def test_a_tensor_in_two_files_is_refused(tmp_path):
    write(tmp_path, FIRST, {"a": torch.zeros(1), **SECOND})
    with pytest.raises(CheckpointError, match=r"1 problem,.*\n  a: in two files, 1\.st and 2\.st"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("model-Q4_K_M.gguf", "model-Q4_K_M.gguf is GGUF"),
        ("pytorch_model-00001-of-00002.bin", "PyTorch's pickled files"),
        ("consolidated-00001-of-00002.safetensors", "Mistral's consolidated files"),
        ("adapter_config.json", "an adapter (LoRA) and no model"),
        ("model0-mp8.safetensors", "DeepSeek's own inference code"),
    ],
)
def test_the_files_of_another_tool_are_named_in_one_line(tmp_path, file, said):
    (tmp_path / file).touch()
    for refused, error in ((Checkpoint, CheckpointError), (read_config, ConfigError)):
        with pytest.raises(error) as caught:
            refused(tmp_path)
        message = str(caught.value)
        assert said in message and "accepted: Hugging Face's safetensors" in message and "\n" not in message


def test_a_directory_needs_one_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=f"must hold either {INDEX_NAME} or {SINGLE_NAME}, got neither$"):
        Checkpoint(tmp_path)
    for name in (SINGLE_NAME, INDEX_NAME):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"got both$"):
        Checkpoint(tmp_path)
