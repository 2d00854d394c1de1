"""Load a checkpoint's weights into a model, or into one rank's part of a model."""

import re
from collections.abc import Callable
from os import PathLike

import torch
from tqdm import tqdm

from dsa_layers.engine.split import Cut
from dsa_layers.errors import CheckpointError
from dsa_layers.io.directory import Checkpoint, raise_problems
from dsa_layers.io.memory import memory_of
from dsa_layers.io.plan import PartsOf, Step, Target, make_plan, parts_of_checkpoint
from dsa_layers.io.tensors import SCALE_SUFFIX, Index, split_experts
from dsa_layers.layers.linear import BLOCK
from dsa_layers.parallel.ranks import Ranks

_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def _whole(name: str, shape: tuple[int, ...]) -> dict[str, Index]:
    return {name: ()}


def load_weights(
    model: torch.nn.Module,
    source: str | PathLike[str] | Checkpoint,
    *,
    device: str | torch.device = "cpu",
    skip: Callable[[str], bool] = lambda name: False,
    name_of: Callable[[str], str] = str,
    parts_of: PartsOf = _whole,
    stored_parts_of: PartsOf | None = None,
    progress: bool = True,
) -> None:
    """Load the tensors of the checkpoint `source`, or of its directory, into `model` on `device`. The model must be on
    the meta device.

    skip             returns True for the name of a checkpoint tensor that is ignored
    name_of          turns the name of a checkpoint tensor into the model's name
    parts_of         returns the parts of a tensor from its name and shape; it is called for tensors of the model and,
                     without `stored_parts_of`, of the checkpoint. The loader makes each part of the model from the
                     checkpoint's part of the same name
    stored_parts_of  if given, returns the parts of a checkpoint tensor in place of `parts_of`
    progress         True: show one progress bar for all bytes on a terminal

    `name_of` and the function for checkpoint tensors may raise CheckpointError, with the reason, to refuse a tensor.
    Non-persistent buffers stay unchanged. The dtype of a model tensor determines which checkpoint tensors it accepts:
    - float8_e4m3fn, if the model has `<name>_scale_inv`: an F8_E4M3 matrix, which is copied, or packed FP4, which is
      widened to FP8 without loss (`dsa.widen_fp4`);
    - int8, if the model has `<name>_scale_inv`: packed FP4, which is copied. If the model has `<name>_block_scale`,
      `dsa.fp4_block_scales` computes it;
    - bf16, fp16, fp32 or fp64: a float tensor, which is cast, or an F8_E4M3 or FP4 matrix, which is dequantised;
    - any other dtype: a tensor of this dtype.
    The checkpoint's scale of a quantised matrix is named `<name>_scale_inv`. FP8 has one F32 or F8_E8M0 scale per
    128 x 128 block. FP4 (I8 of [O, I / 2], or F4) has one F8_E8M0 scale per 32 columns.

    Raises CheckpointError, with the model unchanged, for every problem of `Checkpoint`, and for tensors that are
    missing, unexpected, refused, duplicated, or of the wrong shape or dtype. These checks precede the first read, and
    one error lists all problems. Raises CheckpointError also if the model is larger than the memory of `device`, if a
    file cannot be read, or if e4m3 cannot represent a block of FP4 weights. The last error also applies to weights
    that stay FP4, because matrix products convert them to e4m3.
    """
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint(source)
    problems: list[str] = []
    parts = parts_of_checkpoint(checkpoint, problems, skip, name_of, stored_parts_of or parts_of)
    state = model.state_dict()
    wanted: dict[str, Target] = {}
    for name, tensor in state.items():
        whole = tuple(tensor.shape)
        pieces = parts_of(name, whole).items()
        wanted |= {piece: Target(name, index, whole, tensor.dtype) for piece, index in pieces}
    steps = make_plan(wanted, parts, problems)
    raise_problems(checkpoint.directory, problems)

    needed, memory = sum(tensor.nbytes for tensor in state.values()), memory_of(device)
    if memory is not None and needed > memory:
        raise CheckpointError(
            f"{checkpoint.directory}: the model takes {needed / 1e9:.1f} GB; the memory of {device} is "
            f"{memory / 1e9:.1f} GB"
        )
    loaded: dict[str, torch.Tensor] = {}
    total = sum(part.info.size for step in steps for part in step.parts)
    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading", disable=None if progress else True) as bar:
        for step in steps:
            for name, tensor in read_step(checkpoint, step, device).items():
                _place(tensor, wanted[name], loaded)
            bar.update(sum(part.info.size for part in step.parts))
    model.load_state_dict(loaded, assign=True)


def read_step(checkpoint: Checkpoint, step: Step, device: str | torch.device) -> dict[str, torch.Tensor]:
    """Read the parts of a step and make its tensors. Raises CheckpointError if a part cannot be read or converted."""
    tensors = [checkpoint.read(part.stored, device, part.index) for part in step.parts]
    try:
        return step.make(*tensors)
    except (ValueError, RuntimeError, MemoryError) as error:
        file = checkpoint.directory / step.part.info.file
        raise CheckpointError(f"{file}: {step.part.label}: {error}") from error


def _place(tensor: torch.Tensor, target: Target, loaded: dict[str, torch.Tensor]) -> None:
    """Store a target's tensor in `loaded`, whole or as a slice of the model's tensor. Several targets can be slices of
    one tensor of the model."""
    if not target.index:
        loaded[target.name] = tensor
        return
    if target.name not in loaded:
        loaded[target.name] = torch.empty(target.whole, dtype=tensor.dtype, device=tensor.device)
    loaded[target.name][target.index] = tensor


class RankParts:
    """The functions `parts_of` and `stored_parts_of` of `load_weights` for one rank. Both use the checkpoint's expert
    numbers in the names of parts.

    cuts: {parameter's name: its cut} of the model (`split`)
    experts: the number of experts per layer, over all ranks
    """

    def __init__(self, cuts: dict[str, Cut], experts: int, ranks: Ranks) -> None:
        self._cuts, self._experts, self._rank = cuts, experts, ranks.rank
        each = experts // ranks.size
        self._own = range(ranks.rank * each, (ranks.rank + 1) * each)

    def of_model(self, name: str, shape: tuple[int, ...]) -> dict[str, Index]:
        """Return the parts of a tensor of this rank's model, which contains only the experts of this rank."""
        parts = split_experts(name, shape, experts=len(self._own))
        return {_renumbered(part, self._own.start): index for part, index in parts.items()}

    def of_checkpoint(self, name: str, shape: tuple[int, ...]) -> dict[str, Index]:
        """Return the parts of a checkpoint tensor that this rank reads. Experts of other ranks are omitted."""
        parts = split_experts(name, shape, experts=self._experts)
        parts = {part: index for part, index in parts.items() if self._is_read(part)}
        if parts != {name: ()}:  # a tensor of all experts, or nothing because the expert is on another rank
            return parts
        cut = self._cut(name, shape)
        return {name: () if cut is None else cut.part(self._rank)}

    def _is_read(self, name: str) -> bool:
        """Return False for experts of other ranks. Return True for an expert number that is too large, so that
        `make_plan` reports an unexpected tensor."""
        match = _OF_EXPERT.fullmatch(name)
        return match is None or int(match[2]) in self._own or int(match[2]) >= self._experts

    def _cut(self, name: str, shape: tuple[int, ...]) -> Cut | None:
        """Return the cut of a tensor, or None if the tensor is not cut. For the scales of an FP8 weight that the model
        dequantises, derive the cut from the weight's cut."""
        cut = self._cuts.get(name)
        if cut is None:
            cut = self._cuts.get(name.removesuffix(SCALE_SUFFIX))
            return None if cut is None else Cut(cut.dim, shape, cut.size // BLOCK)
        if shape != cut.whole:
            raise CheckpointError(f"has shape {list(shape)}; expected {list(cut.whole)}")
        return cut


def _renumbered(name: str, first: int) -> str:
    match = _OF_EXPERT.fullmatch(name)
    return name if match is None else f"{match[1]}.{int(match[2]) + first}.{match[3]}"
