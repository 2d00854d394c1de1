"""Models of transformers with heads and channels that dsa's kernels support. All other sizes are small."""

import torch
from torch import nn
from transformers import (
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
)

_SMALL = {
    "vocab_size": 2048, "hidden_size": 512, "moe_intermediate_size": 128, "num_attention_heads": 16,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "q_lora_rank": 256,
    "index_head_dim": 128, "max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": None,
    "attn_implementation": "eager", "experts_implementation": "eager",
}  # fmt: skip
# Layers are dense, or (V4) choose experts by token id. Rounding could change a choice by activations, and this would
# hide errors of attention.
_DENSE = {"intermediate_size": 256, "n_group": 1, "topk_group": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
_YARN = {
    "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 1024, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
MODELS = {
    "deepseek_v32": lambda: DeepseekV32ForCausalLM(
        DeepseekV32Config(
            **_SMALL | _DENSE, num_hidden_layers=3, first_k_dense_replace=3, num_key_value_heads=16,
            qk_nope_head_dim=128, v_head_dim=128, index_n_heads=64, index_topk=128,
            rope_parameters=_YARN | {"rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0},
        )
    ),
    "glm_moe_dsa": lambda: GlmMoeDsaForCausalLM(
        GlmMoeDsaConfig(
            **_SMALL | _DENSE, num_hidden_layers=4, mlp_layer_types=["dense"] * 4, num_key_value_heads=16,
            qk_nope_head_dim=192, v_head_dim=256, index_n_heads=32, index_topk=128, index_topk_freq=3,
            index_skip_topk_offset=2, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )
    ),
    "deepseek_v4": lambda: DeepseekV4ForCausalLM(
        DeepseekV4Config(
            **_SMALL, num_hidden_layers=4, head_dim=512, qk_rope_head_dim=64, o_groups=4, o_lora_rank=64,
            compress_ratios=[0, 4, 128, 4], num_hash_layers=4, sliding_window=128, index_n_heads=64, index_topk=64,
            hc_mult=4, swiglu_limit=10.0, rope_parameters=_YARN | {"factor": 16.0},
        )
    ),
}  # fmt: skip


def make(family: str, device: str) -> nn.Module:
    """Return the model in fp32 with random weights, which are the same in every call and on every device."""
    torch.manual_seed(0)
    model = MODELS[family]().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.normal_(parameter, mean=1.0, std=0.1)
        elif name.endswith(("sinks", "base", "scale", "position_bias")):
            nn.init.normal_(parameter, std=0.5)
        elif parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            buffer.copy_(torch.rand(buffer.shape[0], 4).argsort(-1)[:, : buffer.shape[1]])
    return model.to(device)
