"""What is wrong with the files themselves. None of it needs a model."""

import json
import os
import re

import pytest
import torch
from safetensors.torch import save_file

from dsa_layers.errors import CheckpointError
from dsa_layers.io.directory import INDEX_NAME, SINGLE_NAME, Checkpoint, StoredNames
from tests.layers.io.stand_ins import failure, like, stand_in, write


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


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda p: p.unlink(), f"missing, though {INDEX_NAME} lists it"),
        (lambda p: truncate(p, -1), "not a safetensors file, or cut short at"),
        (lambda p: truncate(p, 20), "truncated: 20 bytes, its header alone needs"),
        (lambda p: truncate(p, 3), "truncated: 3 bytes"),
        (lambda p: p.write_bytes(p.read_bytes() + b"x"), "file not fully covered"),
        (lambda p: p.write_bytes((5).to_bytes(8, "little") + b"hello"), "invalid JSON"),
        (lambda p: edit_header(p, lambda h: h["norm.weight"].pop("dtype")), "missing field `dtype`"),
        (lambda p: edit_header(p, lambda h: h["norm.weight"].update(shape=[5])), "invalid shape"),
        (lambda p: edit_header(p, lambda h: h.pop("layer.ids")), "invalid offset"),
    ],
)
def test_damaged_file(tmp_path, shards, damage, expected, monkeypatch):
    write(tmp_path, *shards)
    Checkpoint(tmp_path)
    damage(tmp_path / "2.st")
    monkeypatch.setattr(Checkpoint, "read", lambda *arguments, **options: pytest.fail("read before validation"))
    message = failure(stand_in(like({**shards[0], **shards[1]})), tmp_path)
    assert message.startswith(f"{tmp_path}: 1 problem, nothing was loaded:\n  2.st: ")
    assert expected in message


@pytest.mark.parametrize("name", [INDEX_NAME, SINGLE_NAME, "2.st"])
def test_a_link_to_nothing(tmp_path, shards, name):
    """A file that was not fetched is no absent one: without its index a directory would be another checkpoint."""
    if name == INDEX_NAME:
        save_file(shards[0], tmp_path / SINGLE_NAME)
        Checkpoint(tmp_path)
        (tmp_path / name).symlink_to("nowhere")
        with pytest.raises(CheckpointError, match=f"holds both {INDEX_NAME} and {SINGLE_NAME}"):
            Checkpoint(tmp_path)
        (tmp_path / SINGLE_NAME).unlink()
    else:
        if name != SINGLE_NAME:
            write(tmp_path, *shards)
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to("nowhere")
    for read in (Checkpoint, StoredNames.of) if name != "2.st" else (Checkpoint,):
        with pytest.raises(CheckpointError, match=rf"{tmp_path / name}: no such file: the link leads nowhere"):
            read(tmp_path)


def test_every_damaged_file_is_named(tmp_path, shards):
    write(tmp_path, *shards, {"z": torch.ones(3)})
    truncate(tmp_path / "1.st", -1)
    (tmp_path / "3.st").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)2 problems.*1\.st: not a safetensors file.*3\.st: missing"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ({"weight_map": {"a": "1.st", "b": "2.st", "c": "1.st"}}, f"1.st: lacks c, which {INDEX_NAME} puts there"),
        ({"weight_map": {"a": "2.st", "b": "2.st"}}, f"2.st: lacks a, which {INDEX_NAME} puts there; found in no file"),
        ({"weight_map": {"a": "1.st", "b": "1.st", "x": "2.st"}}, "1.st: lacks b"),
        ({"weight_map": {"a": "1.st", "b": "1.st", "x": "2.st"}}, "found in 2.st"),
        ({"weight_map": {"b": "2.st", "c": "1.st"}}, f"1.st: holds a, which {INDEX_NAME} does not list"),
        (
            '{"weight_map": {"a": "1.st", "b": "2.st", "b": "1.st"}}',
            f"{INDEX_NAME}: 'b' is listed twice in one JSON object",
        ),
        ({"weight_map": {"a": "../1.st"}}, "'../1.st' is not the name of a file in this directory"),
        ({"weight_map": ["a"]}, 'expected {"weight_map": {tensor: file, ...}}'),
        ({"weight_map": {"a": 1}}, "weight_map gives a the file 1; accepted: a file's name"),
        ({}, "got the fields []"),
        ("{", "not valid JSON: Expecting property name"),
    ],
)
def test_index_that_disagrees(tmp_path, index, expected):
    write(tmp_path, {"a": torch.ones(1)}, {"b": torch.ones(1)}, index=index)
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        Checkpoint(tmp_path)


def test_tensor_in_two_files(tmp_path):
    write(tmp_path, {"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.zeros(1), "c": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"1 problem,.*\n  a: in two files, 1\.st and 2\.st"):
        Checkpoint(tmp_path)


def test_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path}: holds no {INDEX_NAME} and no {SINGLE_NAME}")):
        Checkpoint(tmp_path)
