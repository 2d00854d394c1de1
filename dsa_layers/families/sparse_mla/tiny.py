"""Fields of tiny checkpoints that DeepSeek-V3.2 and GLM-5 share: small widths, and the dimensions that kernels care
about as published."""

SPARSE_MLA_FIELDS = {
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
    "vocab_size": 2048,
}
