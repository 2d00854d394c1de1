"""Plan how the tensors of a model or of a new checkpoint are made from the tensors of a source, and load weights.

A plan is a list of steps. Each step makes one target: a tensor of the model or of the new checkpoint, or one expert's
slice of a tensor of all experts. Planning reads no weights, only names, shapes and dtypes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from typing import NamedTuple

import torch
from tqdm import tqdm

from dsa import dequantize_per_block, fp4_block_scales, widen_fp4
from dsa.reference import dequantize_fp4
from dsa.reference.gemm.fp4_cast import GROUP
from dsa_layers.errors import CheckpointError
from dsa_layers.io.directory import Checkpoint, raise_problems
from dsa_layers.io.tensors import (
    BLOCK_SCALE_SUFFIX,
    DTYPES,
    FLOATS,
    KINDS,
    SCALE_SUFFIX,
    TORCH_DTYPES,
    Index,
    TensorInfo,
    quantize,
    sliced,
    split_experts,
)
from dsa_layers.layers.linear import BLOCK

# A function that splits tensors: (tensor's name, shape) -> {name of a part: slice}
PartsOf = Callable[[str, tuple[int, ...]], dict[str, Index]]


class Part(NamedTuple):
    """A tensor of the source, or a slice of such a tensor, from which a target is made.

    name: the name of the target
    stored: the name of the tensor in the source
    index: the slice; () for the whole tensor
    info: the description of the slice
    """

    name: str
    stored: str
    index: Index
    info: TensorInfo

    @property
    def label(self) -> str:
        """The target's name, followed by the name of the source's tensor if the names differ."""
        return self.name if self.stored == self.name else f"{self.name} (stored as {self.stored})"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a plan: make a target, and its scales if it is quantised, from a part and the part's scale.

    part          the tensor of the source, or a slice of it
    scale         the part's scale; None if the part is not quantised or if the source has no scale for it
    target        the description of the tensor to make
    stored        the format of the part: "FP4", "FP8" or None
    wanted        the format of the target: "FP4", "FP8" or None
    scale_dtype   the dtype of the target's scale, by its name in safetensors; None if the target is not quantised
    block_scale   whether the target has scales per 128 x 128 block in addition to FP4's scales per 32 columns
    use_ue8m0     whether new FP8 scales are powers of two; None: the step does not quantise float weights
    """

    part: Part
    scale: Part | None
    target: TensorInfo
    stored: str | None
    wanted: str | None
    scale_dtype: str | None
    block_scale: bool
    use_ue8m0: bool | None

    @property
    def parts(self) -> list[Part]:
        return [self.part] if self.scale is None else [self.part, self.scale]

    def make(self, tensor: torch.Tensor, scale: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Return {name: tensor} of the target and its scales. tensor, scale: the tensors of `parts`, in this order.

        Raises ValueError for FP4 values that FP8 cannot represent.
        """
        name, dtype = self.part.name, TORCH_DTYPES[self.target.dtype]
        if self.wanted is None:
            return {name: tensor.to(dtype) if self.stored is None else self._dequantized(tensor, scale, dtype)}
        if self.stored == self.wanted:
            tensor = tensor.view(dtype)
        elif self.stored == "FP4":
            tensor, scale = widen_fp4(tensor, scale)
        else:
            values = tensor.float() if self.stored is None else self._dequantized(tensor, scale, torch.float32)
            tensor, scale = quantize(values, self.wanted, use_ue8m0=bool(self.use_ue8m0))
        made = {name: tensor, name + SCALE_SUFFIX: scale.to(TORCH_DTYPES[self.scale_dtype])}
        if self.block_scale:
            made[name + BLOCK_SCALE_SUFFIX] = fp4_block_scales(tensor, scale)
        return made

    def _dequantized(self, tensor: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        dequantize = dequantize_fp4 if self.stored == "FP4" else dequantize_per_block
        return dequantize(tensor, scale, dtype)

    def problem(self) -> str | None:
        """Return the reason why the step is impossible, or None if it is possible."""
        info, label = self.part.info, self.part.label
        shape, expected = unpacked(info.shape, self.stored), unpacked(self.target.shape, self.wanted)
        if shape != expected:
            return f"{label} has shape {list(shape)}; expected {list(expected)}"
        if self.stored is not None:
            return self._scale_problem(shape)
        is_quantised_here = self.wanted is not None and self.use_ue8m0 is not None
        accepted = FLOATS if self.target.dtype in FLOATS or is_quantised_here else (self.target.dtype,)
        if info.dtype in accepted:
            return None
        has_floats = self.wanted is not None and info.dtype in FLOATS
        hint = ". Load a checkpoint that is not quantised with dequantize=True" if has_floats else ""
        return f"{label} is {info.dtype}; expected {' or '.join(accepted)}{hint}"

    def _scale_problem(self, shape: tuple[int, ...]) -> str | None:
        """Return the reason why the format of a quantised part does not allow the part's shape, slice or scale. Return
        None if the format allows them. shape: the shape of the part's unpacked values."""
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
        only_powers = self.stored == "FP4" or (self.stored == self.wanted and self.scale_dtype == "F8_E8M0")
        dtypes = ["F8_E8M0"] if only_powers else ["F32", "F8_E8M0"]
        described = f"{' or '.join(dtypes)} {expected}"
        if self.scale is None:
            name = self.part.name + SCALE_SUFFIX
            return f"{label} is {info.dtype} and its scale {name} is missing; expected {described}"
        if self.scale.info.dtype not in dtypes or list(self.scale.info.shape) != expected:
            return f"{self.scale.label} is {self.scale.info}; expected {described} for the {list(info.shape)} weight"
        return None


def parts_of_checkpoint(
    tensors: dict[str, TensorInfo],
    problems: list[str],
    skip: Callable[[str], bool],
    name_of: Callable[[str], str],
    cut: PartsOf,
) -> dict[str, Part]:
    """Return {target's name: part} for a checkpoint's `tensors`, in their order.

    problems: receives a message for each tensor that `name_of` or `cut` refuses, and for each duplicate name
    skip: a function that returns whether a tensor of the checkpoint, given by name, is ignored
    name_of: a function that converts the name of a checkpoint's tensor to the name that `cut` receives
    cut: a function that returns the parts of a checkpoint's tensor
    """
    parts: dict[str, Part] = {}
    for stored, whole in tensors.items():
        if skip(stored):
            continue
        try:
            places = cut(name_of(stored), whole.shape)
        except CheckpointError as error:
            problems.append(f"{whole.file}: {stored}: {error}")
            continue
        for name, index in places.items():
            part = Part(name, stored, index, whole._replace(shape=sliced(whole.shape, index)))
            if name in parts:
                problems.append(f"{whole.file}: {part.label} is there twice, as {parts[name].stored} too")
            parts[name] = part
    return parts


def make_plan(
    wanted: dict[str, TensorInfo], parts: dict[str, Part], problems: list[str], *, use_ue8m0: bool | None = None
) -> list[Step]:
    """Return the steps that make all targets, in the order of `parts`.

    wanted: the targets, by name. An e4m3 or int8 target is quantised if its scale is a target too; one step then makes
    both
    parts: the parts of the source's tensors, by the name of the target that each part makes
    problems: receives a message for each target, part or step that is wrong
    use_ue8m0: whether the scales of float weights that become FP8 are powers of two; None: such weights are a problem
    """
    kinds = {name: KINDS.get(info.dtype) for name, info in wanted.items() if name + SCALE_SUFFIX in wanted}
    scales = {name + suffix for name, kind in kinds.items() if kind for suffix in (SCALE_SUFFIX, BLOCK_SCALE_SUFFIX)}
    steps: list[Step] = []
    read = set(scales)
    for name, part in parts.items():
        if name in scales or name not in wanted:
            continue
        target, kind, scale_name = wanted[name], kinds.get(name), name + SCALE_SUFFIX
        # I8 is also the dtype of integer tensors. An I8 part is FP4 only if the target is quantised or a float tensor.
        stored = KINDS.get(part.info.dtype) if kind is not None or target.dtype in FLOATS else None
        read |= {name} if stored is None else {name, scale_name}
        scale_dtype = None if kind is None else wanted[scale_name].dtype
        scale = None if stored is None else parts.get(scale_name)
        has_block_scale = name + BLOCK_SCALE_SUFFIX in wanted
        step = Step(part, scale, target, stored, kind, scale_dtype, has_block_scale, use_ue8m0)
        steps.append(step)
        problem = step.problem()
        if problem is not None:
            problems.append(f"{part.info.file}: {problem}")
    problems += [
        f"{name}: missing; expected {info}" for name, info in wanted.items() if name not in parts and name not in scales
    ]
    problems += [
        f"{part.info.file}: unexpected {part.label} ({part.info})" for name, part in parts.items() if name not in read
    ]
    return steps


def unpacked(shape: tuple[int, ...], kind: str | None) -> tuple[int, ...]:
    """Return the shape of a tensor's values. FP4 packs two values into each byte of the last dimension."""
    return (*shape[:-1], 2 * shape[-1]) if kind == "FP4" and shape else shape


def load_weights(
    model: torch.nn.Module,
    source: str | PathLike[str] | Checkpoint,
    *,
    device: str | torch.device = "cpu",
    skip: Callable[[str], bool] = lambda name: False,
    name_of: Callable[[str], str] = str,
    parts_of: PartsOf = split_experts,
    stored_parts_of: PartsOf | None = None,
    progress: bool = True,
) -> None:
    """Load the tensors of `source`, a `Checkpoint` or its directory, into `model`, as tensors on `device`.

    skip             a function that returns whether a checkpoint tensor, given by name, is ignored
    name_of          a function that converts the name of a checkpoint tensor to the model's name
    parts_of         a function (name, shape) -> {name of a part: slice} for a model tensor, such as one part per
                     expert. The loader makes each part of the model from the checkpoint's part of the same name
    stored_parts_of  the same for a checkpoint tensor; None: `parts_of`
    progress         True: show a progress bar on a terminal

    `name_of` and `stored_parts_of` may raise CheckpointError, with the reason, to refuse a tensor of the checkpoint.
    Non-persistent buffers stay unchanged. The dtype of a model tensor determines which checkpoint tensors it accepts:
    - float8_e4m3fn, if the model has `<name>_scale_inv`: an F8_E4M3 matrix, which is copied, or packed FP4, which is
      widened to FP8 without loss (`dsa.widen_fp4`);
    - int8, if the model has `<name>_scale_inv`: packed FP4, which is copied, or an F8_E4M3 matrix, which is rounded to
      FP4. If the model has `<name>_block_scale`, `dsa.fp4_block_scales` computes it;
    - bf16, fp16, fp32 or fp64: a float tensor, which is cast, or an F8_E4M3 or FP4 matrix, which is dequantised;
    - any other dtype: a tensor of this dtype.
    After `name_of`, the scale of a quantised matrix is named `<name>_scale_inv`. FP8 has one F32 or F8_E8M0 scale per
    128 x 128 block. FP4 (I8 [rows, columns / 2]) has one F8_E8M0 scale per 32 columns.

    Raises CheckpointError, with the model unchanged, for every problem that `Checkpoint` reports, and for tensors that
    are missing, unexpected, refused, duplicated, or of the wrong shape or dtype; these checks precede the first read.
    Raises CheckpointError also if a file cannot be read, or if e4m3 cannot represent a block of FP4 weights that become
    FP8 or get a `_block_scale`.
    """
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint(source)
    problems: list[str] = []
    parts = parts_of_checkpoint(checkpoint.tensors, problems, skip, name_of, stored_parts_of or parts_of)
    state = model.state_dict()
    places: dict[str, tuple[str, Index]] = {}  # {target: (the model's tensor, the target's slice of it)}
    wanted: dict[str, TensorInfo] = {}
    for name, tensor in state.items():
        for piece, index in parts_of(name, tuple(tensor.shape)).items():
            places[piece] = name, index
            wanted[piece] = TensorInfo(sliced(tensor.shape, index), DTYPES[tensor.dtype])
    steps = make_plan(wanted, parts, problems)
    raise_problems(checkpoint.directory, problems)

    # Allocate the whole model first, so that loading a model that is too large for a GPU fails before the first read.
    loaded = {name: torch.empty(x.shape, dtype=x.dtype, device=device) for name, x in state.items()}
    total = sum(part.info.size for step in steps for part in step.parts)
    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading", disable=None if progress else True) as bar:
        for step in steps:
            for piece, tensor in read_step(checkpoint, step, device).items():
                name, index = places[piece]
                loaded[name][index] = tensor
            bar.update(sum(part.info.size for part in step.parts))
    model.load_state_dict(loaded, assign=True)


def read_step(checkpoint: Checkpoint, step: Step, device: str | torch.device) -> dict[str, torch.Tensor]:
    """Read the parts of a step and make its tensors. Raises CheckpointError if this fails."""
    tensors = [checkpoint.read(part.stored, device, part.index) for part in step.parts]
    try:
        return step.make(*tensors)
    except (ValueError, RuntimeError, MemoryError) as error:
        file = checkpoint.directory / step.part.info.file
        raise CheckpointError(f"{file}: {step.part.label}: {error}") from error
