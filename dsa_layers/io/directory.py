"""Find a checkpoint's directory by path or Hugging Face hub id, and read its safetensors files.

The optional package huggingface_hub downloads files that are missing from its cache. Its environment variables apply,
among them HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE and HF_TOKEN.
"""

import hashlib
import os
import re
from functools import lru_cache
from os import PathLike
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from dsa.runtime.checks import path_of, shown_json
from dsa_layers.errors import CheckpointError
from dsa_layers.io.tensors import Index, TensorInfo
from dsa_layers.untrusted_files import check_no_pointer, found_instead, read_json_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
INSTALL = "pip install 'dsa-kernels[hub]'"

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_MAX_ERROR = 500  # maximum characters of the hub's error message
_MAX_INDEX = 2**25  # maximum bytes of the index file
_OPEN_FILES = 8
_SHOWN_PROBLEMS = 10


def checkpoint_directory(name: str | PathLike[str], *, weights: bool = True) -> Path:
    """Return the path `name` if it exists. Otherwise treat `name` as a hub id, OWNER/NAME, and return the local
    directory in which huggingface_hub stores this model.

    weights  for a hub id, True: download JSON files, chat template and weights; False: do not download weights

    Raises CheckpointError (a ValueError) if `name` is neither an existing path nor a valid id, or if huggingface_hub
    fails. Raises ImportError, which says what to install, if huggingface_hub is needed and missing. Raises TypeError if
    `name` is neither a string nor a path.
    """
    path, text = path_of("directory", name), os.fspath(name)
    if path.exists():
        return path
    if not _ID.fullmatch(text):
        raise CheckpointError(
            f"{text}: no such directory; accepted: a directory with config.json and safetensors files, or the hub's "
            "OWNER/NAME"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ImportError(f"{text}: no such directory; to find it on the hub, {INSTALL}") from None

    files = ["*.json", "*.jinja", *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(text, allow_patterns=files, ignore_patterns=["*/*", "consolidated*"]))
    except Exception as error:  # huggingface_hub passes on exceptions of other libraries
        problem = " ".join(str(error).split())[:_MAX_ERROR]
        raise CheckpointError(
            f"{text}: no such directory; the hub does not give it: {type(error).__name__}: {problem}"
        ) from error


class Checkpoint:
    """The tensors in a directory of safetensors files. The constructor reads only headers; `read` reads one tensor.

    `tensors` maps each tensor's name to its TensorInfo, sorted by file and then by position in the file.
    The files are those that the index file INDEX_NAME lists, or the single file SINGLE_NAME.
    Raises CheckpointError if the directory has both or neither of INDEX_NAME and SINGLE_NAME, if two files hold a
    tensor of the same name, or if a file is missing or damaged.
    """

    def __init__(self, directory: str | PathLike[str]) -> None:
        self.directory = Path(directory)
        index, single = ((self.directory / name).exists() for name in (INDEX_NAME, SINGLE_NAME))
        if index == single:
            found = "both" if single else f"neither{found_instead(self.directory)}"
            raise CheckpointError(f"{self.directory}: must hold either {INDEX_NAME} or {SINGLE_NAME}, got {found}")
        files = sorted({*_read_index(self.directory / INDEX_NAME).values()}) if index else [SINGLE_NAME]
        # Keep some files open: opening a file parses its whole header, and reads may alternate between files, because
        # a weight and its scale may be in different files.
        self._opened = lru_cache(maxsize=_OPEN_FILES)(lambda file: safe_open(self.directory / file, framework="pt"))
        self.tensors: dict[str, TensorInfo] = {}
        problems: list[str] = []
        for file in files:
            try:
                held = self._header(file)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            twice = held.keys() & self.tensors.keys()
            problems += [f"{name}: in two files, {self.tensors[name].file} and {file}" for name in sorted(twice)]
            self.tensors |= held
        raise_problems(self.directory, problems)

    def read(self, name: str, device: str | torch.device = "cpu", index: Index = ()) -> torch.Tensor:
        """Return the tensor `name`, or its slice `index`, in the stored dtype on `device`. On the CPU it may be a view
        of the memory-mapped file. Raises CheckpointError if the tensor cannot be read."""
        info = self.tensors[name]
        try:
            file = self._opened(info.file)
            return (file.get_slice(name)[index] if index else file.get_tensor(name)).to(device)
        except (OSError, SafetensorError, RuntimeError, MemoryError) as error:
            raise CheckpointError(f"{self.directory / info.file}: cannot read {name} ({info}): {error}") from error

    def digest(self) -> bytes:
        """Return the SHA-256 digest of all tensors' names and descriptions and of the files' sizes and modification
        times. A rewritten file changes the digest, even if only values of tensors differ."""
        files = sorted({info.file for info in self.tensors.values()})
        states = [(self.directory / file).stat() for file in files]
        facts = sorted(self.tensors.items()), [(state.st_size, state.st_mtime_ns) for state in states]
        return hashlib.sha256(repr(facts).encode()).digest()

    def _header(self, file: str) -> dict[str, TensorInfo]:
        """Return the tensors of a file, sorted by position in the file. Raises CheckpointError if the file is missing
        or damaged. The safetensors library checks the header: its JSON, the file's size, and that tensors neither
        overlap nor leave gaps."""
        path = self.directory / file
        try:
            check_no_pointer(path, CheckpointError)
            stored = self._opened(file)
        except FileNotFoundError:
            raise CheckpointError(f"{file}: missing, though {INDEX_NAME} lists it") from None
        except (OSError, SafetensorError) as error:
            problem = str(error).removeprefix("Error while deserializing header: ")
            size = path.stat().st_size
            raise CheckpointError(f"{file}: not a safetensors file, or cut short at {size} bytes: {problem}") from error
        held = {}
        for name in stored.offset_keys():
            tensor = stored.get_slice(name)
            held[name] = TensorInfo(tuple(tensor.get_shape()), tensor.get_dtype(), file)
        return held


def raise_problems(directory: Path, problems: list[str]) -> None:
    """If there are problems, raise a CheckpointError that counts them and shows the first ten."""
    if not problems:
        return
    lines = problems[:_SHOWN_PROBLEMS]
    if len(problems) > len(lines):
        lines.append(f"and {len(problems) - len(lines)} more")
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    raise CheckpointError(f"{directory}: {count}, nothing was loaded:\n" + "\n".join(f"  {line}" for line in lines))


def _read_index(path: Path) -> dict[str, str]:
    """Return {tensor's name: file's name} from an index file. Raises CheckpointError if the index is malformed or names
    a file outside its directory."""
    index = read_json_object(path, CheckpointError, _MAX_INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f'{path}: expected {{"weight_map": {{tensor: file, ...}}}}, got {shown_json(index)}')
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.isprintable() or Path(file).name != file or "\\" in file:
            raise CheckpointError(
                f"{path}: weight_map gives {shown_json(name)} the file {shown_json(file)}; accepted: the name of a "
                "file in this directory"
            )
    return weight_map
