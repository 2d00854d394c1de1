"""The tensors of a DeepSeek-V3.2 checkpoint in the published format, as a function of its configuration.

Linear weights are [out, in]. F8_E4M3 weights have a sibling `<name>_scale_inv`, F32, with one scale per block of
128 x 128: [ceil(out / 128), ceil(in / 128)]; the weight is q * scale. What is never quantised: embeddings, heads, the
gate, the indexer's weights_proj and the MTP layers' eh_proj (BF16), all norms and the gate's bias (F32).
"""

from collections.abc import Iterator

from dsa_layers.families.deepseek_v32.config import DeepseekV32Config

Tensor = tuple[str, tuple[int, ...], str]


def deepseek_v32_tensor_manifest(config: DeepseekV32Config) -> dict[str, tuple[tuple[int, ...], str]]:
    """name -> (shape, dtype) of every tensor, in the order of the layers. dtype is safetensors' name for it.

    Holds the main model and the MTP layers, model.layers.{num_hidden_layers} and up. Without
    `config.quantization` the weights that would be F8_E4M3 are BF16, and there are no scales.
    """
    hidden, vocab, layers = config.hidden_size, config.vocab_size, config.num_hidden_layers
    tensors: list[Tensor] = [("model.embed_tokens.weight", (vocab, hidden), "BF16")]
    for layer in range(layers):
        tensors += _decoder_layer(config, f"model.layers.{layer}.", dense=layer < config.first_k_dense_replace)
    tensors.append(("model.norm.weight", (hidden,), "F32"))
    tensors.append(("lm_head.weight", (vocab, hidden), "BF16"))
    for layer in range(layers, layers + config.num_nextn_predict_layers):
        tensors += _mtp_layer(config, f"model.layers.{layer}.")
    return {name: (shape, dtype) for name, shape, dtype in tensors}


def _fp8_linear(config: DeepseekV32Config, name: str, out_features: int, in_features: int) -> Iterator[Tensor]:
    if config.quantization is None:
        yield f"{name}.weight", (out_features, in_features), "BF16"
        return
    rows, columns = config.quantization.weight_block
    yield f"{name}.weight", (out_features, in_features), "F8_E4M3"
    yield f"{name}.weight_scale_inv", (-(-out_features // rows), -(-in_features // columns)), "F32"


def _decoder_layer(config: DeepseekV32Config, prefix: str, dense: bool) -> Iterator[Tensor]:
    hidden = config.hidden_size
    yield f"{prefix}input_layernorm.weight", (hidden,), "F32"
    yield from _attention(config, f"{prefix}self_attn.")
    yield f"{prefix}post_attention_layernorm.weight", (hidden,), "F32"
    if dense:
        yield from _swiglu(config, f"{prefix}mlp.", config.intermediate_size)
        return
    experts = config.n_routed_experts
    yield f"{prefix}mlp.gate.weight", (experts, hidden), "BF16"
    yield f"{prefix}mlp.gate.e_score_correction_bias", (experts,), "F32"
    for expert in range(experts):
        yield from _swiglu(config, f"{prefix}mlp.experts.{expert}.", config.moe_intermediate_size)
    yield from _swiglu(config, f"{prefix}mlp.shared_experts.", config.moe_intermediate_size * config.n_shared_experts)


def _attention(config: DeepseekV32Config, prefix: str) -> Iterator[Tensor]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    q_rank, kv_rank = config.q_lora_rank, config.kv_lora_rank
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    yield from _fp8_linear(config, f"{prefix}q_a_proj", q_rank, hidden)
    yield f"{prefix}q_a_layernorm.weight", (q_rank,), "F32"
    yield from _fp8_linear(config, f"{prefix}q_b_proj", heads * (nope + rope), q_rank)
    yield from _fp8_linear(config, f"{prefix}kv_a_proj_with_mqa", kv_rank + rope, hidden)
    yield f"{prefix}kv_a_layernorm.weight", (kv_rank,), "F32"
    yield from _fp8_linear(config, f"{prefix}kv_b_proj", heads * (nope + value), kv_rank)
    yield from _fp8_linear(config, f"{prefix}o_proj", hidden, heads * value)

    index_heads, index_dim = config.index_n_heads, config.index_head_dim
    yield from _fp8_linear(config, f"{prefix}indexer.wq_b", index_heads * index_dim, q_rank)
    yield from _fp8_linear(config, f"{prefix}indexer.wk", index_dim, hidden)
    yield f"{prefix}indexer.k_norm.weight", (index_dim,), "F32"
    yield f"{prefix}indexer.k_norm.bias", (index_dim,), "F32"
    yield f"{prefix}indexer.weights_proj.weight", (index_heads, hidden), "BF16"


def _swiglu(config: DeepseekV32Config, prefix: str, inner: int) -> Iterator[Tensor]:
    yield from _fp8_linear(config, f"{prefix}gate_proj", inner, config.hidden_size)
    yield from _fp8_linear(config, f"{prefix}up_proj", inner, config.hidden_size)
    yield from _fp8_linear(config, f"{prefix}down_proj", config.hidden_size, inner)


def _mtp_layer(config: DeepseekV32Config, prefix: str) -> Iterator[Tensor]:
    hidden, vocab = config.hidden_size, config.vocab_size
    yield f"{prefix}embed_tokens.weight", (vocab, hidden), "BF16"
    yield f"{prefix}enorm.weight", (hidden,), "F32"
    yield f"{prefix}hnorm.weight", (hidden,), "F32"
    yield f"{prefix}eh_proj.weight", (hidden, 2 * hidden), "BF16"
    yield from _decoder_layer(config, prefix, dense=False)
    yield f"{prefix}shared_head.norm.weight", (hidden,), "F32"
    yield f"{prefix}shared_head.head.weight", (vocab, hidden), "BF16"
