"""Checkpoints in a family's published format: which dtype each tensor has, and its bytes."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from dsa_layers.config.fields import MAX_CONFIG_BYTES, Fields
from dsa_layers.config.model_config import ModelConfig
from dsa_layers.errors import ConfigError
from dsa_layers.io.checks import check_quantised_sizes
from dsa_layers.io.fp4 import GROUP, quantize
from dsa_layers.io.manifest import SCALE_SUFFIX, Manifest, published_manifest
from dsa_layers.io.plan import DTYPES
from dsa_layers.models.config_file import config_of, read_config
from dsa_layers.models.family import published_config
from dsa_layers.models.precision import Precision
from dsa_layers.models.registry import family
from dsa_layers.untrusted_files import read_json_object

Storage = Literal["bf16", "fp8", "fp4"]
STORAGES: tuple[Storage, ...] = ("bf16", "fp8", "fp4")

_KINDS = {"F8_E4M3": "FP8", "I8": "FP4"}
_EXPERT = re.compile(r"\.experts\.\d+\.")

# What a published multi-token-prediction layer holds copies of.
_COPIED = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
_COPY = re.compile(rf"model\.layers\.\d+\.({'|'.join(map(re.escape, _COPIED))})")
ORIGINALS = frozenset(_COPIED.values())


def copied_from(name: str) -> str | None:
    """The tensor that the tensor `name` is a copy of, if it is one."""
    match = _COPY.fullmatch(name)
    return None if match is None else _COPIED[match[1]]


def stored_as(like: Path, storage: Storage, *, drafter: bool) -> tuple[dict[str, Any], ModelConfig]:
    """config.json's fields for weights that are stored so, and the configuration that they describe.

    like: a directory with the model's config.json. A quantization_config that it has stays; otherwise it becomes that
    of the family's published release. drafter: whether the files have the multi-token-prediction layers.
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
        if "compress_ratios" in found:  # those of the multi-token-prediction layers are at the end
            found["compress_ratios"] = found["compress_ratios"][: found["num_hidden_layers"]]
    config = config_of(Fields(found, like / "config.json"))
    check_quantised_sizes(config, Precision.of(config, kv_cache="model"), like / "config.json")
    return found, config


def storage_manifest(config: ModelConfig, storage: Storage) -> Manifest:
    """The tensors of a checkpoint whose configuration is `stored_as` this. With "fp4" the routed experts are FP4, and
    the other quantised weights FP8."""
    manifest = published_manifest(config)
    if storage != "fp4":
        return manifest
    found = dict(manifest)
    for name, scale in scales_of(manifest).items():
        shape, dtype = manifest[name]
        if dtype == "F8_E4M3" and _EXPERT.search(name):
            found[name] = (shape[0], shape[1] // 2), "I8"
            found[scale] = (shape[0], shape[1] // GROUP), "F8_E8M0"
    return found


def scales_of(manifest: Manifest) -> dict[str, str]:
    """Quantised weight -> its scale, under the name that its family gives it."""
    weights = [name for name, (_, dtype) in manifest.items() if dtype in _KINDS]
    spellings = {name: (name + SCALE_SUFFIX, name.removesuffix("weight") + "scale") for name in weights}
    return {name: next(scale for scale in names if scale in manifest) for name, names in spellings.items()}


def shape_of_values(name: str, manifest: Manifest) -> tuple[int, ...]:
    """The shape of a tensor before it is quantised: FP4 (I8) packs two columns in one."""
    shape, dtype = manifest[name]
    return (shape[0], 2 * shape[1]) if dtype == "I8" else shape


def as_published(
    name: str, values: torch.Tensor, manifest: Manifest, scales: Mapping[str, str], *, use_ue8m0: bool
) -> dict[str, torch.Tensor]:
    """The tensor `name` of the manifest, and its scale if it has one, made of `values`.

    scales: `scales_of` the manifest; use_ue8m0: FP8 scales are powers of two
    """
    dtype = manifest[name][1]
    if dtype not in _KINDS:
        return {name: values.to(torch_dtype(dtype)).contiguous()}
    q, scale = quantize(values.float(), _KINDS[dtype], use_ue8m0=use_ue8m0)
    return {name: q, scales[name]: scale.to(torch_dtype(manifest[scales[name]][1]))}


def torch_dtype(name: str) -> torch.dtype:
    """name: the safetensors library's."""
    return next(dtype for dtype, known in DTYPES.items() if known == name)


def uses_ue8m0(config: ModelConfig) -> bool:
    """Whether FP8 scales of the checkpoint are powers of two."""
    return config.quantization is not None and config.quantization.scale_fmt == "ue8m0"
