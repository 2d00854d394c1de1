"""The configuration that families of latent attention with a lightning indexer and mixture-of-experts MLPs share."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self, TypeVar

from dsa_layers.families.fields import (
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_SELECTED,
    MAX_SHARED_EXPERTS,
    MAX_TOKENS,
    Fields,
)
from dsa_layers.families.parts import (
    QuantizationConfig,
    RopeConfig,
    read_dtype,
    read_layers,
    read_mtp_layers,
    read_quantization,
    read_rope,
    read_token_ids,
    read_vocab_size,
    share_of_heads,
)

# transformers builds q_a_layernorm and kv_a_layernorm with this eps whatever rms_norm_eps says, and so does DeepSeek's
# inference code; here as there. GLM-5 publishes an rms_norm_eps of 1e-5: engines that take it for the latents too get
# latents that are smaller by 4.5e-6 / (mean square before the norm) of themselves, which bf16 does not show where that
# mean square is above 0.003.
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True)
class SparseMLAConfig:
    """What such a model needs to know. Names are config.json's own; dimensions are in elements.

    indexer_types: of each layer, "full" (has an indexer) or "shared" (attends to what the last full layer before it
    selected, and has none).
    index_share_for_mtp_iteration: whether further steps of a drafter attend to what its first step selected.
    indexer_rope_interleave: whether rope turns channels (2i, 2i + 1) of index queries and keys, or (i, i + dim / 2).
    latent_norm_eps: of q_a_layernorm and kv_a_layernorm; rms_norm_eps is that of all other RMSNorms.
    eos_token_ids: every id that ends a sequence, () if there is none. bos_token_id: None if there is none.
    dtype: of the tensors that are not quantised: "bfloat16", "float16" or "float32".
    quantization: None if no tensor is quantised.
    """

    model_type: ClassVar[str]

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    first_k_dense_replace: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    scoring_func: str
    topk_method: str
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    latent_norm_eps: float
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_types: tuple[str, ...]
    indexer_rope_interleave: bool
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    num_nextn_predict_layers: int
    quantization: QuantizationConfig | None
    dtype: str
    index_share_for_mtp_iteration: bool = False

    def fp8_widths(self) -> dict[str, int]:
        """Field of config.json -> a width that follows from it and that FP8 cuts into blocks of 128."""
        names = ["hidden_size", "q_lora_rank", "kv_lora_rank"]
        names += ["intermediate_size"] if self.first_k_dense_replace else []
        names += ["moe_intermediate_size"] if self.first_k_dense_replace < self.num_hidden_layers else []
        widths = {name: getattr(self, name) for name in names}
        return widths | {"v_head_dim": self.num_attention_heads * self.v_head_dim}

    def fp8_cache_sizes(self) -> dict[str, int]:
        """Field of config.json -> the size that it must have for latents to be cached in FP8."""
        return {"kv_lora_rank": 512, "qk_rope_head_dim": 64}

    def with_heads(self, heads: int) -> Self:
        """One GPU's share of a model whose attention heads several GPUs have."""
        return replace(self, num_attention_heads=share_of_heads(heads, self.num_attention_heads))


Config = TypeVar("Config", bound=SparseMLAConfig)


def read_sparse_mla(
    family: type[Config],
    fields: Fields,
    generation: Fields | None,
    *,
    indexer_types: tuple[str, ...],
    indexer_rope_interleave: bool,
    index_share_for_mtp_iteration: bool = False,
) -> Config:
    """A `family` from the fields that all families write alike. What they write in their own ways comes as arguments,
    read from `fields` before: fields that nobody has read by then are rejected."""
    # One accepted value each: another would need code that is not here.
    fields.one_of("hidden_act", ("silu",), default="silu")
    fields.one_of("attention_bias", (False,), default=False)
    fields.one_of("mlp_bias", (False,), default=False)
    fields.one_of("attention_dropout", (0,), default=0)
    fields.one_of("ep_size", (1,), default=1)
    fields.one_of("moe_layer_freq", (1,), default=1)
    # MLA rotates pairs (2i, 2i + 1). Some configurations write that down.
    fields.one_of("rope_interleave", (True,), default=True)

    vocab_size = read_vocab_size(fields)
    bos, eos = read_token_ids(fields, generation, vocab_size)
    config = family(
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        moe_intermediate_size=fields.integer("moe_intermediate_size"),
        num_hidden_layers=read_layers(fields),
        num_attention_heads=fields.integer("num_attention_heads", maximum=MAX_HEADS),
        first_k_dense_replace=fields.integer("first_k_dense_replace", minimum=0),
        n_routed_experts=fields.integer("n_routed_experts", maximum=MAX_EXPERTS),
        n_shared_experts=fields.integer("n_shared_experts", maximum=MAX_SHARED_EXPERTS),
        num_experts_per_tok=fields.integer("num_experts_per_tok"),
        n_group=fields.integer("n_group"),
        topk_group=fields.integer("topk_group"),
        norm_topk_prob=fields.boolean("norm_topk_prob"),
        routed_scaling_factor=fields.positive("routed_scaling_factor"),
        scoring_func=fields.one_of("scoring_func", ("sigmoid",), default="sigmoid"),
        topk_method=fields.one_of("topk_method", ("noaux_tc",), default="noaux_tc"),
        q_lora_rank=fields.integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
        rms_norm_eps=fields.epsilon("rms_norm_eps"),
        latent_norm_eps=LATENT_NORM_EPS,
        index_n_heads=fields.integer("index_n_heads", maximum=MAX_HEADS),
        index_head_dim=fields.integer("index_head_dim"),
        index_topk=fields.integer("index_topk", maximum=MAX_SELECTED),
        indexer_types=indexer_types,
        indexer_rope_interleave=indexer_rope_interleave,
        max_position_embeddings=fields.integer("max_position_embeddings", maximum=MAX_TOKENS),
        rope=read_rope(fields),
        tie_word_embeddings=fields.one_of("tie_word_embeddings", (False,), default=False),
        bos_token_id=bos,
        eos_token_ids=eos,
        num_nextn_predict_layers=read_mtp_layers(fields),
        quantization=read_quantization(fields),
        dtype=read_dtype(fields),
        index_share_for_mtp_iteration=index_share_for_mtp_iteration,
    )
    _check_consistency(fields, config)
    fields.warn_unread()
    return config


def _check_consistency(fields: Fields, config: SparseMLAConfig) -> None:
    heads = config.num_attention_heads
    fields.one_of("num_key_value_heads", (heads,), default=heads)
    qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    fields.one_of("qk_head_dim", (qk_head_dim,), default=qk_head_dim)
    if config.qk_rope_head_dim % 2:
        raise fields.error("qk_rope_head_dim", f"is {config.qk_rope_head_dim}", "an even number")
    if config.qk_rope_head_dim > config.index_head_dim:
        raise fields.error(
            "index_head_dim",
            f"is {config.index_head_dim}",
            f"at least qk_rope_head_dim={config.qk_rope_head_dim}: rope turns the indexer's first channels",
        )

    layers, dense = config.num_hidden_layers, config.first_k_dense_replace
    if dense > layers:
        raise fields.error("first_k_dense_replace", f"is {dense}", f"at most num_hidden_layers={layers}")
    mlp_layer_types = ["dense"] * dense + ["sparse"] * (layers - dense)
    fields.one_of("mlp_layer_types", (mlp_layer_types,), default=None)
    # transformers up to 5.17 and since write another name for the same.
    names = "indexed_attention", "deepseek_sparse_attention"
    fields.one_of("layer_types", tuple([name] * layers for name in names), default=None)

    experts, groups = config.n_routed_experts, config.n_group
    if experts % groups:
        raise fields.error("n_routed_experts", f"is {experts}", f"a multiple of n_group={groups}")
    if experts // groups < 2:
        raise fields.error(
            "n_group", f"is {groups}", "groups of 2 experts or more: the gate ranks a group by its best 2"
        )
    if config.topk_group > groups:
        raise fields.error("topk_group", f"is {config.topk_group}", f"at most n_group={groups}")
    reachable = config.topk_group * (experts // groups)
    if config.num_experts_per_tok > reachable:
        raise fields.error(
            "num_experts_per_tok",
            f"is {config.num_experts_per_tok}",
            f"at most {reachable}, the experts of topk_group={config.topk_group} groups",
        )
