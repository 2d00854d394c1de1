"""Write checkpoints in their family's published format, from a model or from another checkpoint."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm import tqdm

from dsa.runtime.values import check_choice, integer, path_of, shown
from dsa_layers.io.directory import (
    INDEX_NAME,
    SINGLE_NAME,
    Checkpoint,
    bytes_of,
    checkpoint_directory,
    raise_problems,
)
from dsa_layers.io.plan import Target, make_plan, parts_of_checkpoint
from dsa_layers.io.published import (
    STORAGES,
    Manifest,
    Storage,
    as_published,
    copied_from,
    published_manifest,
    scales_of,
    shape_of_values,
    stored_as,
)
from dsa_layers.io.tensors import SCALE_SUFFIX, TORCH_DTYPES, split_experts
from dsa_layers.io.weights import read_step
from dsa_layers.models.precision import check_device
from dsa_layers.models.protocols import CheckpointModel

SHARD_BYTES = 5 * 10**9
PART = ".part"  # suffix of a file that is still being written
# Files that are copied from the source directory, or from the directory `like`.
_COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "LICENSE*")


def save_model(
    model: CheckpointModel,
    directory: str | PathLike[str],
    *,
    like: str | PathLike[str],
    dtype: Storage = "fp8",
    shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> None:
    """Write a checkpoint that `load_model` reads: safetensors files, their index, tokenizer files and config.json.

    model        a model of any family with float weights, of any dtype and on any device
    directory    a directory that does not exist or holds no weights; it may be `like`
    like         a directory with the model's config.json; its tokenizer files are copied
    dtype        "fp8": projections and experts in FP8 with 128 x 128 blocks, and scales in the format that the
                 config.json of `like` names; "fp4": experts in FP4, other projections in FP8; "bf16": all weights in
                 BF16. Tensors that are never quantised keep the family's published dtype
    shard_bytes  maximum bytes per file; a larger tensor has a separate file
    progress     True: show a progress bar on a terminal

    A model without a drafter is saved without multi-token-prediction layers.
    Raises TypeError or ValueError, which names the argument or the field of config.json, also if config.json describes
    another model. No file is written in these cases.
    """
    directory, like = path_of("directory", directory), path_of("like", like)
    check_choice("dtype", dtype, STORAGES)
    integer("shard_bytes", shard_bytes, at_least=1)
    fields, config = stored_as(like, dtype, drafter=model.drafter is not None)
    values: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        places = split_experts(name, tuple(tensor.shape))
        values |= {part: tensor[index] if index else tensor for part, index in places.items()}
    manifest = published_manifest(config, fp4_experts=dtype == "fp4")
    scales = scales_of(manifest)
    for stored in manifest.keys() - {*scales.values()}:
        name, shape = model.name_of(stored), shape_of_values(stored, manifest)
        if name not in values or tuple(values[name].shape) != shape:
            got = list(values[name].shape) if name in values else "none"
            raise ValueError(f"like: by its config.json {stored} has shape {list(shape)}, the model's {got}")

    def make(stored: str) -> dict[str, torch.Tensor]:
        value = values[model.name_of(stored)].detach()
        made = as_published(stored, value, manifest, scales, use_ue8m0=config.use_ue8m0)
        # Clone values that are still the model's memory: a drafter shares the embedding and the head, but safetensors
        # files cannot contain tensors that share memory.
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
    """Convert the checkpoint `source` to weights in `dtype`, and write it to `directory`, one file at a time.

    source       a checkpoint that `load_model` reads, or a hub id
    directory    a directory that does not exist or holds no weights. It may also be the directory of an interrupted
                 call with the same arguments; the call then continues and keeps the finished files
    dtype        "fp8": projections and experts in FP8; "fp4": experts in FP4, other projections in FP8; "bf16": all
                 weights in BF16. A weight that already has this dtype is copied. FP4 is converted to FP8 without loss.
                 Tensors that are never quantised keep the family's published dtype
    shard_bytes  maximum bytes per file; a larger tensor has a separate file. The tensors of one file are in memory
    device       the device that casts weights; None: the GPU if there is one, else the CPU
    progress     True: show a progress bar on a terminal

    config.json describes the new weights and is written last. Tokenizer files are copied.
    Raises ConfigError or CheckpointError if `load_model` would refuse `source`, or if tensors are missing or
    unexpected. Raises ValueError or TypeError, which names the argument, for any other wrong argument. No file is
    written in these cases.
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
    manifest = published_manifest(config, fp4_experts=dtype == "fp4")
    if config.num_nextn_predict_layers:
        without_drafter = stored_as(source, dtype, drafter=False)
        main = published_manifest(without_drafter[1], fp4_experts=dtype == "fp4")
        if not any(name in parts for name in manifest if name not in main):
            (fields, config), manifest = without_drafter, main
    # Omit copies of the embedding and the head that the source does not contain: no loader reads these copies.
    manifest = {name: entry for name, entry in manifest.items() if name in parts or copied_from(name) is None}
    published = {weight + SCALE_SUFFIX: scale for weight, scale in scales_of(manifest).items()}
    names = {scale: name for name, scale in published.items()}
    wanted = {}
    for name, (shape, stored) in manifest.items():
        target = names.get(name, name)
        wanted[target] = Target(target, (), shape, TORCH_DTYPES[stored])
    steps = make_plan(wanted, parts, problems, use_ue8m0=config.use_ue8m0)
    raise_problems(source, problems)
    step_of = {step.target.name: step for step in steps}

    def make(name: str) -> dict[str, torch.Tensor]:
        made = read_step(checkpoint, step_of[name], device)
        return {published.get(target, target): tensor.cpu() for target, tensor in made.items()}

    files = split_into_files(manifest, shard_bytes)
    made_from = hashlib.sha256(checkpoint.digest() + repr((fields, files)).encode()).hexdigest()
    write_shards(directory, manifest, files, make, fields, like=source, made_from=made_from, progress=progress)


def _with_scale_suffix(name: str) -> str:
    """Return a tensor's name with the spelling x.weight_scale_inv for scales. Some families spell it x.scale."""
    return re.sub(r"\.scale$", f".weight{SCALE_SUFFIX}", name)


def split_into_files(manifest: Manifest, most: int = SHARD_BYTES) -> dict[str, list[str]]:
    """Return {file name: the names of its tensors}. A file has at most `most` bytes, or contains only one tensor. A
    weight and its scale are in the same file and count as one tensor."""
    scales = scales_of(manifest)
    of_weights = {*scales.values()}
    groups: list[list[str]] = []
    filled = most
    for name in manifest:
        if name in of_weights:
            continue
        names = [name, scales[name]] if name in scales else [name]
        size = _size(manifest, names)
        if filled + size > most:
            groups.append([])
            filled = 0
        groups[-1] += names
        filled += size
    count = len(groups)
    if count == 1:
        return {SINGLE_NAME: groups[0]}
    return {f"model-{i:05d}-of-{count:05d}.safetensors": group for i, group in enumerate(groups, start=1)}


def write_shards(
    directory: Path,
    manifest: Manifest,
    files: Mapping[str, Sequence[str]],
    make: Callable[[str], dict[str, torch.Tensor]],
    fields: Mapping[str, Any],
    *,
    like: Path,
    made_from: str = "",
    progress: bool = True,
) -> None:
    """Write a checkpoint into `directory`: the index if there are several files, the safetensors files, the tokenizer
    files and config.json. config.json is written last, so a directory that contains it is complete.

    manifest   the tensors of the checkpoint
    files      {file name: the names of its tensors} (`split_into_files`)
    make       a function from a weight's name to {name: tensor} of the weight and, if it is quantised, its scale
    fields     the fields of config.json
    like       the directory whose tokenizer files are copied
    made_from  an identifier of the tensors' source, stored in the index; "": no identifier. If the directory's index
               already has this identifier, existing files are kept, so an interrupted call can be repeated
    progress   True: show a progress bar on a terminal

    Only the tensors of one file are in memory at a time.
    Raises ValueError if the directory holds other weights.
    """
    directory.mkdir(parents=True, exist_ok=True)
    present = {path.name for path in directory.glob("*.safetensors")}
    done = present & files_made_from(directory, made_from) if made_from else set()
    if others := sorted(present - done):
        raise ValueError(
            f"directory: must hold no weights, unless the same call was interrupted, got {directory} with "
            f"{shown(others[0])}"
        )
    sizes = {file: _size(manifest, names) for file, names in files.items() if file not in done}
    if len(files) > 1:
        metadata = {"total_size": _size(manifest, manifest)} | ({"made_from": made_from} if made_from else {})
        weight_map = {name: file for file, names in files.items() for name in names}
        write_json(directory / INDEX_NAME, {"metadata": metadata, "weight_map": weight_map})
    else:
        (directory / INDEX_NAME).unlink(missing_ok=True)  # remove the stale index of weights that no longer exist
    scales = {*scales_of(manifest).values()}
    with tqdm(
        total=sum(sizes.values()), unit="B", unit_scale=True, desc="Writing", disable=None if progress else True
    ) as bar:
        for file in sizes:
            tensors: dict[str, torch.Tensor] = {}
            for name in files[file]:
                tensors |= {} if name in scales else make(name)
                bar.update(_size(manifest, [name]))
            save_tensors(directory / file, tensors)
    if like.resolve() != directory.resolve():
        for path in (path for pattern in _COPIED for path in like.glob(pattern)):
            shutil.copyfile(path, directory / path.name)
    write_json(directory / "config.json", fields)


def files_made_from(directory: Path, made_from: str) -> set[str]:
    """Return the file names in the index if the index has the identifier `made_from` (`write_shards`), else an empty
    set."""
    try:
        index = json.loads((directory / INDEX_NAME).read_bytes())
        return set(index["weight_map"].values()) if index["metadata"]["made_from"] == made_from else set()
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def save_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file under a temporary name, and rename it once it is complete. The file has the default
    permissions of a new file; the safetensors library would set other permissions."""
    part = path.with_name(path.name + PART)
    part.touch()
    mode = part.stat().st_mode
    try:
        save_file(tensors, part, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from None
    part.chmod(mode)
    os.replace(part, path)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _size(manifest: Manifest, names: Iterable[str]) -> int:
    shapes = (manifest[name] for name in names)
    return sum(bytes_of(dtype, shape) for shape, dtype in shapes)
