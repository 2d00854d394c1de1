"""Find a checkpoint's directory by path or Hugging Face hub id, and read its safetensors files.

The optional package huggingface_hub downloads files that are missing from its cache. The environment variables of
huggingface_hub apply, among them HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE and HF_TOKEN.
"""

import hashlib
import math
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dsa.runtime.values import path_of, shown_json
from dsa_layers.errors import CheckpointError
from dsa_layers.io.tensors import Index
from dsa_layers.untrusted_files import ACCEPTED, check_no_pointer, found_instead, is_there, read_json_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
INSTALL = "pip install 'dsa-kernels[hub]'"

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_MAX_ERROR = 500  # maximum characters of the hub's error message
_MAX_INDEX = 2**25  # maximum bytes of the index file
_OPEN_FILES = 8
_SAMPLES, _SAMPLE_BYTES = 16, 1024  # a digest reads 16 + 1 equally spaced samples of 1024 bytes per file
_SHOWN_PROBLEMS = 10


def checkpoint_directory(name: str | PathLike[str], *, weights: bool = True) -> Path:
    """Return the directory of a checkpoint. If the path `name` does not exist, treat `name` as a hub id, OWNER/NAME,
    and return huggingface_hub's local directory of this model.

    weights  True: download configuration, tokenizer, chat template and weights; False: omit the weights

    Raises ImportError, which says what to install, if huggingface_hub is missing. Raises CheckpointError (a ValueError)
    - if `name` is neither an existing path nor a valid id,
    - if the hub does not know the id,
    - if the hub is unreachable and the cache does not contain the model,
    - if `name` is a GGUF file.
    Raises TypeError if `name` is neither a string nor a path.
    """
    path, text = path_of("directory", name), os.fspath(name)
    if path.suffix == ".gguf" and path.is_file():
        raise CheckpointError(f"{text}: is GGUF, which llama.cpp reads; {ACCEPTED}")
    if is_there(path):
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
    except Exception as error:  # huggingface_hub passes on exceptions of several network libraries
        problem = " ".join(str(error).split())[:_MAX_ERROR]
        raise CheckpointError(
            f"{text}: no such directory; the hub does not give it: {type(error).__name__}: {problem}"
        ) from error


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's description in the header of its file. dtype: the name in safetensors ("BF16"). size: bytes."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    size: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Checkpoint:
    """The tensors in a directory of safetensors files. The constructor reads only headers; `read` reads one tensor.

    `tensors` maps each name to its TensorInfo, sorted by file and then by position in the file.
    The index lists the files of the checkpoint.
    Raises CheckpointError if the directory holds no checkpoint or two, if two files hold a tensor of the same name, or
    if a file is missing or damaged.
    """

    def __init__(self, directory: str | PathLike[str]) -> None:
        self.directory = Path(directory)
        index, single = (is_there(self.directory / name) for name in (INDEX_NAME, SINGLE_NAME))
        if index == single:
            found = "both" if single else f"neither{found_instead(self.directory)}"
            raise CheckpointError(f"{self.directory}: must hold either {INDEX_NAME} or {SINGLE_NAME}, got {found}")
        files = sorted({*_read_index(self.directory / INDEX_NAME).values()}) if index else [SINGLE_NAME]
        # Keep some files open, because opening a file parses its whole header. A weight and its scale may be in
        # different files, so reads alternate between files.
        self._opened = lru_cache(maxsize=_OPEN_FILES)(self._open)
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
        """Read the tensor `name`, or its slice `index`, in the stored dtype into new memory on `device`.

        An F4 tensor is returned as uint8 with two values per byte, and `index` counts bytes. Raises CheckpointError if
        the tensor cannot be read.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.directory}: holds no tensor {name}")
        info = self.tensors[name]
        try:
            file = self._opened(info.file)
            if info.dtype == "F4":  # safetensors cannot slice this dtype
                stored = file.get_tensor(name).view(torch.uint8)[index or ...]
            else:
                stored = file.get_slice(name)[index] if index else file.get_tensor(name)
            # Copy, because on the CPU get_tensor returns a view of the memory-mapped file.
            return torch.empty(stored.shape, dtype=stored.dtype, device=device).copy_(stored)
        except (OSError, SafetensorError, RuntimeError, MemoryError) as error:
            raise CheckpointError(f"{self.directory / info.file}: cannot read {name} ({info}): {error}") from error

    def digest(self) -> bytes:
        """Return the SHA-256 digest of the tensors' names, files, dtypes and shapes, and of samples of each file from
        its beginning to its end. Checkpoints from different training runs have different digests."""
        found = hashlib.sha256(repr(sorted(self.tensors.items())).encode())
        for file in sorted({info.file for info in self.tensors.values()}):
            with (self.directory / file).open("rb") as stored:
                end = stored.seek(0, os.SEEK_END)
                for i in range(_SAMPLES + 1):
                    stored.seek(max(0, (end - _SAMPLE_BYTES) * i // _SAMPLES))
                    found.update(stored.read(_SAMPLE_BYTES))
        return found.digest()

    def _open(self, file: str) -> Any:
        return safe_open(self.directory / file, framework="pt")

    def _header(self, file: str) -> dict[str, TensorInfo]:
        """Return the tensors of a file, sorted by position in the file. Raises CheckpointError if the file is missing
        or damaged.

        The safetensors library rejects a header that is too large, is not valid JSON, or does not match the file's
        size. It also rejects tensors that overlap or leave gaps.
        """
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
            dtype, shape = tensor.get_dtype(), tuple(tensor.get_shape())
            held[name] = TensorInfo(file, dtype, shape, bytes_of(dtype, shape))
        return held


def bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor in bytes. dtype: the name in safetensors, which contains the number of bits: BF16,
    F8_E4M3, I64."""
    bits = 8 if dtype == "BOOL" else int(re.search(r"\d+", dtype)[0])
    return math.prod(shape) * bits // 8


def raise_problems(directory: Path, problems: list[str]) -> None:
    """Raise one CheckpointError if a checkpoint has problems. The message shows the first ten problems."""
    if not problems:
        return
    lines = problems[:_SHOWN_PROBLEMS]
    if len(problems) > len(lines):
        lines.append(f"and {len(problems) - len(lines)} more")
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    raise CheckpointError(f"{directory}: {count}, nothing was loaded:\n" + "\n".join(f"  {line}" for line in lines))


def _read_index(path: Path) -> dict[str, str]:
    """Read an index file. Return {tensor's name: file's name}. Raises CheckpointError if an entry is not the name of a
    file in the same directory."""
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
