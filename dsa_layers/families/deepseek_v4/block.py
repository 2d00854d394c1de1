"""A layer of DeepSeek-V4, as a configuration describes it."""

from dsa_layers.families.deepseek_v4.config import DeepseekV4Config
from dsa_layers.families.precision import Precision
from dsa_layers.layers.compressed_attention import CompressedAttention
from dsa_layers.layers.compressed_indexer import CompressedIndexer
from dsa_layers.layers.compressor import Compressor
from dsa_layers.layers.hyper_connections import HyperConnection
from dsa_layers.layers.hyper_decoder import HyperDecoderBlock
from dsa_layers.layers.moe import MoE, SqrtSoftplusRouter

INDEXED = "compressed_sparse_attention"


def hyper_block(config: DeepseekV4Config, precision: Precision, kind: str, *, hashed: bool) -> HyperDecoderBlock:
    """A layer of the model that `config` describes. kind: one of LAYER_TYPES; hashed: its experts follow from the
    token."""
    hidden, eps, dtype = config.hidden_size, config.rms_norm_eps, precision.dtype
    projections = precision.projections(config)
    ratio = config.compress_rates.get(kind)
    compressor = indexer = None
    if ratio is not None:
        indexed = kind == INDEXED
        options = {"overlap": indexed, "eps": eps, "dtype": dtype}
        compressor = Compressor(hidden, config.head_dim, ratio, **options)
        if indexed:
            indexer = CompressedIndexer(
                hidden,
                config.q_lora_rank,
                Compressor(hidden, config.index_head_dim, ratio, **options),
                n_heads=config.index_n_heads,
                top_k=config.index_topk,
                quantize=precision.fp8_indexer,
                **projections,
            )
    attention = CompressedAttention(
        hidden,
        config.num_attention_heads,
        dim=config.head_dim,
        window=config.sliding_window,
        q_lora_rank=config.q_lora_rank,
        o_groups=config.o_groups,
        o_lora_rank=config.o_lora_rank,
        compressor=compressor,
        indexer=indexer,
        eps=eps,
        **projections,
    )
    router = SqrtSoftplusRouter(
        hidden,
        config.n_routed_experts,
        config.num_experts_per_tok,
        hash_tokens=config.vocab_size if hashed else None,
        scale=config.routed_scaling_factor,
        dtype=dtype,
    )
    experts = {"n_shared": config.n_shared_experts, "limit": config.swiglu_limit, "fp4_experts": precision.fp4_experts}
    ffn = MoE(hidden, config.moe_intermediate_size, router, **experts, **projections)
    streams = {"iterations": config.hc_sinkhorn_iters, "eps": eps, "hc_eps": config.hc_eps}
    hc_attn, hc_ffn = (HyperConnection(hidden, config.hc_mult, **streams) for _ in range(2))
    return HyperDecoderBlock(hidden, attention, ffn, hc_attn=hc_attn, hc_ffn=hc_ffn, eps=eps)
