"""Derive, from a model's configuration, the tensors and the config.json of a checkpoint in the published format."""

import re
from pathlib import Path
from typing import Any, Literal

import torch

from dsa_layers.config.fields import Fields
from dsa_layers.config.model_config import ModelConfig
from dsa_layers.io.loading import unfilled_model
from dsa_layers.io.tensors import (
    BLOCK_SCALE_SUFFIX,
    DTYPES,
    SCALE_SUFFIX,
    TensorInfo,
    sliced,
    split_experts,
)
from dsa_layers.models.family import config_of, family, published_config, read_config, read_fields
from dsa_layers.models.precision import Precision

Manifest = dict[str, TensorInfo]
Storage = Literal["bf16", "fp8", "fp4"]
STORAGES: tuple[Storage, ...] = ("bf16", "fp8", "fp4")

_NORM = re.compile(r"norm\.(weight|bias)")
_DRAFTER = "drafter."

# Multi-token-prediction layers of DeepSeek-V3.2 contain copies of tensors: {end of a copy's name: the copied tensor}.
_COPIED = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
_COPY = re.compile(rf"model\.layers\.\d+\.({'|'.join(map(re.escape, _COPIED))})")


def published_manifest(config: ModelConfig, *, fp4_experts: bool | None = None) -> Manifest:
    """Return {name: description} of the tensors of a checkpoint in the published format. Projections are FP8 if
    `config.quantization` is not None.

    fp4_experts: whether routed experts are FP4. None: they are FP4 if `config.quantization` is not None and its
    expert_dtype is not "fp8". An expert_dtype of None means FP4, because the config.json of the earliest checkpoints
    with FP4 experts does not name the experts' dtype
    """
    fp8 = config.quantization is not None
    if fp4_experts is None:
        fp4_experts = fp8 and config.quantization.expert_dtype != "fp8"
    precision = Precision(torch.bfloat16, fp8, fp8_indexer=False, kv_cache="model", fp4_experts=fp4_experts)
    of = family(config.model_type)
    mtp_layers = 0 if of.drafter is None else config.num_nextn_predict_layers
    model = unfilled_model(config, precision, drafter=mtp_layers > 0)
    manifest: Manifest = {}
    for name, tensor in model.state_dict().items():
        shape, dtype = tuple(tensor.shape), DTYPES[tensor.dtype]
        if name.endswith(BLOCK_SCALE_SUFFIX):
            continue
        if _NORM.search(name):
            dtype = of.format.norm_dtype
        elif name.endswith(SCALE_SUFFIX) and config.use_ue8m0 and of.format.e8m0_scales:
            dtype = "F8_E8M0"
        for part, index in split_experts(name, shape).items():
            info = TensorInfo(sliced(shape, index), dtype)
            for layer in range(mtp_layers if name.startswith(_DRAFTER) else 1):
                manifest[model.stored_name(part, layer)] = info
    copies = [name for name in (of.format.mtp_embedding, of.format.mtp_head) if name is not None]
    for layer in range(mtp_layers):
        matrix = TensorInfo((config.vocab_size, config.hidden_size), "BF16")
        manifest |= {model.stored_name(_DRAFTER + name, layer): matrix for name in copies}
    return manifest


def copied_from(name: str) -> str | None:
    """Return the name of the main model's tensor that `name` is a copy of, or None if `name` is not a copy."""
    match = _COPY.fullmatch(name)
    return None if match is None else _COPIED[match[1]]


def stored_as(like: Path, storage: Storage, *, drafter: bool) -> tuple[dict[str, Any], ModelConfig]:
    """Return the fields of a config.json for weights in the format `storage`, and the configuration that they describe.

    like: a directory with the model's config.json. Unless `storage` is "bf16", the result has the quantization_config
    of this file, or of the family's tiny checkpoints if the file has none
    drafter: whether the checkpoint contains the multi-token-prediction layers
    Raises ConfigError for fields that `load_model` would refuse.
    """
    mtp_layers = read_config(like).num_nextn_predict_layers
    fields = read_fields(like / "config.json")
    tiny = family(fields["model_type"]).tiny
    published = published_config(tiny.published) | tiny.changes
    found = {name: value for name, value in fields.items() if name not in ("quantization_config", "expert_dtype")}
    if storage == "bf16":
        found |= {name: "bfloat16" for name in ("dtype", "torch_dtype") if name in fields}
    else:
        quantization = fields.get("quantization_config") or published["quantization_config"]
        found["quantization_config"] = {name: value for name, value in quantization.items() if name != "expert_dtype"}
        if "expert_dtype" in published:
            found["expert_dtype"] = storage
    if not drafter and mtp_layers:
        found["num_nextn_predict_layers"] = 0
        if "compress_ratios" in found:  # the ratios of the multi-token-prediction layers are at the end
            found["compress_ratios"] = found["compress_ratios"][: found["num_hidden_layers"]]
    config = config_of(Fields(found, like / "config.json"))
    return found, config


def with_scale_suffix(name: str) -> str:
    """Replace the suffix .scale, which scales have in some families' checkpoints, with .weight_scale_inv."""
    return re.sub(r"\.scale$", f".weight{SCALE_SUFFIX}", name)


def scales_of(manifest: Manifest) -> dict[str, str]:
    """Return {quantised weight's name: its scale's name in `manifest`}."""
    spelled = {name: with_scale_suffix(name) for name in manifest}
    return {full.removesuffix(SCALE_SUFFIX): name for name, full in spelled.items() if full.endswith(SCALE_SUFFIX)}
