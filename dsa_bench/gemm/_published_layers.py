"""The sizes of the published models' FP8 linear layers, without routed experts and without V4's grouped `wo_a`."""

from functools import cache

from dsa_bench.e2e.stacks import FP8, model_of
from dsa_layers.layers.linear import BlockFP8Linear, GroupedLinear
from dsa_layers.models.family import published_config

MODELS = {
    "V3.2": "deepseek_v32_config.json",
    "GLM-5": "glm_5_config.json",
    "V4-Flash": "deepseek_v4_flash_config.json",
    "V4-Pro": "deepseek_v4_pro_config.json",
}


def linear_shapes(model: str) -> list[tuple[int, int]]:
    """Return the sorted (columns, channels) of a model's FP8 linear layers, each size once."""
    # FP8 is for GLM-5, whose pinned configuration is that of the bf16 release. The FP8 release quantises the same
    # layers as DeepSeek-V3.2. The other configurations have their own quantization_config, which replaces FP8.
    modules = list(model_of({"quantization_config": FP8} | published_config(MODELS[model])).modules())
    grouped = {module.matrices for module in modules if isinstance(module, GroupedLinear)}
    layers = (module for module in modules if isinstance(module, BlockFP8Linear) and module not in grouped)
    return sorted({tuple(layer.weight.shape) for layer in layers})


@cache
def matrices() -> list[tuple[int, int]]:
    """Return the (columns, channels) of all models' layers, each size once, sorted by channels."""
    return sorted({shape for model in MODELS for shape in linear_shapes(model)}, key=lambda shape: shape[::-1])
