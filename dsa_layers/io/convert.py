"""A checkpoint with weights in another dtype, from its files to new ones."""

import hashlib
import re
from os import PathLike

import torch

from dsa.runtime.checks import check_choice
from dsa_layers.arguments import integer, path_of
from dsa_layers.families.fused_experts import split_experts
from dsa_layers.families.manifest import SCALE_SUFFIX
from dsa_layers.families.precision import check_device
from dsa_layers.io.directory import Checkpoint, raise_problems
from dsa_layers.io.hub import checkpoint_directory
from dsa_layers.io.plan import Target, make_plan, parts_of_checkpoint
from dsa_layers.io.published_format import (
    STORAGES,
    Storage,
    copied_from,
    scales_of,
    storage_manifest,
    stored_as,
    torch_dtype,
    uses_ue8m0,
)
from dsa_layers.io.shards import SHARD_BYTES, Shards, write_shards
from dsa_layers.io.weights import read_step


def convert_checkpoint(
    source: str | PathLike[str],
    directory: str | PathLike[str],
    dtype: Storage,
    *,
    shard_bytes: int = SHARD_BYTES,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> None:
    """Writes the checkpoint `source` into `directory` with weights in `dtype`, one file at a time.

    source       a checkpoint that `load_model` reads, or a hub id
    directory    one without weights, or one in which the same call was interrupted: its finished files stay
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

    shards = Shards.of(manifest, shard_bytes)
    made_from = hashlib.sha256(checkpoint.digest() + repr((fields, shards.files)).encode()).hexdigest()
    write_shards(directory, shards, make, fields, like=source, made_from=made_from, progress=progress)


def _with_scale_suffix(name: str) -> str:
    """The name of a tensor, in which a scale has one of its two spellings: x.weight_scale_inv, not x.scale."""
    return re.sub(r"\.scale$", f".weight{SCALE_SUFFIX}", name)
