"""What is wrong with the files themselves: each refusal is one error that names the file, before anything is read."""

import json
import os
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from dsa_layers.errors import CheckpointError
from dsa_layers.io.directory import INDEX_NAME, SINGLE_NAME, Checkpoint
from tests.layers.io.damage import LFS_POINTER, damaged, examples, torn, write_safetensors
from tests.layers.io.stand_ins import write

FIRST = {"a": torch.ones(2, 3).bfloat16(), "b": torch.zeros(4, dtype=torch.int8)}
SECOND = {"c": torch.ones(5)}


def edit_header(path, change):
    """Lets `change` alter the header, keeping the data."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    header = json.dumps(header).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


def truncate(path, size):
    os.truncate(path, path.stat().st_size + size if size < 0 else size)


def replaced_by_link(path):
    path.unlink()
    path.symlink_to("nowhere")


def replaced_by_pipe(path):
    path.unlink()
    os.mkfifo(path)  # opening it would wait for a writer


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda p: p.unlink(), f"2.st: missing, though {INDEX_NAME} lists it"),
        (lambda p: truncate(p, -1), "2.st: not a safetensors file, or cut short at "),
        (lambda p: truncate(p, 20), "2.st: not a safetensors file, or cut short at "),
        (lambda p: truncate(p, 3), "2.st: not a safetensors file, or cut short at "),
        (lambda p: p.write_bytes(p.read_bytes() + b"x"), "file not fully covered"),
        (lambda p: p.write_bytes((5).to_bytes(8, "little") + b"hello"), "invalid JSON"),
        (lambda p: p.write_bytes((2**62).to_bytes(8, "little") + b"{}"), "header too large"),
        (lambda p: p.write_bytes(b"<!DOCTYPE html><html>" * 100), "header too large"),
        (lambda p: p.write_bytes(LFS_POINTER), "2.st: is a git-LFS pointer in place of the file"),
        (lambda p: write_safetensors(p, '{"a":' * 100_000), "2.st: not a safetensors file, or cut short at "),
        (lambda p: edit_header(p, lambda h: h["c"].pop("dtype")), "missing field `dtype`"),
        (lambda p: edit_header(p, lambda h: h["c"].update(shape=[6])), "invalid shape"),
        (lambda p: edit_header(p, lambda h: h["c"].update(shape=[2**62, 4])), "overflow"),
        (replaced_by_link, "2.st: no such file: the link leads nowhere"),
        (replaced_by_pipe, "2.st: cannot be read: it is no regular file"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, damage, expected):
    write(tmp_path, FIRST, SECOND)
    Checkpoint(tmp_path)
    damage(tmp_path / "2.st")
    with pytest.raises(CheckpointError) as error:
        Checkpoint(tmp_path)
    assert str(error.value).startswith(f"{tmp_path}: 1 problem, nothing was loaded:\n  ")
    assert expected in str(error.value)


def test_every_damaged_file_is_named(tmp_path):
    write(tmp_path, FIRST, SECOND, {"z": torch.ones(3)})
    truncate(tmp_path / "1.st", -1)
    (tmp_path / "3.st").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)2 problems.*1\.st: not a safetensors file.*3\.st: missing"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ({"weight_map": {"a": "1.st", "b": "2.st", "c": "1.st"}}, f"1.st: lacks c, which {INDEX_NAME} puts there"),
        ({"weight_map": {"b": "2.st"}}, f"2.st: lacks b, which {INDEX_NAME} puts there"),
        ({"weight_map": {"c": "2.st", "a": "1.st"}}, f"1.st: holds b, which {INDEX_NAME} does not list"),
        ({"weight_map": {"a": "../1.st"}}, "the file '../1.st'; accepted: the name of a file in this directory"),
        ({"weight_map": {"a": "/etc/passwd"}}, "the file '/etc/passwd'; accepted: the name of a file in"),
        ({"weight_map": {"a": 1}}, "weight_map gives 'a' the file 1; accepted: the name of a file"),
        ({"weight_map": {"a": "a\0b"}}, "the file 'a\\x00b'; accepted: the name of a file"),
        ({"weight_map": {"a": ".."}}, ": cannot be read: it is no regular file"),
        ({"weight_map": ["a"]}, 'expected {"weight_map": {tensor: file, ...}}'),
        ({}, 'expected {"weight_map": {tensor: file, ...}}, got {}'),
        (
            {"weight_map": {str(i): f"{i}.st" for i in range(1000)}},
            "1003 problems, nothing was loaded:\n  0.st: missing",
        ),
        ("{", "not valid JSON: Expecting property name"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("[" + "[]," * 10**6, "holds too many values; accepted: at most 1000000"),
        (" " * 2**25 + "{}", "accepted: at most 33554432"),
        (LFS_POINTER.decode(), f"{INDEX_NAME}: is a git-LFS pointer"),
    ],
)
def test_an_index_that_is_damaged_or_disagrees(tmp_path, index, expected):
    write(tmp_path, FIRST, SECOND, index=index)
    with pytest.raises(CheckpointError, match=re.escape(expected)) as error:
        Checkpoint(tmp_path)
    assert len(str(error.value)) < 4000


def test_a_tensor_in_two_files(tmp_path):
    write(tmp_path, FIRST, {"a": torch.zeros(1), **SECOND})
    with pytest.raises(CheckpointError, match=r"1 problem,.*\n  a: in two files, 1\.st and 2\.st"):
        Checkpoint(tmp_path)


def test_too_many_tensors(tmp_path):
    entries = {str(i): {"dtype": "I8", "shape": [0], "data_offsets": [0, 0]} for i in range(2**18 + 1)}
    write_safetensors(tmp_path / SINGLE_NAME, entries)
    with pytest.raises(CheckpointError, match="holds more than 262144 tensors"):
        Checkpoint(tmp_path)


def test_a_directory_needs_one_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path}: holds no {INDEX_NAME} and no {SINGLE_NAME}")):
        Checkpoint(tmp_path)
    (tmp_path / SINGLE_NAME).symlink_to("nowhere")  # a file that was not downloaded
    with pytest.raises(CheckpointError, match="no such file: the link leads nowhere"):
        Checkpoint(tmp_path)
    (tmp_path / INDEX_NAME).symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=f"holds both {INDEX_NAME} and {SINGLE_NAME}"):
        Checkpoint(tmp_path)


# Random damage.


SAVED = save(FIRST | SECOND)
HEADER = SAVED[8 : 8 + int.from_bytes(SAVED[:8], "little")]
INDEX = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(FIRST | SECOND, "1.safetensors")}


def read_all(directory):
    """Read every tensor, or get a CheckpointError from the headers' check."""
    try:
        checkpoint = Checkpoint(directory)
    except CheckpointError as error:
        assert len(str(error)) < 20_000
        return
    for name in checkpoint.tensors:
        assert checkpoint.read(name).nbytes == checkpoint.tensors[name].size


@examples
@given(damaged(json.loads(HEADER)) | torn(HEADER), st.integers(-8, 8) | st.just(0))
def test_damaged_headers(tmp_path, header, shift):
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = max(len(content) + shift, 0)
    (tmp_path / SINGLE_NAME).write_bytes(length.to_bytes(8, "little") + content + SAVED[8 + len(HEADER) :])
    read_all(tmp_path)


@examples
@given(damaged(INDEX) | torn(json.dumps(INDEX).encode()))
def test_damaged_indexes(tmp_path, index):
    (tmp_path / "1.safetensors").write_bytes(SAVED)
    (tmp_path / INDEX_NAME).write_bytes(index if isinstance(index, bytes) else json.dumps(index).encode())
    read_all(tmp_path)
