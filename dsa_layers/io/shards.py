"""Writing a checkpoint's directory: safetensors files of a given size, one after the other, and what goes with them."""

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from dsa_layers.arguments import shown
from dsa_layers.families.manifest import Manifest
from dsa_layers.io.directory import INDEX_NAME, SINGLE_NAME
from dsa_layers.io.published_format import scales_of
from dsa_layers.output_files import naming

SHARD_BYTES = 5 * 10**9
_COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_ITEM_SIZE = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F16": 2, "F32": 4, "I64": 8}
PART = ".part"  # the end of a file's name while it is written


@dataclass(frozen=True)
class Shards:
    """The files of a checkpoint. files: file name -> the tensors in it, a weight always together with its scale."""

    manifest: Manifest
    files: dict[str, list[str]]

    @classmethod
    def of(cls, manifest: Manifest, most: int = SHARD_BYTES) -> "Shards":
        """Files of at most `most` bytes, or of one tensor with its scale."""
        scales = scales_of(manifest)
        groups: list[list[str]] = []
        filled = most
        for name in manifest:
            if name in scales.values():
                continue
            names = [name, scales[name]] if name in scales else [name]
            size = sum(_size(*manifest[each]) for each in names)
            if filled + size > most:
                groups.append([])
                filled = 0
            groups[-1] += names
            filled += size
        count = len(groups)
        if count == 1:
            return cls(manifest, {SINGLE_NAME: groups[0]})
        return cls(manifest, {f"model-{i:05d}-of-{count:05d}.safetensors": g for i, g in enumerate(groups, start=1)})

    def size(self, file: str) -> int:
        return sum(_size(*self.manifest[name]) for name in self.files[file])

    @property
    def total(self) -> int:
        return sum(map(self.size, self.files))


def write_shards(
    directory: Path,
    shards: Shards,
    make: Callable[[str], dict[str, torch.Tensor]],
    fields: Mapping[str, Any],
    *,
    like: Path,
    made_from: str = "",
    progress: bool = True,
) -> None:
    """Writes the files, their index if they are several, copies of the tokenizer's files in the directory `like`, and
    config.json with `fields`: last, so that a directory with a config.json is complete.

    make      a tensor's name -> the tensor, and its scale if it has one
    made_from what the tensors are made from. A file that says the same is not written again: an interrupted call goes
              on where it was. Empty: all files are written

    At most one file's tensors are in memory at a time.
    Raises ValueError for a directory with other files, and OSError where there is no room for all files, before the
    first one is written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    done = {file for file in shards.files if made_from and _made_from(directory / file) == made_from}
    _check_directory(directory, like, done)
    left = {file: names for file, names in shards.files.items() if file not in done}
    needed, free = sum(map(shards.size, left)), shutil.disk_usage(directory).free
    if needed > free:
        raise OSError(f"{directory}: needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
    scales = {*scales_of(shards.manifest).values()}
    with tqdm(total=needed, unit="B", unit_scale=True, desc="Writing", disable=None if progress else True) as bar:
        for file, names in left.items():
            tensors: dict[str, torch.Tensor] = {}
            for name in names:
                if name not in scales:
                    tensors |= make(name)
                bar.update(_size(*shards.manifest[name]))
            save_tensors(directory / file, tensors, {"made_from": made_from} if made_from else {})
    for name in (*_COPIED, *_licences(like)):
        if (like / name).is_file() and like.resolve() != directory.resolve():
            shutil.copyfile(like / name, directory / name)
    if len(shards.files) > 1:
        weight_map = {name: file for file, names in shards.files.items() for name in names}
        write_json(directory / INDEX_NAME, {"metadata": {"total_size": shards.total}, "weight_map": weight_map})
    write_json(directory / "config.json", fields)


def save_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file: under another name until it is whole, and with the permissions that new files get,
    which the library's own do not have."""
    part = path.with_name(path.name + PART)
    try:
        with naming(part):
            part.touch()
            mode = part.stat().st_mode
            save_file(tensors, part, metadata={"format": "pt", **(metadata or {})})
            part.chmod(mode)
            os.replace(part, path)
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    with naming(path):
        path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_directory(directory: Path, like: Path, done: set[str]) -> None:
    """Raises ValueError for files that would be mixed with the checkpoint. Removes what an interrupted call has begun
    to write."""
    for path in directory.glob(f"model*.safetensors{PART}"):
        path.unlink()
    held = {path.name for path in directory.iterdir()}
    expected = done | ({*_COPIED, INDEX_NAME, *_licences(like)} if done else set())
    if like.resolve() == directory.resolve():
        expected |= {name for name in held if not name.endswith((".safetensors", INDEX_NAME))}
    if others := sorted(held - expected):
        raise ValueError(
            f"directory: must be new, empty or one in which the same call was interrupted, got {directory} with "
            f"{shown(others[0])}"
        )


def _licences(like: Path) -> list[str]:
    return [path.name for path in like.glob("LICENSE*")]


def _made_from(path: Path) -> str | None:
    try:
        with safe_open(path, framework="numpy") as stored:
            return (stored.metadata() or {}).get("made_from")
    except (OSError, SafetensorError):
        return None


def _size(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * _ITEM_SIZE[dtype]
