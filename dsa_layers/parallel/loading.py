"""From a checkpoint directory to a rank's part of its model; each rank reads its own slices of the files alone."""

import re
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Literal

import torch

from dsa_layers.arguments import flag
from dsa_layers.checkpoint import Checkpoint, load_weights
from dsa_layers.checkpoint.checks import check_layers, check_quantised_sizes, check_values
from dsa_layers.checkpoint.directory import Index
from dsa_layers.checkpoint.fused_experts import split_experts
from dsa_layers.checkpoint.loading import _holds_fp4_experts as holds_fp4_experts
from dsa_layers.checkpoint.plan import SCALE_SUFFIX
from dsa_layers.errors import CheckpointError
from dsa_layers.families.config import read_config
from dsa_layers.families.model import CheckpointModel
from dsa_layers.families.precision import Precision, check_device
from dsa_layers.families.registry import family
from dsa_layers.families.unfilled import unfilled
from dsa_layers.hub import checkpoint_directory
from dsa_layers.layers import joint_linear
from dsa_layers.layers.linear import BLOCK
from dsa_layers.parallel.cuts import Cut
from dsa_layers.parallel.ranks import Ranks
from dsa_layers.parallel.split import split

_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def load_model(
    directory: str | PathLike[str],
    ranks: Ranks,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    dequantize: bool = False,
    kv_cache: Literal["fp8", "model"] | None = None,
    widen_experts: bool = False,
    progress: bool = True,
) -> CheckpointModel:
    """This rank's part of the model of a checkpoint directory, for inference (`split`). Arguments are those of
    `dsa_layers.load_model`, and so are errors; what one rank finds in its part all ranks raise. DoesNotDivide for a
    model that does not come apart into so many equal parts. Of every tensor a rank reads its own slice alone; FP8
    weights are cut where their blocks of 128 end. The progress bar is the first rank's."""
    device = check_device(device)
    flag("dequantize", dequantize)
    flag("widen_experts", widen_experts)
    directory = checkpoint_directory(directory)
    config = read_config(directory)
    precision = Precision.of(config, dtype, dequantize=dequantize, kv_cache=kv_cache)
    check_quantised_sizes(config, precision, Path(directory) / "config.json")
    checkpoint = Checkpoint(directory)
    check_layers(config, checkpoint)
    if precision.fp8_linear and not widen_experts and holds_fp4_experts(checkpoint):
        precision = replace(precision, fp4_experts=True)
    with unfilled():
        model = family(config.model_type).model(config, precision)
    cuts = split(model, ranks, blocks=config.quantization is not None)
    each = config.n_routed_experts // ranks.size
    own = range(ranks.rank * each, (ranks.rank + 1) * each)
    names = {
        "skip": model.skips,
        "name_of": lambda stored: _Stored(model.name_of(stored)),
        "parts_of": partial(_parts_of, cuts, own, config.n_routed_experts, ranks.rank),
    }
    error = None
    try:
        load_weights(model, checkpoint, device=device, progress=progress and ranks.rank == 0, **names)
        check_values(model, checkpoint.directory)
    except (CheckpointError, RuntimeError, MemoryError) as caught:  # the latter two of a GPU or a host without room
        error = caught
    problem = ranks.first_problem(None if error is None else str(error) or "out of memory")
    if error is not None:
        raise error
    if problem is not None:
        raise CheckpointError(f"{problem[1]} (rank {problem[0]})")
    model.init_buffers(device)
    joint_linear.join(model)
    return model.eval()


class _Stored(str):
    """A tensor's name, where the checkpoint's whole tensor is meant and not the model's part of it."""


def _parts_of(
    cuts: dict[str, Cut], own: range, experts: int, rank: int, name: str, shape: tuple[int, ...]
) -> dict[str, Index]:
    """What a tensor of the checkpoint has for this rank, and what one of the model is made of. Experts go by their
    numbers in the checkpoint on both sides."""
    if not isinstance(name, _Stored):
        parts = split_experts(name, shape, experts=len(own))
        return {_renumbered(part, own.start): index for part, index in parts.items()}
    name = str(name)
    every = range(experts)  # a number beyond these is nobody's, and an unexpected tensor
    parts = split_experts(name, shape, experts=experts)
    parts = {part: index for part, index in parts.items() if (e := _expert(part)) in own or e not in every}
    if parts != {name: ()}:  # all experts in one tensor, or another rank's
        return parts
    cut = _cut_of(cuts, name, shape)
    return {name: () if cut is None else cut.part(rank)}


def _expert(name: str) -> int | None:
    """The number of the expert whose tensor it is."""
    match = _OF_EXPERT.fullmatch(name)
    return match and int(match[2])


def _renumbered(name: str, first: int) -> str:
    match = _OF_EXPERT.fullmatch(name)
    return name if match is None else f"{match[1]}.{int(match[2]) + first}.{match[3]}"


def _cut_of(cuts: dict[str, Cut], name: str, shape: tuple[int, ...]) -> Cut | None:
    """The cut of a tensor of this shape, or of the scales of one that the model has without."""
    cut = cuts.get(name)
    if cut is not None:
        if shape != cut.whole:
            raise CheckpointError(f"has shape {list(shape)}; the model expects {list(cut.whole)}")
        return cut
    cut = cuts.get(name.removesuffix(SCALE_SUFFIX))
    if cut is None:
        return None
    return Cut(cut.dim, shape, cut.size // BLOCK)
