"""Derive the tensors of a checkpoint in a family's published format from the model, and convert values to them."""

import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch

from dsa_layers.config.fields import MAX_CONFIG_BYTES, Fields
from dsa_layers.config.model_config import ModelConfig
from dsa_layers.errors import ConfigError
from dsa_layers.io.loading import check_quantised_sizes, unfilled_model
from dsa_layers.io.tensors import (
    BLOCK_SCALE_SUFFIX,
    DTYPES,
    SCALE_SUFFIX,
    TORCH_DTYPES,
    quantize,
    sliced,
    split_experts,
)
from dsa_layers.models.config_file import config_of, read_config
from dsa_layers.models.family import PublishedFormat, published_config
from dsa_layers.models.precision import Precision
from dsa_layers.models.protocols import CheckpointModel
from dsa_layers.models.registry import family
from dsa_layers.untrusted_files import read_json_object

# {tensor's name: (shape, dtype's name in safetensors)}
Manifest = dict[str, tuple[tuple[int, ...], str]]
Storage = Literal["bf16", "fp8", "fp4"]
STORAGES: tuple[Storage, ...] = ("bf16", "fp8", "fp4")

_NORM = re.compile(r"norm\.(weight|bias)")
_DRAFTER = "drafter."
_FIRST_EXPERT = ".experts.0."
_KINDS = {"F8_E4M3": "FP8", "I8": "FP4"}

# {end of a tensor's name in a published multi-token-prediction layer: the main model's tensor that it copies}
_COPIED = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
_COPY = re.compile(rf"model\.layers\.\d+\.({'|'.join(map(re.escape, _COPIED))})")
ORIGINALS = frozenset(_COPIED.values())


def published_manifest(config: ModelConfig, *, fp4_experts: bool | None = None) -> Manifest:
    """Return the tensors of a checkpoint in the published format: first the main model's tensors, then the tensors of
    each multi-token-prediction layer. Each scale follows its weight, and the tensors of an expert are contiguous.

    fp4_experts: whether routed experts are FP4; None: `config` decides. Without `config.quantization`, all weights are
    BF16. With it, experts are FP4 unless its expert_dtype is "fp8". None means FP4, because one early published
    configuration has FP4 experts and does not name their dtype.
    """
    fp8 = config.quantization is not None
    if fp4_experts is None:
        fp4_experts = fp8 and config.quantization.expert_dtype != "fp8"
    precision = Precision(torch.bfloat16, fp8, fp8_indexer=False, kv_cache="model", fp4_experts=fp4_experts)
    of = family(config.model_type)
    has_drafter = of.drafter is not None and config.num_nextn_predict_layers > 0
    model = unfilled_model(config, precision, drafter=has_drafter)
    tensors = _model_tensors(model, of.format)
    drafter = {name: entry for name, entry in tensors.items() if name.startswith(_DRAFTER)}
    main = {model.stored_name(name): entry for name, entry in tensors.items() if name not in drafter}
    manifest = _all_experts(main, config.n_routed_experts)
    if not has_drafter:
        return manifest
    matrix = (config.vocab_size, config.hidden_size), "BF16"
    embedding = {_DRAFTER + of.format.mtp_embedding: matrix} if of.format.mtp_embedding else {}
    head = {_DRAFTER + of.format.mtp_head: matrix} if of.format.mtp_head else {}
    for layer in range(config.num_nextn_predict_layers):
        stored = {model.stored_name(name, layer): entry for name, entry in (embedding | drafter | head).items()}
        manifest |= _all_experts(stored, config.n_routed_experts)
    return manifest


def _model_tensors(model: CheckpointModel, published: PublishedFormat) -> Manifest:
    """Return the tensors under the model's names. From each layer's routed experts, include only the first."""
    found = {}
    for name, tensor in model.state_dict().items():
        shape, dtype = tuple(tensor.shape), DTYPES[tensor.dtype]
        if _NORM.search(name):
            dtype = published.norm_dtype
        elif name.endswith(SCALE_SUFFIX) and model.config.use_ue8m0 and published.e8m0_scales:
            dtype = "F8_E8M0"
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


def _all_experts(manifest: Manifest, experts: int) -> Manifest:
    """Return the manifest with the tensors of all routed experts. All experts have the shapes of the first expert."""
    tensors = {}
    for is_expert, group in groupby(manifest.items(), lambda item: _FIRST_EXPERT in item[0]):
        group = list(group)
        for expert in range(experts if is_expert else 1):
            tensors |= {name.replace(_FIRST_EXPERT, f".experts.{expert}."): entry for name, entry in group}
    return tensors


def copied_from(name: str) -> str | None:
    """Return the name of the tensor that `name` is a copy of, or None if `name` is not a copy."""
    match = _COPY.fullmatch(name)
    return None if match is None else _COPIED[match[1]]


def stored_as(like: Path, storage: Storage, *, drafter: bool) -> tuple[dict[str, Any], ModelConfig]:
    """Return config.json's fields for weights in the format `storage`, and the configuration that these fields
    describe.

    like: a directory with the model's config.json. For "fp8" and "fp4" its quantization_config is kept; if there is
    none, the family's published release provides it
    drafter: whether the files contain the multi-token-prediction layers
    Raises ConfigError for fields that `load_model` would refuse.
    """
    read_config(like)
    fields = read_json_object(like / "config.json", ConfigError, MAX_CONFIG_BYTES)
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
    if not drafter:
        found["num_nextn_predict_layers"] = 0
        if "compress_ratios" in found:  # the ratios of the multi-token-prediction layers are at the end
            found["compress_ratios"] = found["compress_ratios"][: found["num_hidden_layers"]]
    config = config_of(Fields(found, like / "config.json"))
    check_quantised_sizes(config, Precision.of(config, kv_cache="model"), like / "config.json")
    return found, config


def scales_of(manifest: Manifest) -> dict[str, str]:
    """Return {quantised weight's name: its scale's name}. Families spell the names of scales differently."""
    weights = [name for name, (_, dtype) in manifest.items() if dtype in _KINDS]
    spellings = {name: (name + SCALE_SUFFIX, name.removesuffix("weight") + "scale") for name in weights}
    return {name: next(scale for scale in names if scale in manifest) for name, names in spellings.items()}


def shape_of_values(name: str, manifest: Manifest) -> tuple[int, ...]:
    """Return the shape of a tensor before quantisation. FP4 (I8) packs two columns into one."""
    shape, dtype = manifest[name]
    return (shape[0], 2 * shape[1]) if dtype == "I8" else shape


def as_published(
    name: str, values: torch.Tensor, manifest: Manifest, scales: Mapping[str, str], *, use_ue8m0: bool
) -> dict[str, torch.Tensor]:
    """Convert `values` to the dtype of the manifest's tensor `name`. Return {name: tensor}; for a quantised tensor the
    dictionary also contains the scale.

    scales: the result of `scales_of` for the manifest
    use_ue8m0: whether FP8 scales are powers of two
    """
    dtype = manifest[name][1]
    if dtype not in _KINDS:
        return {name: values.to(TORCH_DTYPES[dtype]).contiguous()}
    q, scale = quantize(values.float(), _KINDS[dtype], use_ue8m0=use_ue8m0)
    return {name: q, scales[name]: scale.to(TORCH_DTYPES[manifest[scales[name]][1]])}
