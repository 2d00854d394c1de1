"""Plan how each tensor of a model, or of a converted checkpoint, is made from a checkpoint's tensors.

A plan depends only on names, shapes and dtypes, so no weight is read for it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from dsa import dequantize_per_block, fp4_block_scales, widen_fp4
from dsa.reference.gemm.fp4_cast import GROUP, dequantize_fp4
from dsa_layers.errors import CheckpointError
from dsa_layers.io.directory import Checkpoint, TensorInfo
from dsa_layers.io.tensors import (
    BLOCK_SCALE_SUFFIX,
    DTYPES,
    FLOATS,
    SCALE_SUFFIX,
    Index,
    quantize,
    sliced,
)
from dsa_layers.layers.linear import BLOCK

# A function: (tensor's name, its shape) -> {name of a part: its slice}. The slice () is the whole tensor.
PartsOf = Callable[[str, tuple[int, ...]], dict[str, Index]]

# {dtype of packed FP4: values per column of the header's shape}. With I8 the shape counts bytes, with F4 values.
PACKED = {"I8": 2, "F4": 1}


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor to make, or a slice of it if the checkpoint stores that slice as a separate tensor.

    name: the name of the whole tensor
    index: the slice; () for the whole tensor
    whole: the shape of the whole tensor
    dtype: the dtype of the tensor to make
    """

    name: str
    index: Index
    whole: tuple[int, ...]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the slice."""
        return sliced(self.whole, self.index)


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the checkpoint, or a slice of it.

    name: the name of the target that is made from this part
    stored: the name of the checkpoint's tensor
    index: the slice; () for the whole tensor
    info: the description of the slice
    """

    name: str
    stored: str
    index: Index
    info: TensorInfo

    @property
    def label(self) -> str:
        """The target's name. If the checkpoint uses another name or the part is a slice, the name and slice of the
        checkpoint's tensor follow."""
        if not self.index:
            return self.name if self.stored == self.name else f"{self.name} (stored as {self.stored})"
        places = (f"{i.start or 0}:{i.stop or ''}" if isinstance(i, slice) else str(i) for i in self.index)
        return f"{self.name} (stored as {self.stored}[{', '.join(places)}])"

    @property
    def kind(self) -> str | None:
        """The quantised format that the part may have: "FP4", "FP8" or None. An I8 matrix may also be an integer
        tensor; `make_plan` treats it as FP4 only if the target accepts FP4."""
        if self.info.dtype in PACKED and len(self.info.shape) == 2:
            return "FP4"
        return "FP8" if self.info.dtype == "F8_E4M3" else None


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a plan: make a target from a part and the part's scale. If the target is quantised, the step also
    makes the target's scales.

    part          the checkpoint's tensor, or a slice of it
    scale         the part's scale; None if the part is not quantised or if the checkpoint has no scale for it
    target        the tensor to make
    stored        the format of the part: "FP4", "FP8" or None
    wanted        the format of the target: "FP4", "FP8" or None
    scale_dtype   the dtype of the target's scale; None if the target is not quantised
    block_scale   whether the target has scales per 128 x 128 block in addition to FP4's scales per 32 columns
    use_ue8m0     whether new FP8 scales are powers of two; None: a float weight is not quantised
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
        """Return {name: tensor} of the target and its scales.

        tensor, scale: the tensors of `parts`, in this order
        Raises ValueError for FP4 values that FP8 cannot represent.
        """
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
        """Return a message that says why the step is impossible, or None if it is possible."""
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
        """Return a message about a shape, slice or scale that the part's quantised format does not allow, or None.

        shape: the shape of the part's unpacked values
        """
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
    """Return {target's name: part} for the checkpoint's tensors, in the order of the files.

    problems: receives a message for each tensor that `name_of` or `cut` refuses, and for each duplicate name
    skip: returns True for the name of a tensor that is ignored
    name_of: turns the name of a checkpoint's tensor into the target's
    cut: returns the parts of a checkpoint's tensor
    """
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
    """Return the steps that make all targets, in the order of the files.

    wanted: the targets, by name. An e4m3 or int8 target is quantised if its scale is a target too. The step that makes
    the target also makes its scales
    parts: the checkpoint's parts, by target name
    problems: receives a message for each target, part or step that is wrong
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
    """Return the quantised format of a target: "FP8", "FP4" or None."""
    if name + SCALE_SUFFIX not in wanted:
        return None
    return {torch.float8_e4m3fn: "FP8", torch.int8: "FP4"}.get(wanted[name].dtype)


def _values(shape: tuple[int, ...], per_column: int) -> tuple[int, ...]:
    """Return the shape of a tensor after unpacking. per_column: values in each stored column."""
    return (*shape[:-1], shape[-1] * per_column) if shape else shape
