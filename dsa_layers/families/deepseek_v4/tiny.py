"""The tiny DeepSeek-V4: every kind of layer occurs, the window alone and with entries of either size."""

from dsa_layers.families.family import TinyFields

TINY = TinyFields(
    "deepseek_v4_flash_config.json",
    {
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
        "vocab_size": 2048,
    },
)
