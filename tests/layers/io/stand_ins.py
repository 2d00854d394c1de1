"""Modules that only hold tensors, and small or changed checkpoints, for tests of reading and writing."""

import json
import shutil
from dataclasses import replace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsa.cases.case import same_bits
from dsa_layers import tiny
from dsa_layers.errors import CheckpointError
from dsa_layers.io.directory import INDEX_NAME, SINGLE_NAME
from dsa_layers.io.weights import load_weights
from dsa_layers.models.family import family

FP8, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4302338560\n"


def powers(exponents):
    return (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def stand_in(tensors, buffers=()):
    """Return modules on the meta device. tensors: {name: (shape, dtype)}; those named in `buffers` are buffers."""
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


def loaded(tensors, directory, stored=None, **options):
    """Load `directory` into a stand-in and return it. stored: tensors to write to `directory` before."""
    if stored is not None:
        save_file(stored, directory / SINGLE_NAME)
    model = stand_in(tensors)
    load_weights(model, directory, progress=False, **options)
    return model


def failure(tensors, directory, stored=None, **options):
    """Load as `loaded` does. This must fail and leave the stand-in on the meta device. Return the error message."""
    if stored is not None:
        save_file(stored, directory / SINGLE_NAME)
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
    """Copy a checkpoint to `target` with changed tensors, all in one file, and changed fields of config.json."""
    tensors = read_tensors(directory)
    change(tensors)
    shutil.copytree(directory, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", INDEX_NAME))
    save_file(tensors, target / SINGLE_NAME)
    (target / "config.json").write_text(json.dumps(fields_of(directory) | fields))
    return target


def write_changed_tiny(directory, model, quantized=True, **changes):
    """Write a tiny checkpoint with other fields in config.json to `directory`, and return `directory`."""
    of_family = family(model)
    of_family = replace(of_family, tiny=replace(of_family.tiny, changes=of_family.tiny.changes | changes))
    with mock.patch.object(tiny, "family", lambda _: of_family):
        tiny.write_tiny_checkpoint(directory, model=model, quantized=quantized)
    return directory


def fuse_experts(tensors):
    """Put the experts of each layer into two tensors, as transformers' modules hold them."""
    for layer in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        gate, up, down = (
            torch.stack([tensors.pop(f"{layer}.experts.{e}.{part}_proj.weight") for e in range(8)])
            for part in ("gate", "up", "down")
        )
        tensors[f"{layer}.experts.gate_up_proj"] = torch.cat((gate, up), 1)
        tensors[f"{layer}.experts.down_proj"] = down


def dropper(*beginnings):
    def drop(tensors):
        for name in [name for name in tensors if name.startswith(beginnings)]:
            del tensors[name]

    return drop


def assert_same_tensors(got, expected):
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(got[name], tensor), name
