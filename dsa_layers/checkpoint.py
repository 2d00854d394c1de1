"""Safetensors checkpoints: what a directory holds, and loading it into a model that was built on the meta device.

Everything that can be wrong is looked for in the files' headers before the first weight is read: a checkpoint is
hundreds of gigabytes, and minutes into the load is too late to learn that a file is cut short. The model gets its
tensors in one step at the end, so a load that fails leaves it as it was.
"""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from dsa import dequantize_per_block

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SCALE_SUFFIX = "_scale_inv"

_BLOCK = 128
_SHOWN_PROBLEMS = 10

_ITEM_SIZE = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2}
_ITEM_SIZE |= {"BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}

_FLOATS = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}
_EXACT = {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}
_EXACT |= {torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
_EXACT |= {torch.float8_e8m0fnu: "F8_E8M0"}


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded. Names files and tensors, what was expected and what was found."""

    @classmethod
    def listing(cls, directory: Path, problems: list[str]) -> "CheckpointError":
        """One error for all `problems`: the first ten in full, and how many more there are."""
        shown = problems[:_SHOWN_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more")
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        return cls(f"{directory}: {count}, nothing was loaded:\n" + "\n".join(f"  {line}" for line in shown))


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as its file's header describes it. dtype is safetensors' name ("BF16"); offset and size in bytes."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Checkpoint:
    """The tensors in a directory of safetensors files, known from their headers; read one by one when asked for.

    `tensors` maps each name to its TensorInfo, in the order of the files and of the data inside each.
    Raises CheckpointError if the directory holds no checkpoint or two, if the index and the files disagree, or if a
    file is missing, malformed, or has another size than its header says.
    """

    def __init__(self, directory: str | PathLike[str]) -> None:
        self.directory = Path(directory)
        index, single = self.directory / INDEX_NAME, self.directory / SINGLE_NAME
        if index.exists() and single.exists():
            raise CheckpointError(f"{self.directory}: holds both {INDEX_NAME} and {SINGLE_NAME}; keep one of them")
        if not index.exists() and not single.exists():
            raise CheckpointError(f"{self.directory}: holds no {INDEX_NAME} and no {SINGLE_NAME}")
        problems: list[str] = []
        weight_map = _read_index(index, problems) if index.exists() else None
        files = [SINGLE_NAME] if weight_map is None else sorted(set(weight_map.values()))
        self.tensors: dict[str, TensorInfo] = {}
        self._open: tuple[str, Any] | None = None
        held: set[tuple[str, str]] = set()
        unreadable: set[str] = set()
        for file in files:
            try:
                entries = _read_header(self.directory, file)
            except CheckpointError as error:
                problems.append(str(error))
                unreadable.add(file)
                continue
            for name, info in entries:
                held.add((name, file))
                if name in self.tensors:
                    problems.append(f"{name}: in two files, {self.tensors[name].file} and {file}")
                elif weight_map is not None and name not in weight_map:
                    problems.append(f"{file}: holds {name}, which {INDEX_NAME} does not list")
                self.tensors[name] = info
        for name, file in (weight_map or {}).items():
            if file not in unreadable and (name, file) not in held:
                found = f"found in {self.tensors[name].file}" if name in self.tensors else "found in no file"
                problems.append(f"{file}: lacks {name}, which {INDEX_NAME} puts there; {found}")
        if problems:
            raise CheckpointError.listing(self.directory, problems)

    def read(self, name: str, device: str | torch.device = "cpu") -> torch.Tensor:
        """The tensor `name`, as stored, in fresh memory on `device`. Raises CheckpointError if it cannot be read."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.directory}: holds no tensor {name}")
        info = self.tensors[name]
        try:
            if self._open is None or self._open[0] != info.file:
                self._open = (info.file, safe_open(self.directory / info.file, framework="pt"))
            stored = self._open[1].get_tensor(name)
            # What get_tensor returns on the CPU is a window on the mapped file; the copy outlives the file.
            return torch.empty(stored.shape, dtype=stored.dtype, device=device).copy_(stored)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise CheckpointError(f"{self.directory / info.file}: cannot read {name} ({info}): {error}") from error


def _read_index(path: Path, problems: list[str]) -> dict[str, str]:
    repeated: list[str] = []

    def note_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        repeated.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return dict(pairs)

    try:
        index = json.loads(path.read_bytes(), object_pairs_hook=note_repeated)
        weight_map = index["weight_map"]
        if not all(isinstance(file, str) for file in weight_map.values()):
            raise TypeError("weight_map holds a file name that is not a string")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f'{path}: expected {{"weight_map": {{tensor: file, ...}}}}, got {type(error).__name__}: {error}'
        ) from error
    problems.extend(f"{name}: listed twice in {path.name}" for name in repeated)
    outside = {file for file in weight_map.values() if Path(file).name != file}
    problems.extend(f"{path.name}: {file!r} is not the name of a file in this directory" for file in sorted(outside))
    return {name: file for name, file in weight_map.items() if file not in outside}


def _read_header(directory: Path, file: str) -> list[tuple[str, TensorInfo]]:
    """The tensors of one file in the order of their data, once its size is known to be what the header says."""
    path = directory / file
    try:
        actual = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if actual < 8 or 8 + length > actual:
                raise CheckpointError(f"{file}: truncated: {actual} bytes, its header alone needs {8 + length}")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        entries = [(name, _tensor_info(file, entry)) for name, entry in header.items()]
    except FileNotFoundError:
        raise CheckpointError(f"{file}: missing, though {INDEX_NAME} lists it") from None
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: not a safetensors file: {type(error).__name__}: {error}") from error
    entries.sort(key=lambda entry: (entry[1].offset, entry[1].size))

    end = 0
    for name, info in entries:
        if info.offset != end:
            raise CheckpointError(f"{file}: {name} starts at byte {info.offset} of the data, expected {end}")
        end += info.size
        item = _ITEM_SIZE.get(info.dtype)
        if item is not None and info.size != item * math.prod(info.shape):
            raise CheckpointError(f"{file}: {name} is {info} but has {info.size} bytes")
    if actual != 8 + length + end:
        problem = "truncated" if actual < 8 + length + end else "too long"
        raise CheckpointError(f"{file}: {problem}: {actual} bytes, its header describes {8 + length + end}")
    return entries


def _tensor_info(file: str, entry: dict[str, Any]) -> TensorInfo:
    begin, end = entry["data_offsets"]
    return TensorInfo(file, entry["dtype"], tuple(entry["shape"]), begin, end - begin)


@dataclass(frozen=True)
class _Read:
    """One tensor to make: where from, into which dtype, and the scale that dequantises it, if it must be."""

    name: str
    dtype: torch.dtype
    scale: str | None


def _nothing(name: str) -> bool:
    return False


def load_weights(
    model: torch.nn.Module,
    directory: str | PathLike[str],
    *,
    device: str | torch.device = "cpu",
    skip: Callable[[str], bool] = _nothing,
    name_of: Callable[[str], str] = str,
    progress: bool = True,
) -> None:
    """Gives `model`, built on the meta device, the tensors of the checkpoint in `directory`, on `device`.

    The model's name of a checkpoint tensor is `name_of` its own; different tensors have different ones. A
    model tensor of dtype
    - float8_e4m3fn takes an F8_E4M3 tensor as it is; its scale `<name>_scale_inv` is a model tensor of its own;
    - bf16, fp16, fp32 or fp64 takes a float tensor, cast, or an F8_E4M3 matrix, dequantised with its
      `<name>_scale_inv` (F32, one scale per 128 x 128 block), which is then no model tensor;
    - any other takes its own dtype only.
    Checkpoint tensors for which `skip` is true are treated as absent. Non-persistent buffers are left alone.
    Parameters come without requires_grad. progress: one bar over all bytes that are read.

    Raises CheckpointError, with the model unchanged, for every problem of `Checkpoint` and for tensors that are
    missing, unexpected, or of the wrong shape or dtype: these are looked for before anything is read, and reported
    together. Also if a file then cannot be read.
    """
    checkpoint = Checkpoint(directory)
    own = {name_of(name): name for name in checkpoint.tensors if not skip(name)}
    stored = {name: checkpoint.tensors[its] for name, its in own.items()}
    reads = _plan(model.state_dict(), stored, checkpoint.directory)

    loaded: dict[str, torch.Tensor] = {}
    total = sum(stored[name].size for read in reads for name in (read.name, read.scale) if name is not None)
    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading", disable=not progress) as bar:
        for read in reads:
            tensor = checkpoint.read(own[read.name], device)
            bar.update(stored[read.name].size)
            if read.scale is not None:
                scale = checkpoint.read(own[read.scale], device)
                tensor = dequantize_per_block(tensor, scale, read.dtype, _BLOCK)
                bar.update(stored[read.scale].size)
            loaded[read.name] = tensor.to(read.dtype)
    _assign(model, loaded)


def _plan(wanted: dict[str, torch.Tensor], stored: dict[str, TensorInfo], directory: Path) -> list[_Read]:
    """How to make every tensor of the model, in the order of the files. Raises one CheckpointError for all problems."""
    problems: list[str] = []
    reads: list[_Read] = []
    consumed: set[str] = set()
    for name, info in stored.items():
        if name not in wanted:
            continue
        target = wanted[name]
        scale = name + SCALE_SUFFIX if info.dtype == "F8_E4M3" and target.dtype in _FLOATS else None
        problem = _mismatch(name, info, target) or (scale and _scale_problem(name, info, stored.get(scale)))
        if problem:
            problems.append(f"{info.file}: {problem}")
        reads.append(_Read(name, target.dtype, scale))
        consumed |= {name, scale}

    for name, target in wanted.items():
        if name not in stored:
            described = f"{_FLOATS.get(target.dtype) or _EXACT.get(target.dtype, target.dtype)} {list(target.shape)}"
            problems.append(f"{name}: missing; the model expects {described}")
    problems.extend(f"{info.file}: unexpected {name} ({info})" for name, info in stored.items() if name not in consumed)
    if problems:
        raise CheckpointError.listing(directory, problems)
    return reads


def _mismatch(name: str, info: TensorInfo, target: torch.Tensor) -> str | None:
    if info.shape != tuple(target.shape):
        return f"{name} has shape {list(info.shape)}; the model expects {list(target.shape)}"
    if target.dtype in _FLOATS:
        # A scale is multiplied in fp32 by every backend: from fewer bits it would be another scale.
        accepted = {"F32"} if name.endswith(SCALE_SUFFIX) else {*_FLOATS.values(), "F8_E4M3"}
    else:
        accepted = {_EXACT.get(target.dtype)}
    if info.dtype in accepted:
        return None
    if target.dtype == torch.float8_e4m3fn and info.dtype in _FLOATS.values():
        return (
            f"{name} is {info.dtype}; the model expects F8_E4M3. For a checkpoint that is not quantised, "
            "build the model in the dequantised mode"
        )
    return f"{name} is {info.dtype}; the model's {target.dtype} accepts {', '.join(sorted(map(str, accepted)))}"


def _scale_problem(name: str, info: TensorInfo, scale: TensorInfo | None) -> str | None:
    if len(info.shape) != 2:
        return f"{name} is {info}; only a matrix can be dequantised"
    expected = TensorInfo(info.file, "F32", tuple(-(-size // _BLOCK) for size in info.shape), 0, 0)
    if scale is None:
        return f"{name} is F8_E4M3 and its scale {name}{SCALE_SUFFIX} is missing; expected {expected}"
    if (scale.dtype, scale.shape) != (expected.dtype, expected.shape):
        return f"{name}{SCALE_SUFFIX} is {scale}; expected {expected} for the {list(info.shape)} weight"
    return None


def _assign(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    modules = dict(model.named_modules())
    for name, tensor in tensors.items():
        owner, _, attribute = name.rpartition(".")
        module = modules[owner]
        is_parameter = attribute in module._parameters
        setattr(module, attribute, torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)
