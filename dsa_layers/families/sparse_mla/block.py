"""A layer of the families with latent attention, as a configuration describes it."""

from dsa_layers.families.precision import Precision
from dsa_layers.families.sparse_mla.config import SparseMLAConfig
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.decoder import DecoderBlock
from dsa_layers.layers.indexer import LightningIndexer
from dsa_layers.layers.moe import GroupedSigmoidRouter, MoE, SwiGLU
from dsa_layers.layers.rope import yarn_mscale


def _softmax_scale(config: SparseMLAConfig) -> float:
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    yarn = config.rope.yarn
    return scale * yarn_mscale(yarn.factor, yarn.mscale_all_dim) ** 2 if yarn else scale


def decoder_block(config: SparseMLAConfig, precision: Precision, *, indexed: bool, dense: bool) -> DecoderBlock:
    """A layer of the model that `config` describes. indexed: it has an indexer; dense: its MLP has no experts."""
    hidden, eps, dtype = config.hidden_size, config.rms_norm_eps, precision.dtype
    projections = precision.projections(config)
    indexer = None
    if indexed:
        indexer = LightningIndexer(
            hidden,
            config.q_lora_rank,
            n_heads=config.index_n_heads,
            head_dim=config.index_head_dim,
            top_k=config.index_topk,
            rope_interleaved=config.indexer_rope_interleave,
            quantize=precision.fp8_indexer,
            **projections,
        )
    attention = DSAAttention(
        hidden,
        config.num_attention_heads,
        indexer,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        rope_dim=config.qk_rope_head_dim,
        v_dim=config.v_head_dim,
        softmax_scale=_softmax_scale(config),
        eps=config.latent_norm_eps,
        **projections,
    )
    if dense:
        return DecoderBlock(hidden, attention, SwiGLU(hidden, config.intermediate_size, **projections), eps=eps)
    router = GroupedSigmoidRouter(
        hidden,
        config.n_routed_experts,
        config.num_experts_per_tok,
        n_group=config.n_group,
        topk_group=config.topk_group,
        normalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        dtype=dtype,
    )
    experts = {"n_shared": config.n_shared_experts, "fp4_experts": precision.fp4_experts}
    moe = MoE(hidden, config.moe_intermediate_size, router, **experts, **projections)
    return DecoderBlock(hidden, attention, moe, eps=eps)
