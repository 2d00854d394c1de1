"""The tensors of a checkpoint in a family's published format, derived from the model."""

import re
from itertools import groupby

import torch

from dsa_layers.config.model_config import ModelConfig
from dsa_layers.io.fused_experts import sliced, split_experts
from dsa_layers.io.unfilled import unfilled
from dsa_layers.models.family import PublishedFormat
from dsa_layers.models.precision import Precision
from dsa_layers.models.protocols import CheckpointModel
from dsa_layers.models.registry import family

# Tensor's name -> (shape, safetensors' name of the dtype).
Manifest = dict[str, tuple[tuple[int, ...], str]]

SCALE_SUFFIX = "_scale_inv"
BLOCK_SCALE_SUFFIX = "_block_scale"  # of a tensor that a model has in addition to an FP4 weight, and no checkpoint has

_DTYPES = {
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int8: "I8",  # two FP4 values per byte
}
_NORM = re.compile(r"norm\.(weight|bias)")
_DRAFTER = "drafter."
_FIRST_EXPERT = ".experts.0."


def published_manifest(config: ModelConfig) -> Manifest:
    """The tensors of a checkpoint in the published format, in the order of the layers. Without `config.quantization`
    all weights are BF16. A configuration with quantisation that does not name the experts' dtype is an early published
    one: FP4."""
    fp8 = config.quantization is not None
    fp4 = fp8 and config.quantization.expert_dtype != "fp8"
    precision = Precision(torch.bfloat16, fp8, fp8_indexer=False, kv_cache="model", fp4_experts=fp4)
    of = family(config.model_type)
    with unfilled():
        model = of.model(config, precision)
        if of.drafter is not None and config.num_nextn_predict_layers:
            model.drafter = of.drafter(model)
    return manifest_of(model, of.format)


def manifest_of(model: CheckpointModel, published: PublishedFormat) -> Manifest:
    """Every tensor of the checkpoint that `model` describes: the main model's, then those of each
    multi-token-prediction layer. A scale follows its weight, and an expert's tensors follow each other.

    model: on the meta device, in bf16, in the checkpoint's quantisation, and with its drafter
    """
    tensors = _model_tensors(model, published)
    drafter = {name: entry for name, entry in tensors.items() if name.startswith(_DRAFTER)}
    main = {model.stored_name(name): entry for name, entry in tensors.items() if name not in drafter}
    manifest = _all_experts(main, model.config.n_routed_experts)
    if not drafter:
        return manifest
    matrix = (model.config.vocab_size, model.config.hidden_size), "BF16"
    embedding = {_DRAFTER + published.mtp_embedding: matrix} if published.mtp_embedding else {}
    head = {_DRAFTER + published.mtp_head: matrix} if published.mtp_head else {}
    for layer in range(model.config.num_nextn_predict_layers):
        stored = {model.stored_name(name, layer): entry for name, entry in (embedding | drafter | head).items()}
        manifest |= _all_experts(stored, model.config.n_routed_experts)
    return manifest


def _model_tensors(model: CheckpointModel, published: PublishedFormat) -> Manifest:
    """The tensors by the model's names, but of the routed experts only the first of each layer."""
    quantization = model.config.quantization
    use_ue8m0 = quantization is not None and quantization.scale_fmt == "ue8m0"
    found = {}
    for name, tensor in model.state_dict().items():
        dtype = stored_dtype(name, tensor, published, use_ue8m0=use_ue8m0)
        shape = tuple(tensor.shape)
        for part, index in split_experts(name, (1, *shape[1:])).items():
            found[part] = sliced(shape, index), dtype
    tensors = {}
    for name, entry in found.items():
        if name.endswith((SCALE_SUFFIX, BLOCK_SCALE_SUFFIX)):
            continue
        tensors[name] = entry
        if name + SCALE_SUFFIX in found:
            tensors[name + SCALE_SUFFIX] = found[name + SCALE_SUFFIX]
    return tensors


def stored_dtype(name: str, tensor: torch.Tensor, published: PublishedFormat, *, use_ue8m0: bool) -> str:
    """safetensors' dtype of one of the model's tensors in a checkpoint. use_ue8m0: scales are powers of two."""
    if _NORM.search(name):
        return published.norm_dtype
    if name.endswith(SCALE_SUFFIX) and use_ue8m0 and published.e8m0_scales:
        return "F8_E8M0"
    return _DTYPES[tensor.dtype]


def _all_experts(manifest: Manifest, experts: int) -> Manifest:
    """The manifest with the tensors of all routed experts, which have the same shapes as those of the first."""
    tensors = {}
    for is_expert, group in groupby(manifest.items(), lambda item: _FIRST_EXPERT in item[0]):
        group = list(group)
        for expert in range(experts if is_expert else 1):
            tensors |= {name.replace(_FIRST_EXPERT, f".experts.{expert}."): entry for name, entry in group}
    return tensors
