"""Modules that only hold tensors, and small checkpoint files, for tests of reading and writing."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsa.cases.case import same_bits
from dsa_layers.errors import CheckpointError
from dsa_layers.io.directory import INDEX_NAME, SINGLE_NAME
from dsa_layers.io.weights import load_weights

FP8, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4302338560\n"


def powers(exponents):
    return (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def stand_in(tensors, buffers=()):
    """Return a tree of modules on the meta device with the tensors {name: (shape, dtype)}. Tensors named in `buffers`
    are buffers, the others parameters."""
    root = torch.nn.Module()
    for name, (shape, dtype) in tensors.items():
        *path, leaf = name.split(".")
        owner = root
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = getattr(owner, part)
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        if name in buffers:
            owner.register_buffer(leaf, tensor)
        else:
            owner.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))
    return root


def like(tensors):
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def loaded(tensors, directory, **options):
    model = stand_in(tensors)
    load_weights(model, directory, progress=False, **options)
    return model


def failure(tensors, directory, **options):
    """Load `directory` into a stand-in, which must fail and leave it on the meta device. Return the error message."""
    model = stand_in(tensors)
    with pytest.raises(CheckpointError) as error:
        load_weights(model, directory, progress=False, **options)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    return str(error.value)


def write(directory, *shards, index=None):
    """Write the shards as 1.st, 2.st, ..., with their index. index: a JSON value or text that replaces their index."""
    weight_map = {}
    for number, tensors in enumerate(shards, start=1):
        save_file(tensors, directory / f"{number}.st")
        weight_map.update(dict.fromkeys(tensors, f"{number}.st"))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map} if index is None else index
    (directory / INDEX_NAME).write_text(index if isinstance(index, str) else json.dumps(index))


def read_tensors(directory):
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def fields_of(directory):
    return json.loads((directory / "config.json").read_text())


def changed(directory, target, change=lambda tensors: None, **fields):
    """Copy the checkpoint in `directory` to `target`, with all tensors in one file, and return `target`. `change`
    modifies the dictionary of tensors; `fields` replace fields of config.json."""
    tensors = read_tensors(directory)
    change(tensors)
    shutil.copytree(directory, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", INDEX_NAME))
    save_file(tensors, target / SINGLE_NAME)
    (target / "config.json").write_text(json.dumps(fields_of(directory) | fields))
    return target


def dropper(*beginnings):
    def drop(tensors):
        for name in [name for name in tensors if name.startswith(beginnings)]:
            del tensors[name]

    return drop


def assert_same_tensors(got, expected):
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(got[name], tensor), name
