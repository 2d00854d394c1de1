"""The sizes of the published models' FP8 linear layers that are one matrix each."""

import json
import tempfile
from functools import cache
from pathlib import Path

import torch

from dsa_layers.families.config import read_config
from dsa_layers.families.published import published_config
from dsa_layers.families.registry import family
from dsa_layers.layers.grouped_linear import GroupedLinear
from dsa_layers.layers.linear import BlockFP8Linear

MODELS = {
    "V3.2": "deepseek_v32_config.json",
    "GLM-5": "glm_5_config.json",
    "V4-Flash": "deepseek_v4_flash_config.json",
    "V4-Pro": "deepseek_v4_pro_config.json",
}
_QUANTIZATION = "quantization_config"


def linear_shapes(model: str) -> list[tuple[int, int]]:
    """(columns, channels) of the FP8 layers of a model that are one matrix each."""
    fields = published_config(MODELS[model])
    if _QUANTIZATION not in fields:  # GLM-5's FP8 release quantises what DeepSeek-V3.2's does
        fields |= {_QUANTIZATION: published_config(MODELS["V3.2"])[_QUANTIZATION]}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(fields))
        config = read_config(directory)
    with torch.device("meta"):
        modules = list(family(config.model_type).model(config).modules())
    grouped = {module.matrices for module in modules if isinstance(module, GroupedLinear)}
    layers = (module for module in modules if isinstance(module, BlockFP8Linear) and module not in grouped)
    return sorted({tuple(layer.weight.shape) for layer in layers})


@cache
def matrices() -> list[tuple[int, int]]:
    """(columns, channels) of all models' layers, by their channels."""
    found = {shape for model in MODELS for shape in linear_shapes(model)}
    return sorted(found, key=lambda shape: shape[::-1])
