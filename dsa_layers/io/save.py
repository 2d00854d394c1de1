"""A model as a checkpoint in its family's published format."""

from os import PathLike

import torch

from dsa.runtime.checks import check_choice
from dsa_layers.arguments import integer, path_of
from dsa_layers.families.fused_experts import split_experts
from dsa_layers.families.model import CheckpointModel
from dsa_layers.io.published_format import (
    STORAGES,
    Storage,
    as_published,
    scales_of,
    shape_of_values,
    storage_manifest,
    stored_as,
    uses_ue8m0,
)
from dsa_layers.io.shards import SHARD_BYTES, Shards, write_shards


def save_model(
    model: CheckpointModel,
    directory: str | PathLike[str],
    *,
    like: str | PathLike[str],
    dtype: Storage = "fp8",
    shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> None:
    """Writes a checkpoint that `load_model` reads: safetensors files with their index, tokenizer and config.json.

    model        of any family, with float weights, of any dtype and on any device
    directory    new or empty, or `like` itself if that has no weights
    like         a directory with the model's config.json, whose tokenizer files are copied
    dtype        "fp8": projections and experts in blocks of 128 x 128, with the scales that `like` has; "fp4": experts
                 in FP4, other projections in FP8; "bf16". What is never quantised is stored as published
    shard_bytes  bytes of a file, at most; at least one tensor is in it

    A model without a drafter is saved without multi-token-prediction layers.
    Raises TypeError or ValueError that names the argument or config.json's field, for a config.json of another model
    too. Then nothing is written.
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

    write_shards(directory, Shards.of(manifest, shard_bytes), make, fields, like=like, progress=progress)
