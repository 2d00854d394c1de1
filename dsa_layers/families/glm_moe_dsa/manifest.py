"""The tensors of a GLM-5 checkpoint in the published format, as a function of its configuration.

They are DeepSeek-V3.2's with these differences: norms are BF16; layers that share another's indexer have none; the
multi-token-prediction layers have no embedding and no head of their own.
"""

import re

from dsa_layers.families.deepseek_v32.manifest import deepseek_v32_tensor_manifest
from dsa_layers.families.glm_moe_dsa.config import GlmMoeDsaConfig


def glm_moe_dsa_tensor_manifest(config: GlmMoeDsaConfig) -> dict[str, tuple[tuple[int, ...], str]]:
    """name -> (shape, dtype) of every tensor, in the order of the layers. dtype is safetensors' name for it.

    Holds the main model and the MTP layers, which have an indexer each. Without `config.quantization` the weights that
    would be F8_E4M3 are BF16, and there are no scales.
    """
    shared = [f"model.layers.{i}.self_attn.indexer." for i, kind in enumerate(config.indexer_types) if kind == "shared"]
    left_out = (*shared, *_mtp_prefixes(config))
    return {
        name: (shape, "BF16" if re.search(r"norm\.(weight|bias)$", name) else dtype)
        for name, (shape, dtype) in deepseek_v32_tensor_manifest(config).items()
        if not name.startswith(left_out)
    }


def _mtp_prefixes(config: GlmMoeDsaConfig) -> list[str]:
    layers = range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers)
    return [f"model.layers.{i}.{name}." for i in layers for name in ("embed_tokens", "shared_head.head")]
