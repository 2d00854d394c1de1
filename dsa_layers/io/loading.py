"""Load a model from a checkpoint."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import dsa
from dsa.runtime.checks import check_flag
from dsa_layers.config.model_config import ModelConfig
from dsa_layers.engine.fuse import fuse, prepare
from dsa_layers.engine.split import Cut, split
from dsa_layers.errors import CheckpointError, ConfigError
from dsa_layers.io.directory import Checkpoint, checkpoint_directory
from dsa_layers.io.tensors import SCALE_SUFFIX, Index, split_experts
from dsa_layers.io.weights import load_weights
from dsa_layers.layers.key_selection import FP8_DIM
from dsa_layers.layers.linear import BLOCK
from dsa_layers.models.family import family, read_config
from dsa_layers.models.precision import Precision, check_device
from dsa_layers.models.protocols import CheckpointModel
from dsa_layers.parallel.ranks import Ranks, raise_on_all_ranks, ranks_of

_OF_EXPERT = re.compile(r".*\.experts\.(\d+)\..*")


@torch.inference_mode(False)
def load_model(
    directory: str | PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    dequantize: bool = False,
    kv_cache: Literal["fp8", "model"] | None = None,
    widen_experts: bool = False,
    trainable: bool = False,
    drafter: bool = False,
    progress: bool = True,
    mesh: "torch.distributed.DeviceMesh | Ranks | None" = None,
) -> CheckpointModel:
    """Load the model of a checkpoint directory (config.json, safetensors) or of a hub id.

    directory      a path, or a hub id, OWNER/NAME, if the path does not exist (`checkpoint_directory`)
    device         device of the weights and of all computation; None: the GPU if there is one, else the CPU
    dtype          dtype of activations and unquantised weights (see `Precision`); None: the checkpoint's dtype
    dequantize     True: FP8 and FP4 weights are converted to `dtype`, and activations and index keys are not quantised
    kv_cache       format of cached latents (see `Precision`); None: "fp8" if the checkpoint is quantised, `dequantize`
                   is False and FP8 caches support the model's sizes, else "model"
    widen_experts  True: FP4 experts are converted to FP8, which takes twice the memory. False: they stay FP4. The
                   results are the same. With `dequantize` this option has no effect
    trainable      True: the model is in training mode and parameters require gradients, except those that are not
                   learned by gradients (routers' biases, tables of experts, LeRoPE's alpha). A quantised checkpoint
                   then needs `dequantize`, because FP8 weights have no gradient. False: the model is in evaluation
                   mode, and no parameter requires a gradient
    drafter        True: the checkpoint's first multi-token-prediction layer becomes the model's attribute `drafter`
                   (see `Drafter`) and uses the model's embedding and head. False: `drafter` is None
    progress       True: show a progress bar on a terminal; with several ranks only rank 0 shows it
    mesh           a one-dimensional device mesh or `Ranks`: return this rank's part of the model (`split`), which is
                   for inference only. All ranks must call `load_model` together; if one rank fails, all ranks raise.
                   A rank reads only its parts of the split tensors. None: return the whole model

    On Hopper, FP8 index scores of prompts are accumulated in `dsa_layers.layers.key_selection.SCORE_ACCUMULATORS`,
    which is fp16. The attribute `accumulators` of an indexer changes this dtype for one indexer.
    Parameters are ordinary tensors even if the caller is in inference mode.
    Raises ConfigError or CheckpointError for a checkpoint that cannot be used; these ValueErrors name the file, field
    or tensor. Raises ValueError or TypeError, which names the argument, for any other wrong argument. Raises
    DoesNotDivide, a ValueError, if the model cannot be split into equal parts for the ranks.
    """
    device = check_device(device)
    check_flag("dequantize", dequantize)
    check_flag("widen_experts", widen_experts)
    check_flag("trainable", trainable)
    check_flag("drafter", drafter)
    ranks = ranks_of(mesh)
    if trainable and ranks.size > 1:
        raise ValueError(f"trainable: a part of a model takes no gradient; accepted on one rank, got {ranks.size}")
    options = {"dtype": dtype, "dequantize": dequantize, "kv_cache": kv_cache}
    with raise_on_all_ranks(ranks, CheckpointError) as facts:
        directory = checkpoint_directory(directory)
        config = read_config(directory)
        precision = Precision.of(config, **options)
        if trainable and precision.fp8_linear:
            raise ValueError("trainable: FP8 weights take no gradient; accepted with dequantize=True, got False")
        checkpoint = Checkpoint(directory)
        precision = precision_of(config, checkpoint, widen_experts=widen_experts, **options)
        model = unfilled_model(config, precision, drafter=drafter)
        if not trainable:
            fuse(model)
        cuts: dict[str, Cut] = {}
        if ranks.size > 1:
            facts |= _facts(checkpoint, precision, device) | {"drafter": str(drafter)}
            cuts = split(model, ranks, blocks=config.quantization is not None)
        parts = RankParts(cuts, config.n_routed_experts, ranks)
    with raise_on_all_ranks(ranks, CheckpointError):
        load_weights(
            model,
            checkpoint,
            device=device,
            skip=model.skips,
            name_of=model.name_of,
            parts_of=parts.of_model,
            stored_parts_of=parts.of_checkpoint,
            progress=progress and ranks.rank == 0,
        )
        check_values(model, checkpoint.directory)
        model.init_buffers(device)
        if not trainable:
            prepare(model)
    return model.train(trainable)


def precision_of(
    config: ModelConfig, files: Checkpoint | None = None, *, widen_experts: bool = False, **options: Any
) -> Precision:
    """Return the precision that `load_model` chooses for a checkpoint.

    files: the checkpoint. Its tensors determine whether the experts are FP4, because the config.json of the earliest
    checkpoints with FP4 experts does not name the experts' dtype. None: `config` determines whether they are FP4
    widen_experts: whether FP4 experts are converted to FP8
    options: keyword arguments of `Precision.of`
    """
    precision = Precision.of(config, **options)
    in_fp4 = config.quantization is not None and config.quantization.expert_dtype == "fp4"
    if files is not None:
        experts = {name: info.dtype for name, info in files.tensors.items() if ".experts." in name}
        in_fp4 = {kind for name, kind in experts.items() if not name.endswith((".scale", SCALE_SUFFIX))} == {"I8"}
    return replace(precision, fp4_experts=precision.fp8_linear and in_fp4 and not widen_experts)


def check_values(model: nn.Module, directory: Path) -> None:
    """Call `check_values` of each module that has this method (see `CheckpointModel`). Raise CheckpointError for values
    that a forward pass does not support."""
    for name, module in model.named_modules():
        try:
            getattr(module, "check_values", lambda: None)()
        except ValueError as error:
            raise CheckpointError(f"{directory}: {name}.{error}") from None


class RankParts:
    """The parts of tensors that one rank loads. The methods `of_model` and `of_checkpoint` are the arguments `parts_of`
    and `stored_parts_of` of `load_weights`. Both use the checkpoint's expert numbers in the names of parts.

    cuts: {parameter's name: its cut}, from `split`
    experts: the number of experts per layer, over all ranks
    ranks: the `Ranks` of this process
    """

    def __init__(self, cuts: dict[str, Cut], experts: int, ranks: Ranks) -> None:
        self._cuts, self._experts, self._rank = cuts, experts, ranks.rank
        each = experts // ranks.size
        self._own = range(ranks.rank * each, (ranks.rank + 1) * each)

    def of_model(self, name: str, shape: tuple[int, ...]) -> dict[str, Index]:
        """Return the parts of a tensor of this rank's model, which contains only this rank's experts."""
        return split_experts(name, shape, experts=len(self._own), first=self._own.start)

    def of_checkpoint(self, name: str, shape: tuple[int, ...]) -> dict[str, Index]:
        """Return the parts of a checkpoint tensor that this rank reads."""
        parts = split_experts(name, shape, experts=self._experts)
        parts = {part: index for part, index in parts.items() if self._is_read(part)}
        if parts != {name: ()}:  # parts of a tensor of all experts, or {} for an expert of another rank
            return parts
        cut = self._cut(name, shape)
        return {name: () if cut is None else cut.part(self._rank)}

    def _is_read(self, name: str) -> bool:
        """Return False for an expert of another rank, else True. An expert number that is too large gives True, so that
        `make_plan` reports an unexpected tensor."""
        match = _OF_EXPERT.fullmatch(name)
        return match is None or int(match[1]) in self._own or int(match[1]) >= self._experts

    def _cut(self, name: str, shape: tuple[int, ...]) -> Cut | None:
        """Return the cut of a tensor, or None if the tensor is not cut. If the model dequantises a weight, the model
        has no scales for the weight, so derive the cut of the checkpoint's scales from the weight's cut."""
        cut = self._cuts.get(name)
        if cut is None:
            cut = self._cuts.get(name.removesuffix(SCALE_SUFFIX))
            return None if cut is None else Cut(cut.dim, shape, cut.size // BLOCK)
        if shape != cut.whole:
            raise CheckpointError(f"has shape {list(shape)}; expected {list(cut.whole)}")
        return cut


class _LeaveParameters(TorchFunctionMode):
    """A mode in which the functions of torch.nn.init do nothing. On the meta device they would only import Dynamo,
    which takes about two seconds."""

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


def unfilled_model(config: ModelConfig, precision: Precision, *, drafter: bool = False) -> CheckpointModel:
    """Return the model on the meta device. Raises ConfigError if a size in `config` does not permit the quantisation
    that `precision` asks for. Raises ValueError if `drafter` is True and the model's family has no drafter or `config`
    has no multi-token-prediction layer."""
    of_family = family(config.model_type)
    if drafter and of_family.drafter is None:
        raise ValueError(f"drafter: is not supported for model type {config.model_type!r}")
    if drafter and not config.num_nextn_predict_layers:
        raise ValueError("drafter: config.json must have num_nextn_predict_layers of at least 1, got 0")
    try:
        with torch.device("meta"), _LeaveParameters():
            model = of_family.model(config, precision)
            if drafter:
                model.drafter = of_family.drafter(model)
    except ValueError as error:
        raise ConfigError(f"config.json: {error}; accepted with dequantize=True: other sizes too") from None
    if model.precision.fp8_indexer and config.index_head_dim != FP8_DIM:
        raise ConfigError(
            f"config.json: field 'index_head_dim' is {config.index_head_dim}; accepted: {FP8_DIM}, as quantised index "
            "keys have; with dequantize=True others too"
        )
    return model


def _facts(checkpoint: Checkpoint, precision: Precision, device: torch.device) -> dict[str, str]:
    """Return facts that must be equal on all ranks: {name for error messages: value}."""
    config = (checkpoint.directory / "config.json").read_bytes()
    digest = hashlib.sha256(config + checkpoint.digest()).hexdigest()[:12]
    return {
        "dsa": dsa.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "checkpoint": f"one of digest {digest}",
        "precision": str(precision),
        "backend": dsa.backend() if device.type == "cuda" else "reference",
    }
