"""A trained model as a checkpoint in the published format: FP8 blocks with scales, under the published names."""

import json
from os import PathLike
from pathlib import Path

import torch
from safetensors.torch import save_file

from dsa import per_block_cast_to_fp8
from dsa_layers.checkpoint import SCALE_SUFFIX, SINGLE_NAME
from dsa_layers.checkpoint.fused_experts import split_experts
from dsa_layers.families.config import read_config
from dsa_layers.families.deepseek_v32.manifest import deepseek_v32_tensor_manifest
from dsa_layers.families.deepseek_v32.model import DeepseekV32ForCausalLM

_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


def save_fp8_checkpoint(
    model: DeepseekV32ForCausalLM, directory: str | PathLike[str], fields: dict[str, object]
) -> None:
    """Writes config.json and model.safetensors into `directory`, which `load_model` then reads.

    model   with float weights, of any dtype and on any device
    fields  of config.json, with its `quantization_config`: weights that the published format keeps in FP8 are cast in
            blocks of 128 x 128, with powers of two as scales if its `scale_fmt` is "ue8m0"

    Raises ValueError for fields without quantisation, or of another shape than the model.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    config = read_config(directory)
    if config.quantization is None:
        raise ValueError("fields: must have a quantization_config")
    use_ue8m0 = config.quantization.scale_fmt == "ue8m0"
    floats = {}
    for name, tensor in model.state_dict().items():
        places = split_experts(name, tuple(tensor.shape))
        floats |= {stored: tensor[index] if index else tensor for stored, index in places.items()}
    tensors = {}
    for name, (shape, dtype) in deepseek_v32_tensor_manifest(config).items():
        if name.endswith(SCALE_SUFFIX):
            continue  # comes with its weight
        if name not in floats or tuple(floats[name].shape) != shape:
            got = list(floats[name].shape) if name in floats else "none"
            raise ValueError(f"fields: {name} has shape {list(shape)}, the model's {got}")
        value = floats[name].detach().cpu()
        if dtype in _DTYPES:
            tensors[name] = value.to(_DTYPES[dtype]).contiguous()
        else:
            tensors[name], tensors[name + SCALE_SUFFIX] = per_block_cast_to_fp8(value.float(), use_ue8m0)
    save_file(tensors, directory / SINGLE_NAME, metadata={"format": "pt"})
