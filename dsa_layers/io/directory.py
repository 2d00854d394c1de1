"""A directory of safetensors files as one mapping from names to tensors."""

import functools
import hashlib
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from dsa_layers.arguments import shown, shown_json
from dsa_layers.errors import CheckpointError
from dsa_layers.families.fused_experts import Index
from dsa_layers.io.header import MAX_HEADER, MAX_TENSORS, TensorInfo, header_length, name_problem, read_header
from dsa_layers.io.problems import Problems
from dsa_layers.other_formats import found_instead
from dsa_layers.untrusted_files import is_there, read_json_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_MAX_INDEX = 2**25  # bytes
_MAX_INDEX_VALUES = MAX_TENSORS + 2**10  # their files, and metadata
_MAX_FILES = 2**12  # the largest published checkpoints have fewer than 200
_MAX_FILE_NAME = 255
_OPEN_FILES = 8
_SAMPLES, _SAMPLE_BYTES = 16, 1024  # of a file, for a digest

_LISTED_FILES = 3
_SHARD = re.compile(r"(?P<stem>.*-)(?P<number>\d{1,6})-of-(?P<of>\d{1,6})(?P<end>\.\w+)", re.ASCII)
LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")


class Checkpoint:
    """The tensors in a directory of safetensors files, known from their headers; read one by one when asked for.

    `tensors` maps each name to its TensorInfo, in the order of the files and of the data inside each.
    Raises CheckpointError if the directory holds no checkpoint or two, if the index and the files disagree, or if a
    file is missing, malformed, or has another size than its header says.
    """

    def __init__(self, directory: str | PathLike[str]) -> None:
        self.directory = Path(directory)
        index, single = self.directory / INDEX_NAME, self.directory / SINGLE_NAME
        try:
            has_index, has_single = is_there(index), is_there(single)
        except OSError as error:
            raise CheckpointError(f"{self.directory}: cannot be read: {error}") from error
        if has_index and has_single:
            raise CheckpointError(f"{self.directory}: holds both {INDEX_NAME} and {SINGLE_NAME}; keep one of them")
        if not has_index and not has_single:
            instead = _shards_alone(self.directory) or found_instead(self.directory)
            raise CheckpointError(f"{self.directory}: holds no {INDEX_NAME} and no {SINGLE_NAME}{instead}")
        problems = Problems()
        weight_map = _read_index(index, problems) if has_index else None
        files = [SINGLE_NAME] if weight_map is None else sorted(set(weight_map.values()))
        self.tensors: dict[str, TensorInfo] = {}
        self._open: dict[str, Any] = {}  # the files that were read last, the latest at the end
        held: set[tuple[str, str]] = set()
        unreadable: set[str] = set()
        left = MAX_HEADER
        for file in files:
            try:
                left -= header_length(self.directory, file)
                if left < 0:
                    raise CheckpointError(f"{file}: the files' headers have more than {MAX_HEADER} bytes together")
                entries = read_header(self.directory, file)
            except FileNotFoundError:
                names = [name for name, own in weight_map.items() if own == file] if weight_map else []
                problems.add(f"{file}: missing, though {INDEX_NAME} lists it for {_counted(names)}")
                unreadable.add(file)
                continue
            except CheckpointError as error:
                problems.add(str(error))
                unreadable.add(file)
                continue
            if len(self.tensors) + len(entries) > MAX_TENSORS:
                raise CheckpointError(f"{self.directory}: holds more than {MAX_TENSORS} tensors")
            for name, info in entries:
                held.add((name, file))
                if name in self.tensors:
                    problems.add(f"{name}: in two files, {self.tensors[name].file} and {file}")
                elif weight_map is not None and name not in weight_map:
                    problems.add(f"{file}: holds {name}, which {INDEX_NAME} does not list")
                self.tensors[name] = info
        for name, file in (weight_map or {}).items():
            if file not in unreadable and (name, file) not in held:
                found = f"found in {self.tensors[name].file}" if name in self.tensors else "found in no file"
                problems.add(f"{file}: lacks {name}, which {INDEX_NAME} puts there; {found}")
        problems.raise_if_any(self.directory)

    @functools.cached_property
    def _files_of_layers(self) -> dict[str | None, list[str]]:
        """The files with tensors of each layer, by its number; None: with tensors of no layer."""
        found: dict[str | None, set[str]] = {}
        for name, info in self.tensors.items():
            found.setdefault(_layer(name), set()).add(info.file)
        return {layer: sorted(files) for layer, files in found.items()}

    def place_of(self, name: str) -> str:
        """Where a tensor would be that no file holds, as a message ends: in a file whose number the others leave out,
        else in one that holds the rest of its layer. Empty where neither is known, or all files may be meant."""
        held = sorted({info.file for info in self.tensors.values()})
        places = missing_shards(held) or self._files_of_layers.get(_layer(name), [])
        if not places or places == held:
            return ""
        listed = ", ".join(places[:_LISTED_FILES])
        more = f" and {len(places) - _LISTED_FILES} more" if len(places) > _LISTED_FILES else ""
        return f"; it would be in {listed}{more}"

    def sampled_digest(self) -> bytes:
        """Of what tensors are called and are like, and of a few of each file's bytes, from its beginning to its end: a
        digest that another training's weights do not have. Raises CheckpointError for a file that cannot be read."""
        tensors = {name: (info.dtype, info.shape) for name, info in sorted(self.tensors.items())}
        found = hashlib.sha256(repr(tensors).encode())
        for file in sorted({info.file for info in self.tensors.values()}):
            try:
                with (self.directory / file).open("rb") as stored:
                    end = stored.seek(0, os.SEEK_END)
                    for i in range(_SAMPLES + 1):
                        stored.seek(max(0, (end - _SAMPLE_BYTES) * i // _SAMPLES))
                        found.update(stored.read(_SAMPLE_BYTES))
            except OSError as error:
                raise CheckpointError(f"{self.directory / file}: cannot be read: {error}") from error
        return found.digest()

    def read(self, name: str, device: str | torch.device = "cpu", index: Index = ()) -> torch.Tensor:
        """The tensor `name`, as stored, or of it the slice `index`, in fresh memory on `device`.

        Packed FP4 comes as uint8, two values a byte, and an index counts these. Raises CheckpointError if it cannot be
        read.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.directory}: holds no tensor {name}")
        info = self.tensors[name]
        try:
            file = self._opened(info.file)
            if info.dtype == "F4":  # of which safetensors takes no slices
                stored = file.get_tensor(name).view(torch.uint8)[index or ...]
            else:
                stored = file.get_slice(name)[index] if index else file.get_tensor(name)
            # What get_tensor returns on the CPU is a window on the mapped file; the copy outlives the file.
            return torch.empty(stored.shape, dtype=stored.dtype, device=device).copy_(stored)
        except (OSError, SafetensorError, RuntimeError, MemoryError) as error:
            raise CheckpointError(f"{self.directory / info.file}: cannot read {name} ({info}): {error}") from error

    def _opened(self, file: str) -> Any:
        """Opening parses the whole header. So some files stay open: a weight's scale may be in another one."""
        self._open[file] = self._open.pop(file, None) or safe_open(self.directory / file, framework="pt")
        if len(self._open) > _OPEN_FILES:
            del self._open[next(iter(self._open))]
        return self._open[file]


@dataclass(frozen=True)
class StoredNames:
    """What a checkpoint's tensors are called, where its files need not be here.

    directory: or the path of a config.json by itself; tensors: their names, None where nothing says them.
    """

    directory: Path
    tensors: Collection[str] | None

    @classmethod
    def of(cls, directory: Path) -> Self:
        """By the index, or by the header of a single file. Raises CheckpointError for one that cannot be read."""
        if is_there(directory / INDEX_NAME):
            problems = Problems()
            names = _read_index(directory / INDEX_NAME, problems)
            problems.raise_if_any(directory)
            return cls(directory, names.keys())
        if is_there(directory / SINGLE_NAME):
            return cls(directory, Checkpoint(directory).tensors.keys())
        return cls(directory, None)


def missing_shards(files: Collection[str]) -> list[str]:
    """The files that are not among `files`, whose names count them: model-00001-of-00003.safetensors."""
    found = [match for match in map(_SHARD.fullmatch, files) if match]
    if not found or len({(match["stem"], match["of"], match["end"]) for match in found}) > 1:
        return []
    one = found[0]
    count, digits = int(one["of"]), len(one["number"])
    if count > _MAX_FILES:
        return []
    held = {int(match["number"]) for match in found}
    return [f"{one['stem']}{n:0{digits}}-of-{one['of']}{one['end']}" for n in range(1, count + 1) if n not in held]


def _shards_alone(directory: Path) -> str:
    """What an error adds where numbered files are there without their index."""
    files = sorted(path.name for path in directory.glob("*.safetensors") if _SHARD.fullmatch(path.name))
    return f"; it holds {len(files)} numbered files, the first {files[0]}, whose index is missing" if files else ""


def _counted(names: list[str]) -> str:
    return f"{len(names)} tensors, the first {min(names)}" if len(names) > 1 else "".join(names)


def _layer(name: str) -> str | None:
    match = LAYER.search(name)
    return match[1] if match else None


def _read_index(path: Path, problems: Problems) -> dict[str, str]:
    """The file of each tensor. Files of which nothing good can come are left out and reported."""
    index = read_json_object(path, CheckpointError, _MAX_INDEX, _MAX_INDEX_VALUES)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        found = f"weight_map {shown_json(weight_map)}" if "weight_map" in index else f"the fields {shown(list(index))}"
        raise CheckpointError(f'{path}: expected {{"weight_map": {{tensor: file, ...}}}}, got {found}')
    files: dict[str, str] = {}
    refused: dict[str, None] = {}
    for name, file in weight_map.items():
        if problem := name_problem(name):
            raise CheckpointError(f"{path}: holds {problem}")
        if not isinstance(file, str):
            raise CheckpointError(
                f"{path}: weight_map gives {name} the file {shown_json(file)}; accepted: a file's name"
            )
        if _is_file_name(file):
            files[name] = file
        else:
            refused[file] = None
    for file in sorted(refused):
        problems.add(f"{path.name}: {shown(file)} is not the name of a file in this directory")
    count = len(set(files.values()))
    if count > _MAX_FILES:
        raise CheckpointError(f"{path}: names {count} files; accepted: at most {_MAX_FILES}")
    return files


def _is_file_name(file: str) -> bool:
    short = 0 < len(file.encode("utf-8", "replace")) <= _MAX_FILE_NAME
    return short and file.isprintable() and file not in (".", "..") and not set(file) & set("/\\")
