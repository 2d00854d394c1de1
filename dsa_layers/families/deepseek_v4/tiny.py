"""The tiny DeepSeek-V4: every kind of layer occurs, the window alone and with entries of either size."""

from dsa_layers.families.family import TinyFields

# Parts of the tensors' names: outside of the layers, in a layer, in attention, in the mixture of experts, and of each
# matrix or hyper-connection.
_ORDER = (
    *("embed", "layers", "e_proj", "h_proj", "attn", "attn_norm", "hc_attn_fn", "hc_attn_base", "hc_attn_scale"),
    *("ffn_norm", "hc_ffn_fn", "hc_ffn_base", "hc_ffn_scale", "ffn", "enorm", "hnorm"),
    *("wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "attn_sink", "wo_a", "wo_b", "wgate", "ape", "weights_proj"),
    *("compressor", "indexer", "gate", "experts", "shared_experts", "w1", "w2", "w3", "weight", "scale", "bias"),
    *("tid2eid", "norm", "head", "hc_head_fn", "hc_head_base", "hc_head_scale", "mtp"),
)
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
    _ORDER,
)
