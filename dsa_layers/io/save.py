"""Checkpoints in their family's published format, made of a model or of another checkpoint."""

import hashlib
import re
from os import PathLike

import torch

from dsa.runtime.checks import check_choice
from dsa_layers.arguments import integer, path_of
from dsa_layers.io.directory import Checkpoint, raise_problems
from dsa_layers.io.fused_experts import split_experts
from dsa_layers.io.hub import checkpoint_directory
from dsa_layers.io.manifest import SCALE_SUFFIX
from dsa_layers.io.plan import Target, make_plan, parts_of_checkpoint
from dsa_layers.io.published_format import (
    STORAGES,
    Storage,
    as_published,
    copied_from,
    scales_of,
    shape_of_values,
    storage_manifest,
    stored_as,
    torch_dtype,
    uses_ue8m0,
)
from dsa_layers.io.shards import SHARD_BYTES, split_into_files, write_shards
from dsa_layers.io.weights import read_step
from dsa_layers.models.precision import check_device
from dsa_layers.models.protocols import CheckpointModel


def save_model(
    model: CheckpointModel,
    directory: str | PathLike[str],
    *,
    like: str | PathLike[str],
    dtype: Storage = "fp8",
    shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> None:
    """Write a checkpoint that `load_model` reads: safetensors files with their index, tokenizer and config.json.

    model        of any family, with float weights, of any dtype and on any device
    directory    new or without weights; it may be `like`
    like         a directory with the model's config.json, whose tokenizer files are copied
    dtype        "fp8": projections and experts in blocks of 128 x 128, with the scales that `like` has; "fp4": experts
                 in FP4, other projections in FP8; "bf16". Tensors that are never quantised get the dtype that the
                 family publishes them in
    shard_bytes  bytes of a file, at most; at least one tensor is in it

    A model without a drafter is saved without multi-token-prediction layers.
    Raises TypeError or ValueError that names the argument or config.json's field, also for a config.json of another
    model. Then nothing is written.
    """
    directory, like = path_of("directory", directory), path_of("like", like)
    check_choice("dtype", dtype, STORAGES)
    integer("shard_bytes", shard_bytes, at_least=1)
    fields, config = stored_as(like, dtype, drafter=model.drafter is not None)
    values: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        places = split_experts(name, tuple(tensor.shape))
        values |= {part: tensor[index] if index else tensor for part, index in places.items()}
    manifest = storage_manifest(config, dtype)
    scales = scales_of(manifest)
    for stored in manifest.keys() - {*scales.values()}:
        name, shape = model.name_of(stored), shape_of_values(stored, manifest)
        if name not in values or tuple(values[name].shape) != shape:
            got = list(values[name].shape) if name in values else "none"
            raise ValueError(f"like: by its config.json {stored} has shape {list(shape)}, the model's {got}")

    def make(stored: str) -> dict[str, torch.Tensor]:
        value = values[model.name_of(stored)].detach()
        made = as_published(stored, value, manifest, scales, use_ue8m0=uses_ue8m0(config))
        # A drafter shares the embedding and the head; a file does not.
        return {name: x.cpu() if x.data_ptr() != value.data_ptr() else x.cpu().clone() for name, x in made.items()}

    files = split_into_files(manifest, shard_bytes)
    write_shards(directory, manifest, files, make, fields, like=like, progress=progress)


def convert_checkpoint(
    source: str | PathLike[str],
    directory: str | PathLike[str],
    dtype: Storage,
    *,
    shard_bytes: int = SHARD_BYTES,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> None:
    """Write the checkpoint `source` into `directory` with weights in `dtype`, one file at a time.

    source       a checkpoint that `load_model` reads, or a hub id
    directory    new or without weights, or one in which the same call was interrupted: its finished files stay
    dtype        "fp8": projections and experts in FP8; "fp4": experts in FP4, other projections in FP8; "bf16". A
                 weight that has this dtype is copied, and FP4 becomes FP8 without loss. Tensors that are never
                 quantised get the dtype that the family publishes them in
    shard_bytes  bytes of a file, at most; at least one tensor is in it, and in memory
    device       where weights are cast; None: the GPU where there is one, else the CPU

    config.json describes the new weights, and is written last. Tokenizer files are copied.
    Raises ConfigError or CheckpointError for what `load_model` would refuse, for tensors that are missing or
    unexpected, and ValueError or TypeError that names any other argument. Then nothing is written.
    """
    directory = path_of("directory", directory)
    check_choice("dtype", dtype, STORAGES)
    integer("shard_bytes", shard_bytes, at_least=1)
    device = check_device(device)
    source = checkpoint_directory(source)
    if source.resolve() == directory.resolve():
        raise ValueError(f"directory: must be another one than the checkpoint's, got {directory}")
    checkpoint = Checkpoint(source)
    problems: list[str] = []
    parts = parts_of_checkpoint(checkpoint, problems, lambda name: False, _with_scale_suffix, split_experts)
    fields, config = stored_as(source, dtype, drafter=True)
    manifest = storage_manifest(config, dtype)
    if config.num_nextn_predict_layers:
        without_drafter = stored_as(source, dtype, drafter=False)
        main = storage_manifest(without_drafter[1], dtype)
        if not any(name in parts for name in manifest if name not in main):
            (fields, config), manifest = without_drafter, main
    # Nothing reads the copies of the embedding and the head, and some checkpoints do not have them.
    manifest = {name: entry for name, entry in manifest.items() if name in parts or copied_from(name) is None}
    published = {weight + SCALE_SUFFIX: scale for weight, scale in scales_of(manifest).items()}
    names = {scale: name for name, scale in published.items()}
    wanted = {}
    for name, (shape, stored) in manifest.items():
        target = names.get(name, name)
        wanted[target] = Target.of(target, (), shape, torch_dtype(stored))
    steps = make_plan(wanted, parts, problems, use_ue8m0=uses_ue8m0(config))
    raise_problems(source, problems)
    step_of = {step.target.name: step for step in steps}

    def make(name: str) -> dict[str, torch.Tensor]:
        made = read_step(checkpoint, step_of[name], device)
        return {published.get(target, target): tensor.cpu() for target, tensor in made.items()}

    files = split_into_files(manifest, shard_bytes)
    made_from = hashlib.sha256(checkpoint.digest() + repr((fields, files)).encode()).hexdigest()
    write_shards(directory, manifest, files, make, fields, like=source, made_from=made_from, progress=progress)


def _with_scale_suffix(name: str) -> str:
    """The name of a tensor, in which a scale has one of its two spellings: x.weight_scale_inv, not x.scale."""
    return re.sub(r"\.scale$", f".weight{SCALE_SUFFIX}", name)
