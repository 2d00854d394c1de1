"""Safetensors checkpoints: what a directory holds, and loading it into a model that was built on the meta device.

Everything that can be wrong is looked for in the files' headers before the first weight is read: a checkpoint is
hundreds of gigabytes, and minutes into the load is too late to learn that a file is cut short. The model gets its
tensors in one step at the end, so a load that fails leaves it as it was.
"""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from dsa import dequantize_per_block
from dsa_layers.fp4 import GROUP, dequantize_fp4, widen_fp4

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SCALE_SUFFIX = "_scale_inv"

_BLOCK = 128
_SHOWN_PROBLEMS = 10

_ITEM_SIZE = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2}
_ITEM_SIZE |= {"BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "F4": 0.5}

_FLOATS = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}
_EXACT = {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}
_EXACT |= {torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
_EXACT |= {torch.float8_e8m0fnu: "F8_E8M0"}

# What two FP4 values a byte are called, and the columns that one column of it stands for: I8 says nothing of FP4.
_PACKED = {"I8": 2, "F4": 1}

Index = tuple[int | slice, ...]


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

    def read(self, name: str, device: str | torch.device = "cpu", index: Index = ()) -> torch.Tensor:
        """The tensor `name`, as stored, or of it the slice `index`, in fresh memory on `device`.

        Packed FP4 comes as uint8, two values a byte. Raises CheckpointError if it cannot be read.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.directory}: holds no tensor {name}")
        info = self.tensors[name]
        try:
            if self._open is None or self._open[0] != info.file:
                self._open = (info.file, safe_open(self.directory / info.file, framework="pt"))
            stored = self._open[1].get_slice(name)[index] if index else self._open[1].get_tensor(name)
            if info.dtype == "F4":
                stored = stored.view(torch.uint8)
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
class _Part:
    """A tensor of the checkpoint, or the slice `index` of it, by the model's name for it. info: of the slice."""

    name: str
    stored: str
    index: Index
    info: TensorInfo

    @property
    def label(self) -> str:
        """The model's name, and the checkpoint's if it is another."""
        if not self.index:
            return self.name if self.stored == self.name else f"{self.name} (stored as {self.stored})"
        places = (f"{i.start or 0}:{i.stop or ''}" if isinstance(i, slice) else str(i) for i in self.index)
        return f"{self.name} (stored as {self.stored}[{', '.join(places)}])"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values, unpacked."""
        *rows, columns = self.info.shape or (1,)
        return (*rows, columns * _PACKED[self.info.dtype]) if self.is_packed else self.info.shape

    @property
    def is_packed(self) -> bool:
        return self.info.dtype in _PACKED and len(self.info.shape) == 2


@dataclass(frozen=True)
class _Step:
    """Parts to read, and the model's tensors that `make` makes of them."""

    parts: tuple[_Part, ...]
    make: Callable[..., dict[str, torch.Tensor]]


def _nothing(name: str) -> bool:
    return False


def _whole(name: str, shape: tuple[int, ...]) -> dict[str, Index]:
    return {name: ()}


def load_weights(
    model: torch.nn.Module,
    directory: str | PathLike[str],
    *,
    device: str | torch.device = "cpu",
    skip: Callable[[str], bool] = _nothing,
    name_of: Callable[[str], str] = str,
    parts_of: Callable[[str, tuple[int, ...]], dict[str, Index]] = _whole,
    progress: bool = True,
) -> None:
    """Gives `model`, built on the meta device, the tensors of the checkpoint in `directory`, on `device`.

    A checkpoint tensor goes by the name `name_of` its own. Tensors of either side may hold several of the other's:
    `parts_of` a name and a shape are the names of its parts, each with its slice, () for all of it, and a part of the
    model's is made of the checkpoint's of that name. Either function may raise CheckpointError to refuse a tensor, with
    the reason. A model tensor of dtype
    - float8_e4m3fn takes an F8_E4M3 tensor as it is; its scale `<name>_scale_inv` is a model tensor of its own. Or it
      takes packed FP4 (`dsa_layers.fp4`), widened without loss, and the scale follows from that;
    - bf16, fp16, fp32 or fp64 takes a float tensor, cast, or an F8_E4M3 or FP4 matrix, dequantised with its
      `<name>_scale_inv`, which is then no model tensor;
    - any other takes its own dtype only.
    FP8 has one scale per 128 x 128 block, F32 or F8_E8M0; FP4 (I8 of [O, I / 2], or F4) one F8_E8M0 per 32 columns.
    Checkpoint tensors for which `skip` is true are treated as absent. Non-persistent buffers are left alone.
    Parameters come without requires_grad. progress: one bar over all bytes that are read.

    Raises CheckpointError, with the model unchanged, for every problem of `Checkpoint` and for tensors that are
    missing, unexpected, refused, there twice, or of the wrong shape or dtype: these are looked for before anything is
    read, and reported together. Also if a file then cannot be read, or FP4 weights cannot be widened without loss.
    """
    checkpoint = Checkpoint(directory)
    problems: list[str] = []
    parts = _parts(checkpoint, skip, name_of, parts_of, problems)
    wanted, places = _pieces(model, parts_of)
    steps = _plan(wanted, parts, problems)
    if problems:
        raise CheckpointError.listing(checkpoint.directory, problems)

    loaded: dict[str, torch.Tensor] = {}
    total = sum(part.info.size for step in steps for part in step.parts)
    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading", disable=not progress) as bar:
        for step in steps:
            tensors = []
            for part in step.parts:
                tensors.append(checkpoint.read(part.stored, device, part.index))
                bar.update(part.info.size)
            try:
                made = step.make(*tensors)
            except ValueError as error:
                part = step.parts[0]
                raise CheckpointError(f"{checkpoint.directory / part.info.file}: {part.label}: {error}") from error
            for piece, tensor in made.items():
                name, index, shape = places[piece]
                if not index:
                    loaded[name] = tensor
                    continue
                if name not in loaded:
                    loaded[name] = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
                loaded[name][index] = tensor
    _assign(model, loaded)


def _pieces(
    model: torch.nn.Module, parts_of: Callable[[str, tuple[int, ...]], dict[str, Index]]
) -> tuple[dict[str, torch.Tensor], dict[str, tuple[str, Index, torch.Size]]]:
    """(the model's tensors cut as the checkpoint's are, of each the model's tensor, the slice and the whole shape)."""
    wanted, places = {}, {}
    for name, tensor in model.state_dict().items():
        for piece, index in parts_of(name, tuple(tensor.shape)).items():
            wanted[piece] = tensor[index] if index else tensor
            places[piece] = name, index, tensor.shape
    return wanted, places


def _parts(
    checkpoint: Checkpoint,
    skip: Callable[[str], bool],
    name_of: Callable[[str], str],
    parts_of: Callable[[str, tuple[int, ...]], dict[str, Index]],
    problems: list[str],
) -> dict[str, _Part]:
    """What the checkpoint holds, by the model's names, in the order of the files."""
    parts: dict[str, _Part] = {}
    for stored, info in checkpoint.tensors.items():
        if skip(stored):
            continue
        try:
            places = parts_of(name_of(stored), info.shape)
        except CheckpointError as error:
            problems.append(f"{info.file}: {stored}: {error}")
            continue
        for name, index in places.items():
            part = _Part(name, stored, index, _slice_info(info, index) if index else info)
            if name in parts:
                problems.append(f"{info.file}: {part.label} is there twice, as {parts[name].stored} too")
            parts[name] = part
    return parts


def _slice_info(info: TensorInfo, index: Index) -> TensorInfo:
    shape = tuple(torch.empty(info.shape, device="meta")[index].shape)
    return replace(info, shape=shape, size=info.size * math.prod(shape) // max(math.prod(info.shape), 1))


def _plan(wanted: dict[str, torch.Tensor], parts: dict[str, _Part], problems: list[str]) -> list[_Step]:
    """How to make every tensor of the model, in the order of the files; what stands against it goes to `problems`."""
    steps: list[_Step] = []
    accounted: set[str] = set()  # in the model or the checkpoint, whether all is well with it or not
    for name, part in parts.items():
        if name not in wanted:
            continue
        target = wanted[name]
        weight = name.removesuffix(SCALE_SUFFIX)
        if weight != name and weight in wanted and _is_widened(parts.get(weight), wanted[weight]):
            continue  # follows from the weight
        to_float, to_fp8 = target.dtype in _FLOATS, target.dtype == torch.float8_e4m3fn
        scale_name = name + SCALE_SUFFIX
        scale = parts.get(scale_name)
        accounted.add(name)
        problem = _mismatch(part, target)
        if to_float and part.info.dtype == "F8_E4M3":
            accounted.add(scale_name)
            problem = problem or _scale_problem(part, scale, ("F32", "F8_E8M0"), (_BLOCK, _BLOCK))
            make = partial(_dequantize, name, target.dtype, dequantize_per_block)
        elif part.is_packed and (to_float or to_fp8):
            accounted.add(scale_name)
            problem = problem or _scale_problem(part, scale, ("F8_E8M0",), (1, GROUP))
            make = partial(_widen, name) if to_fp8 else partial(_dequantize, name, target.dtype, dequantize_fp4)
        else:
            scale = None
            make = partial(_cast, name, target.dtype)
        if problem:
            problems.append(f"{part.info.file}: {problem}")
            continue
        steps.append(_Step((part,) if scale is None else (part, scale), make))

    for name, target in wanted.items():
        if name not in accounted:
            described = f"{_FLOATS.get(target.dtype) or _EXACT.get(target.dtype, target.dtype)} {list(target.shape)}"
            problems.append(f"{name}: missing; the model expects {described}")
    for name, part in parts.items():
        if name not in accounted:
            problems.append(f"{part.info.file}: unexpected {part.label} ({part.info})")
    return steps


def _is_widened(part: _Part | None, target: torch.Tensor) -> bool:
    return part is not None and part.is_packed and target.dtype == torch.float8_e4m3fn


def _cast(name: str, dtype: torch.dtype, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype)}


def _dequantize(
    name: str, dtype: torch.dtype, dequantize: Callable[..., torch.Tensor], q: torch.Tensor, scale: torch.Tensor
) -> dict[str, torch.Tensor]:
    return {name: dequantize(q, scale, dtype)}


def _widen(name: str, packed: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    q, block_scale = widen_fp4(packed, scale)
    return {name: q, name + SCALE_SUFFIX: block_scale}


def _mismatch(part: _Part, target: torch.Tensor) -> str | None:
    info, label = part.info, part.label
    may_be_packed = target.dtype in _FLOATS or target.dtype == torch.float8_e4m3fn
    shape = part.shape if may_be_packed else info.shape
    if shape != tuple(target.shape):
        stands_for = f", FP4 values of {list(shape)}" if shape != info.shape else ""
        return f"{label} has shape {list(info.shape)}{stands_for}; the model expects {list(target.shape)}"
    if may_be_packed and part.is_packed:
        return None
    if may_be_packed and info.dtype == "F8_E4M3":
        # A block that is cut has no scale of its own.
        cut = [i.start for i in part.index if isinstance(i, slice) and (i.start or 0) % _BLOCK]
        return f"{label} is {info.dtype} and cut at {cut[0]}, inside a block of {_BLOCK}" if cut else None
    if target.dtype in _FLOATS:
        # A scale is multiplied in fp32 by every backend: from fewer bits it would be another scale.
        accepted = {"F32", "F8_E8M0"} if part.name.endswith(SCALE_SUFFIX) else {*_FLOATS.values(), "F8_E4M3"}
    else:
        accepted = {_EXACT.get(target.dtype)}
    if info.dtype in accepted:
        return None
    if target.dtype == torch.float8_e4m3fn and info.dtype in _FLOATS.values():
        return (
            f"{label} is {info.dtype}; the model expects F8_E4M3. For a checkpoint that is not quantised, "
            "build the model in the dequantised mode"
        )
    return f"{label} is {info.dtype}; the model's {target.dtype} accepts {', '.join(sorted(map(str, accepted)))}"


def _scale_problem(part: _Part, scale: _Part | None, dtypes: tuple[str, ...], block: tuple[int, int]) -> str | None:
    """block: the rows and columns of the weight that share a scale."""
    if len(part.info.shape) != 2:
        return f"{part.label} is {part.info}; only a matrix can be dequantised"
    shape = [-(-size // of) for size, of in zip(part.shape, block)]
    expected = f"{' or '.join(dtypes)} {shape}"
    if scale is None:
        return (
            f"{part.label} is {part.info.dtype} and its scale {part.name}{SCALE_SUFFIX} is missing; expected {expected}"
        )
    if scale.info.dtype not in dtypes or list(scale.info.shape) != shape:
        return f"{scale.label} is {scale.info}; expected {expected} for the {list(part.info.shape)} weight"
    if part.is_packed and part.shape[1] % GROUP:
        return f"{part.label} is {part.info}; FP4 has groups of {GROUP} columns, got {part.shape[1]} columns"
    return None


def _assign(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    modules = dict(model.named_modules())
    for name, tensor in tensors.items():
        owner, _, attribute = name.rpartition(".")
        module = modules[owner]
        is_parameter = attribute in module._parameters
        setattr(module, attribute, torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)
