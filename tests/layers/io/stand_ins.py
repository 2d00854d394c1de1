"""Models and files that stand in for those of a checkpoint."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsa_layers.errors import CheckpointError
from dsa_layers.io.directory import INDEX_NAME, SINGLE_NAME
from dsa_layers.io.weights import load_weights

FP8, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
E8M0 = torch.float8_e8m0fnu
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4302338560\n"


def powers(exponents):
    return (exponents + 127).to(torch.uint8).view(E8M0)


def stand_in(tensors, buffers=()):
    """A module tree on the meta device with a tensor of the given (shape, dtype) under each name."""
    root = torch.nn.Module()
    modules = {"": root}
    for name, (shape, dtype) in tensors.items():
        *path, leaf = name.split(".")
        for depth in range(len(path)):
            here = ".".join(path[: depth + 1])
            if here not in modules:
                modules[here] = torch.nn.Module()
                modules[".".join(path[:depth])].add_module(path[depth], modules[here])
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        owner = modules[".".join(path)]
        if name in buffers:
            owner.register_buffer(leaf, tensor)
        else:
            owner.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))
    return root


def like(tensors):
    """The (shape, dtype) of each tensor, for `stand_in`."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def write(directory, *shards, index=None):
    """Writes the shards as 1.st, 2.st, ... and their index, or the given one."""
    weight_map = {}
    for number, tensors in enumerate(shards, start=1):
        save_file(tensors, directory / f"{number}.st")
        weight_map.update(dict.fromkeys(tensors, f"{number}.st"))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map} if index is None else index
    (directory / INDEX_NAME).write_text(index if isinstance(index, str) else json.dumps(index))


def all_meta(model):
    return all(tensor.is_meta for tensor in model.state_dict().values())


def failure(model, directory, **options):
    """The message with which a load fails, having left the model as it was."""
    with pytest.raises(CheckpointError) as error:
        load_weights(model, directory, progress=False, **options)
    assert all_meta(model)
    return str(error.value)


def read_tensors(directory):
    """{name: tensor} of all the checkpoint's files."""
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def changed(directory, target, change, **fields):
    """Write to `target` the checkpoint with `change` made to the dictionary of its tensors, in a single file, and
    with these fields of config.json."""
    tensors = read_tensors(directory)
    change(tensors)
    shutil.copytree(directory, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", INDEX_NAME))
    save_file(tensors, target / SINGLE_NAME)
    config = json.loads((directory / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | fields))
    return target
