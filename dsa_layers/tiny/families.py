"""What each family's tiny checkpoint has in config.json, and the tensors that follow from it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsa_layers import vendored
from dsa_layers.families.deepseek_v4.manifest import deepseek_v4_tensor_manifest
from dsa_layers.families.deepseek_v32.manifest import deepseek_v32_tensor_manifest
from dsa_layers.families.glm_moe_dsa.manifest import glm_moe_dsa_tensor_manifest

VOCAB_SIZE = 2048

Manifest = dict[str, tuple[tuple[int, ...], str]]

_FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}

# Every kind of layer occurs: dense and sparse, with an indexer and without one; windows, and entries of either size.
_SPARSE_MLA = {
    "first_k_dense_replace": 1,
    "hidden_size": 512,
    "index_topk": 128,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 256,
    "vocab_size": VOCAB_SIZE,
}
_DEEPSEEK_V32 = {**_SPARSE_MLA, "n_group": 2, "num_hidden_layers": 4, "topk_group": 1}
_GLM_MOE_DSA = {
    **_SPARSE_MLA,
    "eos_token_id": [1],
    "index_skip_topk_offset": 2,
    "index_topk_freq": 2,
    "indexer_types": ["full", "full", "shared", "full", "shared"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"],
    "num_hidden_layers": 5,
    "pad_token_id": 1,
    # The published file is the BF16 release's; in the FP8 release scales are no powers of two.
    "quantization_config": _FP8,
}
_DEEPSEEK_V4 = {
    "compress_ratios": [0, 4, 128, 4, 0],
    "hidden_size": 512,
    "index_topk": 64,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "num_attention_heads": 8,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "num_hidden_layers": 4,
    "o_groups": 2,
    "o_lora_rank": 128,
    "q_lora_rank": 256,
    "vocab_size": VOCAB_SIZE,
}


@dataclass(frozen=True)
class Family:
    """published: the pinned configuration; changes: the fields in which the tiny one differs from it; manifest: the
    tensors of a configuration, name -> (shape, safetensors' dtype)."""

    published: str
    changes: dict[str, Any]
    manifest: Callable[[Any], Manifest]

    def fields(self, *, quantized: bool) -> dict[str, Any]:
        """Those of config.json."""
        path = Path(vendored.__file__).parent / self.published
        fields = json.loads(path.read_text(encoding="utf-8")) | self.changes
        del fields["transformers_version"]  # which did not write this one
        of_quantization = [name for name in ("expert_dtype", "quantization_config") if name in fields]
        quantization = {name: fields.pop(name) for name in of_quantization}
        return fields | quantization if quantized else fields


FAMILIES = {
    "deepseek_v32": Family("deepseek_v32_config.json", _DEEPSEEK_V32, deepseek_v32_tensor_manifest),
    "glm_moe_dsa": Family("glm_5_2_config.json", _GLM_MOE_DSA, glm_moe_dsa_tensor_manifest),
    "deepseek_v4": Family("deepseek_v4_flash_config.json", _DEEPSEEK_V4, deepseek_v4_tensor_manifest),
}
