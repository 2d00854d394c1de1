"""Weights of a checkpoint, read into a model, or into a rank's part of one."""

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
    """Give `model`, built on the meta device, the tensors of the checkpoint `source` (or its directory), on `device`.

    skip             whether a checkpoint tensor is treated as absent
    name_of          turns a checkpoint tensor's name into the model's
    parts_of         gives the parts of a model tensor, by its name and shape, and those of a checkpoint tensor. A part
                     of the model is made of the checkpoint's part of the same name
    stored_parts_of  gives the parts of a checkpoint tensor instead
    progress         show one bar over all bytes that are read

    `name_of` and the function for checkpoint tensors may raise CheckpointError, with the reason, to refuse a tensor.
    Non-persistent buffers are left alone. A model tensor of dtype
    - float8_e4m3fn with a model tensor `<name>_scale_inv` takes an F8_E4M3 matrix as it is, or packed FP4, widened
      without loss (`dsa.widen_fp4`);
    - int8 with `<name>_scale_inv` takes packed FP4 as it is; if the model has `<name>_block_scale` too, it gets the
      scales of `dsa.fp4_block_scales`;
    - bf16, fp16, fp32 or fp64 takes a float tensor, cast, or an F8_E4M3 or FP4 matrix, dequantised;
    - any other takes its own dtype only.
    The checkpoint's scale of a quantised matrix is called `<name>_scale_inv`. FP8 has one scale per 128 x 128 block,
    F32 or F8_E8M0; FP4 (I8 of [O, I / 2], or F4) one F8_E8M0 per 32 columns.

    Raises CheckpointError, with the model unchanged, for every problem of `Checkpoint` and for tensors that are
    missing, unexpected, refused, there twice, or of the wrong shape or dtype: these checks precede the first read, and
    one error lists all problems. Also for a model larger than the memory of `device`, if a file then cannot be read, or
    for a block of FP4 weights that e4m3 cannot hold, also of weights that stay FP4: products use them as e4m3.
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
    """Read the step's parts and make its tensors. Raises CheckpointError if a part cannot be read or quantised."""
    tensors = [checkpoint.read(part.stored, device, part.index) for part in step.parts]
    try:
        return step.make(*tensors)
    except (ValueError, RuntimeError, MemoryError) as error:
        file = checkpoint.directory / step.part.info.file
        raise CheckpointError(f"{file}: {step.part.label}: {error}") from error


def _place(tensor: torch.Tensor, target: Target, loaded: dict[str, torch.Tensor]) -> None:
    """Put a target's tensor into the model's tensor, which may consist of several targets."""
    if not target.index:
        loaded[target.name] = tensor
        return
    if target.name not in loaded:
        loaded[target.name] = torch.empty(target.whole, dtype=tensor.dtype, device=tensor.device)
    loaded[target.name][target.index] = tensor


class RankParts:
    """Two functions for `load_weights`. Both number experts as the checkpoint does.

    cuts: of the model; experts: of all ranks
    """

    def __init__(self, cuts: dict[str, Cut], experts: int, ranks: Ranks) -> None:
        self._cuts, self._experts, self._rank = cuts, experts, ranks.rank
        each = experts // ranks.size
        self._own = range(ranks.rank * each, (ranks.rank + 1) * each)

    def of_model(self, name: str, shape: tuple[int, ...]) -> dict[str, Index]:
        """The parts of a tensor of the rank's model, whose experts are the rank's own."""
        parts = split_experts(name, shape, experts=len(self._own))
        return {_renumbered(part, self._own.start): index for part, index in parts.items()}

    def of_checkpoint(self, name: str, shape: tuple[int, ...]) -> dict[str, Index]:
        """The parts of a checkpoint's tensor that the rank reads, none of another rank's experts."""
        parts = split_experts(name, shape, experts=self._experts)
        parts = {part: index for part, index in parts.items() if self._is_read(part)}
        if parts != {name: ()}:  # all experts in one tensor, or another rank's expert
            return parts
        cut = self._cut(name, shape)
        return {name: () if cut is None else cut.part(self._rank)}

    def _is_read(self, name: str) -> bool:
        """False for the experts of other ranks. A number beyond all experts is read, and found to be unexpected."""
        match = _OF_EXPERT.fullmatch(name)
        return match is None or int(match[2]) in self._own or int(match[2]) >= self._experts

    def _cut(self, name: str, shape: tuple[int, ...]) -> Cut | None:
        """The cut of a tensor, or of the scales of an FP8 weight that the model has without scales."""
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
