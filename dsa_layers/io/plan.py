"""How the tensors of a model, or of a converted checkpoint, are made of those of a checkpoint, decided from names,
shapes and dtypes alone."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from dsa import dequantize_per_block, fp4_block_scales, widen_fp4
from dsa_layers.errors import CheckpointError
from dsa_layers.io.directory import Checkpoint, TensorInfo
from dsa_layers.io.tensors import (
    BLOCK_SCALE_SUFFIX,
    DTYPES,
    FLOATS,
    GROUP,
    SCALE_SUFFIX,
    Index,
    dequantize_fp4,
    quantize,
    sliced,
)
from dsa_layers.layers.linear import BLOCK

# A tensor's name and shape -> the names of its parts, each with its slice; () is the whole tensor.
PartsOf = Callable[[str, tuple[int, ...]], dict[str, Index]]

# Dtypes of packed FP4, and the values per column that the header counts: I8 counts bytes, F4 counts values.
PACKED = {"I8": 2, "F4": 1}


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor to make, or a slice of one that the checkpoint stores as a tensor of its own.

    name, whole: the name and shape of the whole tensor
    index: the slice; () for the whole tensor
    """

    name: str
    index: Index
    whole: tuple[int, ...]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the slice."""
        return sliced(self.whole, self.index)


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the checkpoint, or the slice `index` of it. name: the name of the target; info: of the slice."""

    name: str
    stored: str
    index: Index
    info: TensorInfo

    @property
    def label(self) -> str:
        """The target's name, and the checkpoint's if it is another."""
        if not self.index:
            return self.name if self.stored == self.name else f"{self.name} (stored as {self.stored})"
        places = (f"{i.start or 0}:{i.stop or ''}" if isinstance(i, slice) else str(i) for i in self.index)
        return f"{self.name} (stored as {self.stored}[{', '.join(places)}])"

    @property
    def kind(self) -> str | None:
        """How the part may be quantised; an I8 matrix is FP4 only where a target can take FP4."""
        if self.info.dtype in PACKED and len(self.info.shape) == 2:
            return "FP4"
        return "FP8" if self.info.dtype == "F8_E4M3" else None


@dataclass(frozen=True, slots=True)
class Step:
    """Makes a target, with its scales if it is quantised, of a part and its scale.

    scale         the part's scale; None where the part is not quantised, or where the checkpoint has none
    stored        how the part is quantised: "FP4", "FP8" or None
    wanted        the same of the target
    scale_dtype   of the target's scale
    block_scale   whether the target has scales per block in addition to FP4's
    use_ue8m0     whether new FP8 scales are powers of two; None: float weights are not quantised
    """

    part: Part
    scale: Part | None
    target: Target
    stored: str | None
    wanted: str | None
    scale_dtype: torch.dtype | None
    block_scale: bool
    use_ue8m0: bool | None

    @property
    def parts(self) -> list[Part]:
        return [self.part] if self.scale is None else [self.part, self.scale]

    def make(self, tensor: torch.Tensor, scale: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """tensor, scale: the values of `parts`. Raises ValueError for FP4 that FP8 cannot hold."""
        name, dtype = self.part.name, self.target.dtype
        if self.wanted is None:
            return {name: tensor.to(dtype) if self.stored is None else self._dequantized(tensor, scale, dtype)}
        if self.stored == self.wanted:
            tensor = tensor.view(dtype)
        elif self.stored == "FP4":
            tensor, scale = widen_fp4(tensor, scale)
        else:
            values = tensor.float() if self.stored is None else self._dequantized(tensor, scale, torch.float32)
            tensor, scale = quantize(values, self.wanted, use_ue8m0=bool(self.use_ue8m0))
        made = {name: tensor, name + SCALE_SUFFIX: scale.to(self.scale_dtype)}
        if self.block_scale:
            made[name + BLOCK_SCALE_SUFFIX] = fp4_block_scales(tensor, scale)
        return made

    def _dequantized(self, tensor: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        dequantize = dequantize_fp4 if self.stored == "FP4" else dequantize_per_block
        return dequantize(tensor, scale, dtype)

    def problem(self) -> str | None:
        """What prevents the step; None if nothing does."""
        info, label = self.part.info, self.part.label
        shape = _values(info.shape, PACKED[info.dtype]) if self.stored == "FP4" else info.shape
        expected = _values(self.target.shape, 2) if self.wanted == "FP4" else self.target.shape
        if shape != expected:
            return f"{label} has shape {list(shape)}; expected {list(expected)}"
        if self.stored is not None:
            return self._scale_problem(shape)
        hint = ""
        accepted = [*FLOATS.values()] if self.target.dtype in FLOATS else [DTYPES[self.target.dtype]]
        if self.wanted is not None and self.use_ue8m0 is not None:
            accepted = [*FLOATS.values()]
        elif self.wanted is not None and info.dtype in FLOATS.values():
            hint = ". Load a checkpoint that is not quantised with dequantize=True"
        return None if info.dtype in accepted else f"{label} is {info.dtype}; expected {' or '.join(accepted)}{hint}"

    def _scale_problem(self, shape: tuple[int, ...]) -> str | None:
        """shape: of the part's values."""
        info, label = self.part.info, self.part.label
        if len(shape) != 2:
            return f"{label} is {info}; only a matrix can be quantised"
        rows, columns = (1, GROUP) if self.stored == "FP4" else (BLOCK, BLOCK)
        if self.stored == "FP4" and shape[1] % GROUP:
            return f"{label} is {info}; FP4 has groups of {GROUP} columns, got {shape[1]} columns"
        cut = [i.start for i in self.part.index if isinstance(i, slice) and (i.start or 0) % BLOCK]
        if self.stored == "FP8" and cut:
            return f"{label} is {info.dtype} and cut at {cut[0]}, inside a block of {BLOCK}"
        expected = [-(-shape[0] // rows), -(-shape[1] // columns)]
        only_powers = self.stored == "FP4" or (self.stored == self.wanted and self.scale_dtype == torch.float8_e8m0fnu)
        dtypes = ["F8_E8M0"] if only_powers else ["F32", "F8_E8M0"]
        described = f"{' or '.join(dtypes)} {expected}"
        if self.scale is None:
            return (
                f"{label} is {info.dtype} and its scale {self.part.name}{SCALE_SUFFIX} is missing; expected {described}"
            )
        if self.scale.info.dtype not in dtypes or list(self.scale.info.shape) != expected:
            return f"{self.scale.label} is {self.scale.info}; expected {described} for the {list(info.shape)} weight"
        return None


def parts_of_checkpoint(
    checkpoint: Checkpoint,
    problems: list[str],
    skip: Callable[[str], bool],
    name_of: Callable[[str], str],
    cut: PartsOf,
) -> dict[str, Part]:
    """The parts of the checkpoint's tensors by the targets' names, in the order of the files. Adds to `problems`
    tensors that `name_of` or `cut` refuses, and names that come twice."""
    parts: dict[str, Part] = {}
    for stored, whole in checkpoint.tensors.items():
        if skip(stored):
            continue
        try:
            places = cut(name_of(stored), whole.shape)
        except CheckpointError as error:
            problems.append(f"{whole.file}: {stored}: {error}")
            continue
        for name, index in places.items():
            shape = sliced(whole.shape, index)
            size = whole.size * math.prod(shape) // max(math.prod(whole.shape), 1)
            part = Part(name, stored, index, replace(whole, shape=shape, size=size))
            if name in parts:
                problems.append(f"{whole.file}: {part.label} is there twice, as {parts[name].stored} too")
            parts[name] = part
    return parts


def make_plan(
    wanted: dict[str, Target], parts: dict[str, Part], problems: list[str], *, use_ue8m0: bool | None = None
) -> list[Step]:
    """How to make all targets, in the order of the files. Adds to `problems` what prevents it.

    A weight of dtype e4m3 or int8 is quantised if its scale is a target too. Its scales come with it.
    use_ue8m0: whether the scales of float weights that become FP8 are powers of two; None: such weights are a problem
    """
    kinds = {name: _kind(name, wanted) for name in wanted}
    quantised = [name for name, kind in kinds.items() if kind is not None]
    scales = {name + suffix for name in quantised for suffix in (SCALE_SUFFIX, BLOCK_SCALE_SUFFIX)}
    steps: list[Step] = []
    read = set(scales)
    for name, part in parts.items():
        if name in scales or name not in wanted:
            continue
        target, kind = wanted[name], kinds[name]
        stored = part.kind if kind is not None or target.dtype in FLOATS else None
        scale_name = name + SCALE_SUFFIX
        read |= {name} if stored is None else {name, scale_name}
        step = Step(
            part,
            None if stored is None else parts.get(scale_name),
            target,
            stored,
            kind,
            None if kind is None else wanted[scale_name].dtype,
            name + BLOCK_SCALE_SUFFIX in wanted,
            use_ue8m0,
        )
        steps.append(step)
        problem = step.problem()
        if problem is not None:
            problems.append(f"{part.info.file}: {problem}")
    for name, target in wanted.items():
        if name not in parts and name not in scales:
            problems.append(f"{name}: missing; expected {DTYPES[target.dtype]} {list(target.shape)}")
    for name, part in parts.items():
        if name not in read:
            problems.append(f"{part.info.file}: unexpected {part.label} ({part.info})")
    return steps


def _kind(name: str, wanted: dict[str, Target]) -> str | None:
    """How a target is quantised."""
    if name + SCALE_SUFFIX not in wanted:
        return None
    return {torch.float8_e4m3fn: "FP8", torch.int8: "FP4"}.get(wanted[name].dtype)


def _values(shape: tuple[int, ...], per_column: int) -> tuple[int, ...]:
    """The shape of a tensor's values, where a column holds several."""
    return (*shape[:-1], shape[-1] * per_column) if shape else shape
