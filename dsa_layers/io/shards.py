"""Writing a checkpoint's directory: safetensors files of a given size, one by one, and all other files."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm import tqdm

from dsa_layers.arguments import shown
from dsa_layers.io.directory import INDEX_NAME, SINGLE_NAME, bytes_of
from dsa_layers.io.manifest import Manifest
from dsa_layers.io.published_format import scales_of
from dsa_layers.output_files import naming

SHARD_BYTES = 5 * 10**9
PART = ".part"  # the end of a file's name while it is written
# Copied from the directory that a checkpoint is made like.
_COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "LICENSE*")


def split_into_files(manifest: Manifest, most: int = SHARD_BYTES) -> dict[str, list[str]]:
    """File name -> the tensors in it, a weight always together with its scale. A file has at most `most` bytes, or one
    tensor with its scale."""
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
    """Write the index if there are several files, the files, copies of the tokenizer's files in the directory `like`,
    and config.json with `fields`. config.json comes last, so a directory with a config.json is complete.

    files      the tensors of the manifest in each file (`split_into_files`)
    make       a weight's name -> the tensor, and its scale if it has one
    made_from  identifies the source of the tensors, in the index. If the directory's index has the same mark, files
               that exist are not written again: after an interruption the same call continues. Empty: no mark

    At most one file's tensors are in memory at a time.
    Raises ValueError for a directory with other weights, and OSError if the disk has no room for all files, before the
    first one is written.
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
    needed, free = sum(sizes.values()), shutil.disk_usage(directory).free
    if needed > free:
        raise OSError(f"{directory}: needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
    if len(files) > 1:
        metadata = {"total_size": _size(manifest, manifest)} | ({"made_from": made_from} if made_from else {})
        weight_map = {name: file for file, names in files.items() for name in names}
        write_json(directory / INDEX_NAME, {"metadata": metadata, "weight_map": weight_map})
    else:
        (directory / INDEX_NAME).unlink(missing_ok=True)  # without weights it describes nothing
    scales = {*scales_of(manifest).values()}
    with tqdm(total=needed, unit="B", unit_scale=True, desc="Writing", disable=None if progress else True) as bar:
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
    """The files in the index that `write_shards` has written with this mark; none if the index has another mark."""
    try:
        index = json.loads((directory / INDEX_NAME).read_bytes())
        return set(index["weight_map"].values()) if index["metadata"]["made_from"] == made_from else set()
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def save_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file: under another name until it is whole, and with the permissions of new files, which the
    library does not use."""
    part = path.with_name(path.name + PART)
    try:
        with naming(part):
            part.touch()
            mode = part.stat().st_mode
            save_file(tensors, part, metadata={"format": "pt"})
            part.chmod(mode)
            os.replace(part, path)
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    with naming(path):
        path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _size(manifest: Manifest, names: Iterable[str]) -> int:
    shapes = (manifest[name] for name in names)
    return sum(bytes_of(dtype, shape) for shape, dtype in shapes)
