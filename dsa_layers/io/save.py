"""Write checkpoints in their family's published format, from a model or from another checkpoint."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm import tqdm

from dsa.runtime.checks import check_choice, integer, path_of, shown
from dsa_layers.io.directory import INDEX_NAME, SINGLE_NAME, Checkpoint, checkpoint_directory, raise_problems
from dsa_layers.io.loading import unfilled_model
from dsa_layers.io.published import (
    STORAGES,
    Manifest,
    Storage,
    copied_from,
    published_manifest,
    scales_of,
    stored_as,
    with_scale_suffix,
)
from dsa_layers.io.tensors import DTYPES, TensorInfo, split_experts
from dsa_layers.io.weights import Part, Step, make_plan, parts_of_checkpoint, read_step
from dsa_layers.models.family import read_config
from dsa_layers.models.precision import Precision, check_device
from dsa_layers.models.protocols import CheckpointModel

SHARD_BYTES = 5 * 10**9
PART = ".part"  # suffix of a file that is still being written
# Files that `write_shards` copies to the new checkpoint.
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
    """Write a checkpoint that `load_model` reads: safetensors files, their index if there are several, tokenizer files
    and config.json.

    model        a model of any family with float weights, on any device. It must not be one rank's part of a model
    directory    a directory that does not exist or holds no weights; it may be `like`
    like         a directory with the model's config.json; its tokenizer files are copied
    dtype        "fp8": projections and experts in FP8 with 128 x 128 blocks, and scales in the format that the
                 config.json of `like` names; "fp4": experts in FP4, other projections in FP8; "bf16": all these
                 weights in BF16. Tensors that are never quantised have the dtype of the family's published release
    shard_bytes  maximum bytes per file; a larger tensor has a separate file
    progress     True: show a progress bar on a terminal

    A model without a drafter is saved without multi-token-prediction layers.
    Raises TypeError or ValueError for a wrong argument, or if the config.json of `like` is not supported or describes
    another model. The message names the argument or the field. In these cases no file is written.
    """
    directory, like = path_of("directory", directory), path_of("like", like)
    check_choice("dtype", dtype, STORAGES)
    integer("shard_bytes", shard_bytes, at_least=1)
    fields, config = stored_as(like, dtype, drafter=model.drafter is not None)
    manifest = published_manifest(config, fp4_experts=dtype == "fp4")
    values: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        places = split_experts(name, tuple(tensor.shape))
        values |= {part: tensor.detach()[index] for part, index in places.items()}
    parts = {}
    for stored in manifest:
        name = model.name_of(stored)
        if name in values:
            info = TensorInfo(tuple(values[name].shape), DTYPES[values[name].dtype], "the model")
            parts[with_scale_suffix(stored)] = Part(with_scale_suffix(stored), name, (), info)
    steps = steps_of(manifest, parts, [], use_ue8m0=config.use_ue8m0, source=f"like: {like}")

    def make(stored: str) -> dict[str, torch.Tensor]:
        # Clone, because tensors of a safetensors file cannot share memory, and the embedding and the head may be stored
        # a second time for the drafter.
        return steps[stored].make(*(values[part.stored].clone() for part in steps[stored].parts))

    write_shards(directory, manifest, make, fields, like=like, shard_bytes=shard_bytes, progress=progress)


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
                 these weights in BF16. A weight that already has this dtype is copied. FP4 is converted to FP8 without
                 loss. Tensors that are never quantised have the dtype of the family's published release
    shard_bytes  maximum bytes per file; a larger tensor has a separate file. Memory holds all tensors of one file at a
                 time
    device       the device that casts weights; None: the GPU if there is one, else the CPU
    progress     True: show a progress bar on a terminal

    config.json describes the new weights and is written last. Tokenizer files are copied.
    Raises ConfigError or CheckpointError if `load_model` would refuse `source`, or if tensors are missing or
    unexpected. Raises ValueError or TypeError, which names the argument, for any other wrong argument. After an error
    in a tensor's values, or in reading or writing a file, finished files stay. All other errors are raised before the
    first file is written.
    """
    directory = path_of("directory", directory)
    check_choice("dtype", dtype, STORAGES)
    integer("shard_bytes", shard_bytes, at_least=1)
    device = check_device(device)
    source = checkpoint_directory(source)
    if source.resolve() == directory.resolve():
        raise ValueError(f"directory: must be another one than the checkpoint's, got {directory}")
    checkpoint = Checkpoint(source)
    config = read_config(source)
    main = unfilled_model(config, Precision.of(config, kv_cache="model"))
    has_drafter = any(main.skips(name) and not name.startswith(main.other_parts) for name in checkpoint.tensors)
    problems: list[str] = []
    parts = parts_of_checkpoint(
        checkpoint.tensors, problems, lambda name: name.startswith(main.other_parts), with_scale_suffix, split_experts
    )
    fields, config = stored_as(source, dtype, drafter=has_drafter)
    manifest = published_manifest(config, fp4_experts=dtype == "fp4")
    # Omit copies of the embedding and the head that the source lacks; `load_model` skips such copies.
    manifest = {name: info for name, info in manifest.items() if name in parts or copied_from(name) is None}
    steps = steps_of(manifest, parts, problems, use_ue8m0=config.use_ue8m0, source=source)
    made_from = hashlib.sha256(checkpoint.digest() + repr((fields, manifest, shard_bytes)).encode()).hexdigest()
    write_shards(
        directory,
        manifest,
        lambda name: read_step(checkpoint, steps[name], device),
        fields,
        like=source,
        shard_bytes=shard_bytes,
        made_from=made_from,
        progress=progress,
    )


def steps_of(
    manifest: Manifest, parts: dict[str, Part], problems: list[str], *, use_ue8m0: bool, source: object
) -> dict[str, Step]:
    """Return {name: step} for the tensors of `manifest`. The step makes the tensor and, if the tensor is quantised, its
    scale. Raises CheckpointError if there are problems.

    parts: the source's tensors, by the new checkpoint's tensor names after `with_scale_suffix`
    problems: the problems that the caller has found
    use_ue8m0: whether FP8 scales are powers of two
    source: a directory or another description of the source, for the error message
    """
    wanted = {with_scale_suffix(name): info for name, info in manifest.items()}
    steps = make_plan(wanted, parts, problems, use_ue8m0=use_ue8m0)
    raise_problems(source, problems)
    return {step.part.name: step for step in steps}


def split_into_files(manifest: Manifest, most: int = SHARD_BYTES) -> dict[str, list[str]]:
    """Return {file name: the names of its tensors}. A file has at most `most` bytes or only one tensor, where a weight
    with its scale counts as one tensor."""
    scales = scales_of(manifest)
    of_weights = {*scales.values()}
    groups: list[list[str]] = []
    filled = most
    for name in manifest:
        if name in of_weights:
            continue
        names = [name, scales[name]] if name in scales else [name]
        size = sum(manifest[name].size for name in names)
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
    make: Callable[[str], dict[str, torch.Tensor]],
    fields: Mapping[str, Any],
    *,
    like: Path,
    shard_bytes: int = SHARD_BYTES,
    made_from: str = "",
    progress: bool = True,
) -> None:
    """Write a checkpoint into `directory`: the index if there are several files, the safetensors files, the tokenizer
    files and, last, config.json.

    manifest     the tensors of the checkpoint
    make         a function from a tensor's name to {name: tensor} with this tensor and, if it is quantised, its scale
                 (`Step.make`)
    fields       the fields of config.json
    like         the directory whose tokenizer files are copied
    shard_bytes  maximum bytes per file (`split_into_files`)
    made_from    an identifier of the tensors' source, stored in the index. If the directory already has an equal index,
                 existing files are kept, so a repeated call continues an interrupted one. "": the directory must
                 have no safetensors file
    progress     True: show a progress bar on a terminal

    Raises ValueError if the directory holds other weights.
    """
    directory.mkdir(parents=True, exist_ok=True)
    files, index_path = split_into_files(manifest, shard_bytes), directory / INDEX_NAME
    metadata = {"total_size": sum(info.size for info in manifest.values()), "made_from": made_from}
    index = to_json({"metadata": metadata, "weight_map": {name: file for file in files for name in files[file]}})
    present = {path.name for path in directory.glob("*.safetensors")}
    is_continued = made_from and index_path.exists() and index_path.read_text(encoding="utf-8") == index
    if present and not is_continued:
        raise ValueError(
            f"directory: must hold no weights, unless the same call was interrupted, got {directory} with "
            f"{shown(min(present))}"
        )
    index_path.write_text(index, encoding="utf-8")  # also for one file, so that an interrupted call can continue
    scales = scales_of(manifest)
    of_weights = {*scales.values()}
    missing = {file: names for file, names in files.items() if file not in present}
    total = sum(manifest[name].size for names in missing.values() for name in names)
    with tqdm(total=total, unit="B", unit_scale=True, desc="Writing", disable=None if progress else True) as bar:
        for file, names in missing.items():
            tensors: dict[str, torch.Tensor] = {}
            for name in names:
                for made, tensor in ({} if name in of_weights else make(name)).items():
                    stored = made if made in manifest else scales[name]
                    tensors[stored] = tensor.cpu().contiguous()
                    bar.update(manifest[stored].size)
            save_tensors(directory / file, tensors)
    if like.resolve() != directory.resolve():
        for path in (path for pattern in _COPIED for path in like.glob(pattern)):
            shutil.copyfile(path, directory / path.name)
    if len(files) == 1:
        index_path.unlink()
    (directory / "config.json").write_text(to_json(fields), encoding="utf-8")


def save_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file under a temporary name, and rename it once it is complete. The file has the default
    permissions of a new file; `save_file` would make it readable only by its owner."""
    part = path.with_name(path.name + PART)
    part.touch()
    mode = part.stat().st_mode
    try:
        save_file(tensors, part, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from None
    part.chmod(mode)
    os.replace(part, path)


def to_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"
