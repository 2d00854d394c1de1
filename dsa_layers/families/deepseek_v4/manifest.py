"""The tensors of a DeepSeek-V4 checkpoint in the published format, as a function of its configuration.

Linear weights are [out, in]. An F8_E4M3 weight `<x>.weight` has a sibling `<x>.scale` with one scale per block of
128 x 128, F8_E8M0 or, in the releases whose scales are no powers of two, F32. Routed experts are packed e2m1: I8
[out, in / 2], with an F8_E8M0 scale per row and 32 columns. What is never quantised: embeddings, the head, gates,
compressors and the indexers' weights_proj (BF16, as are all norms); hyper-connections, sinks, compressors' ape and
gates' bias (F32); the table of experts by token (I64).
"""

from collections.abc import Iterator

from dsa_layers.families.deepseek_v4.config import DeepseekV4Config

Tensor = tuple[str, tuple[int, ...], str]

_BLOCK, _FP4_GROUP = 128, 32


def deepseek_v4_tensor_manifest(config: DeepseekV4Config) -> dict[str, tuple[tuple[int, ...], str]]:
    """name -> (shape, dtype) of every tensor, in the order of the layers. dtype is safetensors' name for it.

    Holds the main model and the MTP layers, mtp.0 and up. Without `config.quantization` the weights that would be
    F8_E4M3 or I8 are BF16, and there are no scales. A configuration with quantisation that does not name the experts'
    dtype is an early published one: FP4.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    tensors: list[Tensor] = [("embed.weight", (vocab, hidden), "BF16")]
    for i in range(config.num_hidden_layers):
        ratio = config.compress_rates.get(config.layer_types[i])
        indexed = config.layer_types[i] == "compressed_sparse_attention"
        tensors += _layer(config, f"layers.{i}.", ratio, indexed, hashed=config.hash_layers[i])
    tensors.append(("norm.weight", (hidden,), "BF16"))
    tensors.append(("head.weight", (vocab, hidden), "BF16"))
    tensors += _hyper_connection(config, "hc_head_", config.hc_mult, scales=1)
    for i in range(config.num_nextn_predict_layers):
        tensors += _mtp_layer(config, f"mtp.{i}.")
    return {name: (shape, dtype) for name, shape, dtype in tensors}


def _linear(config: DeepseekV4Config, name: str, out_features: int, in_features: int) -> Iterator[Tensor]:
    """A weight that the published checkpoints hold in FP8."""
    if config.quantization is None:
        yield f"{name}.weight", (out_features, in_features), "BF16"
        return
    scale_dtype = "F8_E8M0" if config.quantization.scale_fmt == "ue8m0" else "F32"
    yield f"{name}.weight", (out_features, in_features), "F8_E4M3"
    yield f"{name}.scale", (-(-out_features // _BLOCK), -(-in_features // _BLOCK)), scale_dtype


def _expert_linear(config: DeepseekV4Config, name: str, out_features: int, in_features: int) -> Iterator[Tensor]:
    if config.quantization is None or config.quantization.expert_dtype == "fp8":
        yield from _linear(config, name, out_features, in_features)
        return
    yield f"{name}.weight", (out_features, in_features // 2), "I8"
    yield f"{name}.scale", (out_features, in_features // _FP4_GROUP), "F8_E8M0"


def _layer(
    config: DeepseekV4Config, prefix: str, ratio: int | None, indexed: bool, *, hashed: bool
) -> Iterator[Tensor]:
    hidden, experts, streams = config.hidden_size, config.n_routed_experts, config.hc_mult
    yield from _attention(config, f"{prefix}attn.")
    if ratio is not None:
        yield from _compressor(config, f"{prefix}attn.compressor.", config.head_dim, ratio, overlap=indexed)
    if indexed:
        index_channels = config.index_n_heads * config.index_head_dim
        yield from _linear(config, f"{prefix}attn.indexer.wq_b", index_channels, config.q_lora_rank)
        yield f"{prefix}attn.indexer.weights_proj.weight", (config.index_n_heads, hidden), "BF16"
        yield from _compressor(config, f"{prefix}attn.indexer.compressor.", config.index_head_dim, ratio, overlap=True)
    for sublayer in ("attn", "ffn"):
        yield f"{prefix}{sublayer}_norm.weight", (hidden,), "BF16"
        yield from _hyper_connection(config, f"{prefix}hc_{sublayer}_", (2 + streams) * streams, scales=3)
    yield f"{prefix}ffn.gate.weight", (experts, hidden), "BF16"
    if hashed:
        yield f"{prefix}ffn.gate.tid2eid", (config.vocab_size, config.num_experts_per_tok), "I64"
    else:
        yield f"{prefix}ffn.gate.bias", (experts,), "F32"
    inner = config.moe_intermediate_size
    for expert in range(experts):
        for name, shape in (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden))):
            yield from _expert_linear(config, f"{prefix}ffn.experts.{expert}.{name}", *shape)
    shared = inner * config.n_shared_experts
    for name, shape in (("w1", (shared, hidden)), ("w2", (hidden, shared)), ("w3", (shared, hidden))):
        yield from _linear(config, f"{prefix}ffn.shared_experts.{name}", *shape)


def _attention(config: DeepseekV4Config, prefix: str) -> Iterator[Tensor]:
    hidden, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
    q_rank, o_channels = config.q_lora_rank, config.o_groups * config.o_lora_rank
    yield from _linear(config, f"{prefix}wq_a", q_rank, hidden)
    yield f"{prefix}q_norm.weight", (q_rank,), "BF16"
    yield from _linear(config, f"{prefix}wq_b", heads * dim, q_rank)
    yield from _linear(config, f"{prefix}wkv", dim, hidden)
    yield f"{prefix}kv_norm.weight", (dim,), "BF16"
    yield f"{prefix}attn_sink", (heads,), "F32"
    yield from _linear(config, f"{prefix}wo_a", o_channels, heads * dim // config.o_groups)
    yield from _linear(config, f"{prefix}wo_b", hidden, o_channels)


def _compressor(config: DeepseekV4Config, prefix: str, dim: int, ratio: int, *, overlap: bool) -> Iterator[Tensor]:
    channels = 2 * dim if overlap else dim
    yield f"{prefix}wkv.weight", (channels, config.hidden_size), "BF16"
    yield f"{prefix}wgate.weight", (channels, config.hidden_size), "BF16"
    yield f"{prefix}ape", (ratio, channels), "F32"
    yield f"{prefix}norm.weight", (dim,), "BF16"


def _hyper_connection(config: DeepseekV4Config, prefix: str, count: int, *, scales: int) -> Iterator[Tensor]:
    yield f"{prefix}fn", (count, config.hc_mult * config.hidden_size), "F32"
    yield f"{prefix}base", (count,), "F32"
    yield f"{prefix}scale", (scales,), "F32"


def _mtp_layer(config: DeepseekV4Config, prefix: str) -> Iterator[Tensor]:
    hidden = config.hidden_size
    yield from _linear(config, f"{prefix}e_proj", hidden, hidden)
    yield from _linear(config, f"{prefix}h_proj", hidden, hidden)
    yield from _layer(config, prefix, None, False, hashed=False)
    for name in ("enorm", "hnorm", "norm"):
        yield f"{prefix}{name}.weight", (hidden,), "BF16"
    yield from _hyper_connection(config, f"{prefix}hc_head_", config.hc_mult, scales=1)
