"""From a checkpoint directory to a model that is ready to run."""

import hashlib
import logging
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Literal

import torch

import dsa
from dsa_layers.arguments import flag
from dsa_layers.config.model_config import ModelConfig
from dsa_layers.engine.fuse import fuse, prepare
from dsa_layers.engine.split import split
from dsa_layers.errors import CheckpointError
from dsa_layers.io.checks import check_quantised_sizes, check_values
from dsa_layers.io.directory import Checkpoint
from dsa_layers.io.fused_experts import split_experts
from dsa_layers.io.hub import checkpoint_directory
from dsa_layers.io.manifest import SCALE_SUFFIX
from dsa_layers.io.plan import PACKED
from dsa_layers.io.rank_parts import RankParts
from dsa_layers.io.unfilled import unfilled
from dsa_layers.io.weights import load_weights
from dsa_layers.models.config_file import read_config
from dsa_layers.models.precision import Precision, check_device
from dsa_layers.models.protocols import CheckpointModel
from dsa_layers.models.registry import family
from dsa_layers.parallel.ranks import Ranks, ranks_of
from dsa_layers.parallel.together import together

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_LOGGER = logging.getLogger(__name__)


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
    mesh: "DeviceMesh | Ranks | None" = None,
) -> CheckpointModel:
    """The model of a checkpoint directory (config.json, safetensors), or of a hub id; its class is the family's.

    device         to load to and compute on; None: the GPU where there is one, else the CPU
    dtype          of activations and unquantised weights; the checkpoint's own if None
    dequantize     FP8 and FP4 weights become `dtype` weights, and neither activations nor index keys are quantised
    kv_cache       how latents are cached (see Precision); "fp8" for FP8 checkpoints, "model" for others if None
    widen_experts  experts in FP4 become FP8 when they are loaded, without loss and for twice the memory. Otherwise they
                   stay FP4, and the results are the same. With `dequantize` they are neither
    trainable      parameters take gradients, but for what is not learned so (routers' biases, tables of experts), and
                   the model is in training mode. Of a quantised checkpoint, with `dequantize` only: FP8 takes no
                   gradient. Otherwise none does, and the model is in evaluation mode
    drafter        the checkpoint's multi-token-prediction layer, of several the first, becomes the model's `drafter`
                   (see `Drafter`), in the same precision. Copies of the embedding and the head that come with it are
                   not read: it has the model's own. Otherwise that is None, and the layer is not read
    mesh           of one dimension, or `Ranks`: this process's part of the model, for inference (`split`). All ranks
                   make the same calls. Of every tensor a rank reads its own slice alone; FP8 weights are cut where
                   their blocks of 128 end. What one rank finds in its part all raise; the first has the progress bar

    What prompts' index scores are accumulated in is the default of all models (`SCORE_ACCUMULATORS` of
    `dsa_layers.layers.score_accumulators`); `set_score_accumulators(model, ...)` changes it for one.
    Parameters are ordinary tensors also in inference mode. Inference tensors have no version counters, and what is made
    of weights once would be made anew in every pass.
    A hub id is OWNER/NAME, where there is no such directory, and is found by huggingface_hub (`checkpoint_directory`).
    Raises ConfigError or CheckpointError, both ValueErrors that name file, field or tensor, and ValueError or TypeError
    that name any other argument; nothing is half-loaded. DoesNotDivide, a ValueError, for a model that does not come
    apart into as many equal parts as there are ranks.
    """
    device = check_device(device)
    flag("dequantize", dequantize)
    flag("widen_experts", widen_experts)
    flag("trainable", trainable)
    flag("drafter", drafter)
    ranks = ranks_of(mesh)
    if trainable and ranks.size > 1:
        raise ValueError(f"trainable: a part of a model takes no gradient; accepted on one rank, got {ranks.size}")
    with together(ranks, CheckpointError) as facts:
        directory = checkpoint_directory(directory)
        config = read_config(directory)
        precision = Precision.of(config, dtype, dequantize=dequantize, kv_cache=kv_cache)
        if trainable and precision.fp8_linear:
            accepted = "accepted with dequantize=True, got dequantize=False"
            raise ValueError(f"trainable: FP8 weights take no gradient; {accepted}")
        check_quantised_sizes(config, precision, directory / "config.json")
        checkpoint = Checkpoint(directory)
        if precision.fp8_linear and not widen_experts and holds_fp4_experts(checkpoint):
            precision = replace(precision, fp4_experts=True)
        model = unfilled_model(config, precision, drafter=drafter)
        if not trainable:
            fuse(model)
        names = {"skip": model.skips, "name_of": model.name_of}
        names["parts_of"] = partial(split_experts, experts=config.n_routed_experts)
        if ranks.size > 1:
            facts |= _facts(checkpoint, precision, device) | {"drafter": str(drafter)}
            parts = RankParts(
                split(model, ranks, blocks=config.quantization is not None), config.n_routed_experts, ranks
            )
            names |= {"parts_of": parts.of_model, "stored_parts_of": parts.of_checkpoint}
    progress = progress and ranks.rank == 0
    if config.num_nextn_predict_layers and progress and not drafter:
        _LOGGER.debug("drafter=True drafts tokens with the multi-token-prediction layer, which is not loaded now.")
    with together(ranks, CheckpointError):
        load_weights(model, checkpoint, device=device, progress=progress, **names)
        check_values(model, checkpoint.directory)
        model.init_buffers(device)
        if not trainable:
            prepare(model)
    return model.train(trainable)


def unfilled_model(config: ModelConfig, precision: Precision, *, drafter: bool = False) -> CheckpointModel:
    """The model on the meta device. Raises ValueError if a drafter is asked for, and the family or the checkpoint has
    none."""
    of_family = family(config.model_type)
    if drafter and of_family.drafter is None:
        raise ValueError(f"drafter: is not supported for model type {config.model_type!r}")
    if drafter and not config.num_nextn_predict_layers:
        accepted = "accepted: a checkpoint with such a layer"
        raise ValueError(f"drafter: config.json has num_nextn_predict_layers=0; {accepted}")
    with unfilled():
        model = of_family.model(config, precision)
        if drafter:
            model.drafter = of_family.drafter(model)
    return model


def _facts(checkpoint: Checkpoint, precision: Precision, device: torch.device) -> dict[str, str]:
    """What parts of one model have in common, by names that a message can have."""
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


def holds_fp4_experts(checkpoint: Checkpoint) -> bool:
    """Whether all experts' weights are packed FP4, whatever config.json says: the earliest ones do not."""
    experts = {name: info for name, info in checkpoint.tensors.items() if ".experts." in name}
    dtypes = {info.dtype for name, info in experts.items() if not name.endswith((".scale", SCALE_SUFFIX))}
    return bool(dtypes) and dtypes <= PACKED.keys()
