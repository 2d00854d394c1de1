"""How the tensors of a model are made of those of a checkpoint, decided from names, shapes and dtypes alone."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from dsa import dequantize_per_block, fp4_block_scales, widen_fp4
from dsa_layers.families.fused_experts import Index, sliced
from dsa_layers.families.manifest import BLOCK_SCALE_SUFFIX, SCALE_SUFFIX
from dsa_layers.io.fp4 import GROUP, dequantize_fp4
from dsa_layers.io.header import TensorInfo
from dsa_layers.io.problems import Problems

_BLOCK = 128

_FLOATS = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}
_EXACT = {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}
_EXACT |= {torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
_EXACT |= {torch.float8_e8m0fnu: "F8_E8M0"}

# What two FP4 values a byte are called, and the columns that one column of it stands for: I8 says nothing of FP4.
PACKED = {"I8": 2, "F4": 1}


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the model, or the slice `index` of it that the checkpoint holds as one tensor.

    shape: of the slice; whole: of the tensor `name`, which it is part of.
    """

    name: str
    index: Index
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the checkpoint, or the slice `index` of it, by the model's name for it. info: of the slice."""

    name: str
    stored: str
    index: Index
    info: TensorInfo

    @classmethod
    def of(cls, name: str, stored: str, index: Index, whole: TensorInfo) -> "Part":
        """whole: of the tensor `stored`."""
        if not index:
            return cls(name, stored, index, whole)
        shape = sliced(whole.shape, index)
        size = whole.size * math.prod(shape) // max(math.prod(whole.shape), 1)
        return cls(name, stored, index, replace(whole, shape=shape, size=size))

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
        return (*rows, columns * PACKED[self.info.dtype]) if self.is_packed else self.info.shape

    @property
    def is_packed(self) -> bool:
        return self.info.dtype in PACKED and len(self.info.shape) == 2

    @property
    def is_cut_by_columns(self) -> bool:
        rank = len(self.info.shape) + sum(isinstance(place, int) for place in self.index)  # of the whole tensor
        return len(self.index) == rank > 0 and isinstance(self.index[-1], slice)


@dataclass(frozen=True, slots=True)
class Step:
    """Parts to read, and the model's tensors that `make` makes of them."""

    parts: tuple[Part, ...]
    make: Callable[..., dict[str, torch.Tensor]]


def make_plan(
    wanted: dict[str, Target], parts: dict[str, Part], problems: Problems, place_of: Callable[[str], str]
) -> list[Step]:
    """How to make every tensor of the model, in the order of the files; what stands against it goes to `problems`.
    place_of: in which file a missing tensor would be, as a message ends."""
    steps: list[Step] = []
    accounted: set[str] = set()  # in the model or the checkpoint, whether all is well with it or not
    for name, part in parts.items():
        if name not in wanted:
            continue
        target = wanted[name]
        weight = name.removesuffix(SCALE_SUFFIX).removesuffix(BLOCK_SCALE_SUFFIX)
        if weight != name and weight in wanted and _brings_scales(weight, parts.get(weight), wanted):
            continue  # follows from the weight
        to_float, to_fp8 = target.dtype in _FLOATS, target.dtype == torch.float8_e4m3fn
        to_fp4 = _is_fp4(name, wanted)
        scale_name = name + SCALE_SUFFIX
        scale = parts.get(scale_name)
        accounted.add(name)
        problem = _mismatch(part, target, to_fp4)
        if to_float and part.info.dtype == "F8_E4M3":
            accounted.add(scale_name)
            problem = problem or scale_problem(part, scale, ("F32", "F8_E8M0"), (_BLOCK, _BLOCK))
            make = partial(_dequantize, name, target.dtype, dequantize_per_block)
        elif part.is_packed and (to_float or to_fp8 or to_fp4):
            accounted |= {scale_name, name + BLOCK_SCALE_SUFFIX} if to_fp4 else {scale_name}
            problem = problem or scale_problem(part, scale, ("F8_E8M0",), (1, GROUP))
            if to_float:
                make = partial(_dequantize, name, target.dtype, dequantize_fp4)
            else:
                make = partial(_widen if to_fp8 else _keep, name)
        else:
            scale = None
            make = partial(_cast, name, target.dtype)
        if problem:
            problems.add(f"{part.info.file}: {problem}")
            continue
        steps.append(Step((part,) if scale is None else (part, scale), make))

    for name, target in wanted.items():
        of_weight = name.endswith(BLOCK_SCALE_SUFFIX) and name.removesuffix(BLOCK_SCALE_SUFFIX) in wanted
        if name not in accounted and not of_weight:
            described = f"{_FLOATS.get(target.dtype) or _EXACT.get(target.dtype, target.dtype)} {list(target.shape)}"
            place = place_of(name) if problems.shows_more else ""
            problems.add(f"{name}: missing; the model expects {described}{place}")
    for name, part in parts.items():
        if name not in accounted:
            problems.add(f"{part.info.file}: unexpected {part.label} ({part.info})")
    return steps


def _is_fp4(name: str, wanted: dict[str, Target]) -> bool:
    """Whether the model keeps the weight `name` in FP4: other bytes have no block scales."""
    return wanted[name].dtype == torch.int8 and name + BLOCK_SCALE_SUFFIX in wanted


def _brings_scales(name: str, part: Part | None, wanted: dict[str, Target]) -> bool:
    """Whether the scales of the weight `name` are made together with it. part: the checkpoint's."""
    quantised = wanted[name].dtype == torch.float8_e4m3fn or _is_fp4(name, wanted)
    return part is not None and part.is_packed and quantised


def _cast(name: str, dtype: torch.dtype, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype)}


def _dequantize(
    name: str, dtype: torch.dtype, dequantize: Callable[..., torch.Tensor], q: torch.Tensor, scale: torch.Tensor
) -> dict[str, torch.Tensor]:
    return {name: dequantize(q, scale, dtype)}


def _widen(name: str, packed: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    q, block_scale = widen_fp4(packed, scale)
    return {name: q, name + SCALE_SUFFIX: block_scale}


def _keep(name: str, packed: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    block_scale = fp4_block_scales(packed, scale)
    return {name: packed.view(torch.int8), name + SCALE_SUFFIX: scale, name + BLOCK_SCALE_SUFFIX: block_scale}


def _mismatch(part: Part, target: Target, to_fp4: bool) -> str | None:
    info, label = part.info, part.label
    may_be_packed = to_fp4 or target.dtype in _FLOATS or target.dtype == torch.float8_e4m3fn
    shape = part.shape if may_be_packed else info.shape
    expected = (*target.shape[:-1], 2 * target.shape[-1]) if to_fp4 else target.shape
    if shape != expected:
        stands_for = f", FP4 values of {list(shape)}" if shape != info.shape else ""
        return f"{label} has shape {list(info.shape)}{stands_for}; the model expects {list(expected)}"
    if may_be_packed and part.is_packed:
        if info.dtype == "F4" and part.is_cut_by_columns:  # its shape counts values, and what is read of it bytes
            return f"{label} is F4 and cut by columns, which is not supported"
        return None
    if to_fp4:
        return f"{label} is {info.dtype}; the model's FP4 accepts {', '.join(sorted(PACKED))}"
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


def scale_problem(part: Part, scale: Part | None, dtypes: tuple[str, ...], block: tuple[int, int]) -> str | None:
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
