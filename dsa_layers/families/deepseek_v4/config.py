"""The configuration of DeepSeek-V4."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from dsa_layers.arguments import shown_json
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
    read_rope_type,
    read_theta,
    read_token_ids,
    read_vocab_size,
    read_yarn,
    share_of_heads,
)

# Layers by how many tokens an entry stands for, and as transformers names them; 0: the window alone.
LAYER_TYPES = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}

# A sequence's ring of keys, and what a compressor keeps of unfinished blocks, are as long as these.
MAX_WINDOW = 2**13
MAX_RATE = 2**12
MAX_STREAMS = 2**6

# What later releases put their drafter's dimensions in.
DSPARK = ("dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id", "dspark_target_layer_ids")


@dataclass(frozen=True)
class DeepseekV4Config:
    """What the DeepSeek-V4 model needs to know. Names are config.json's own; dimensions are in elements.

    layer_types: for each layer a key of LAYER_TYPES. compress_rates: tokens of an entry, by layer type. hash_layers:
    for each layer whether its experts follow from the token. rope: that of layers without entries; compress_rope: that
    of the other layers, of their entries and of their indexers. eos_token_ids: every id that ends a sequence, () if
    there is none. bos_token_id: None if there is none. dtype: of tensors that are not quantised: "bfloat16", "float16"
    or "float32". quantization: None if no tensor is quantised.
    """

    model_type: ClassVar[str] = "deepseek_v4"

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    layer_types: tuple[str, ...]
    compress_rates: dict[str, int]
    hash_layers: tuple[bool, ...]
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    compress_rope: RopeConfig
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    num_nextn_predict_layers: int
    quantization: QuantizationConfig | None
    dtype: str

    def fp8_widths(self) -> dict[str, int]:
        """Field of config.json -> a width that follows from it and that FP8 cuts into blocks of 128."""
        names = ("hidden_size", "q_lora_rank", "moe_intermediate_size", "o_lora_rank")
        widths = {name: getattr(self, name) for name in names}
        return widths | {"o_groups": self.num_attention_heads * self.head_dim // self.o_groups}

    def fp8_cache_sizes(self) -> dict[str, int]:
        """Field of config.json -> the size that it must have for latents to be cached in FP8."""
        return {"head_dim": 512, "qk_rope_head_dim": 64}

    def with_heads(self, heads: int) -> Self:
        """One GPU's share of a model whose attention heads several GPUs have: whole groups of the output's."""
        of_group = self.num_attention_heads // self.o_groups
        heads = share_of_heads(heads, self.num_attention_heads, of_group)
        return replace(self, num_attention_heads=heads, o_groups=heads // of_group)


def read_deepseek_v4(fields: Fields, generation: Fields | None) -> DeepseekV4Config:
    for name in DSPARK:
        if name in fields:
            raise fields.error(name, "is of the DSpark drafter, which is not supported", "configurations without it")
    # One accepted value each: another would need code that is not here.
    fields.one_of("hidden_act", ("silu",), default="silu")
    fields.one_of("attention_bias", (False,), default=False)
    fields.one_of("mlp_bias", (False,), default=False)
    fields.one_of("attention_dropout", (0,), default=0)
    fields.one_of("num_key_value_heads", (1,), default=1)
    fields.one_of("scoring_func", ("sqrtsoftplus",), default="sqrtsoftplus")
    fields.one_of("topk_method", ("noaux_tc",), default="noaux_tc")
    fields.one_of("norm_topk_prob", (True,), default=True)
    fields.one_of("router_jitter_noise", (0,), default=0)
    vocab_size, layers = read_vocab_size(fields), read_layers(fields)
    bos, eos = read_token_ids(fields, generation, vocab_size)
    mtp = read_mtp_layers(fields)
    head_dim = fields.integer("head_dim")
    rope_dim = _rope_dim(fields, head_dim)
    rope, compress_rope = _ropes(fields, rope_dim / head_dim)
    config = DeepseekV4Config(
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        moe_intermediate_size=fields.integer("moe_intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=fields.integer("num_attention_heads", maximum=MAX_HEADS),
        head_dim=head_dim,
        qk_rope_head_dim=rope_dim,
        q_lora_rank=fields.integer("q_lora_rank"),
        o_groups=fields.integer("o_groups"),
        o_lora_rank=fields.integer("o_lora_rank"),
        sliding_window=fields.integer("sliding_window", maximum=MAX_WINDOW),
        layer_types=_layer_types(fields, layers, mtp),
        compress_rates=_compress_rates(fields),
        hash_layers=_hash_layers(fields, layers),
        n_routed_experts=fields.integer("n_routed_experts", maximum=MAX_EXPERTS),
        n_shared_experts=fields.integer("n_shared_experts", maximum=MAX_SHARED_EXPERTS),
        num_experts_per_tok=fields.integer("num_experts_per_tok"),
        routed_scaling_factor=fields.positive("routed_scaling_factor"),
        swiglu_limit=fields.positive("swiglu_limit"),
        index_n_heads=fields.integer("index_n_heads", maximum=MAX_HEADS),
        index_head_dim=fields.integer("index_head_dim"),
        index_topk=fields.integer("index_topk", maximum=MAX_SELECTED),
        hc_mult=fields.integer("hc_mult", maximum=MAX_STREAMS),
        hc_sinkhorn_iters=fields.integer("hc_sinkhorn_iters", maximum=1000),
        hc_eps=fields.epsilon("hc_eps"),
        rms_norm_eps=fields.epsilon("rms_norm_eps"),
        max_position_embeddings=fields.integer("max_position_embeddings", maximum=MAX_TOKENS),
        rope=rope,
        compress_rope=compress_rope,
        tie_word_embeddings=fields.one_of("tie_word_embeddings", (False,), default=False),
        bos_token_id=bos,
        eos_token_ids=eos,
        num_nextn_predict_layers=mtp,
        quantization=_quantization(fields),
        dtype=read_dtype(fields),
    )
    _check_consistency(fields, config)
    fields.warn_unread()
    return config


def _quantization(fields: Fields) -> QuantizationConfig | None:
    """Published: expert_dtype beside quantization_config, or not at all. transformers: in it, or both."""
    dtypes = ("fp4", "fp8")
    beside = fields.one_of("expert_dtype", dtypes, default=None)
    quantization = read_quantization(fields, dtypes)
    if quantization is None:
        return None
    inside = quantization.expert_dtype
    if beside is not None and inside not in (None, beside):
        raise fields.error("expert_dtype", f"is {beside!r}", f"quantization_config.expert_dtype={inside!r}")
    return replace(quantization, expert_dtype=beside or inside)


def _rope_dim(fields: Fields, head_dim: int) -> int:
    """Published: qk_rope_head_dim. transformers: a part of head_dim."""
    part = fields.positive("partial_rotary_factor", default=1.0, maximum=1.0)
    rope_dim = fields.integer("qk_rope_head_dim", default=int(head_dim * part))
    if "partial_rotary_factor" in fields and int(head_dim * part) != rope_dim:
        raise fields.error("partial_rotary_factor", f"is {part}", f"qk_rope_head_dim={rope_dim} / head_dim={head_dim}")
    return rope_dim


def _layer_types(fields: Fields, layers: int, mtp: int) -> tuple[str, ...]:
    """Published: compress_ratios of the layers, and of the multi-token-prediction layers behind them."""
    ratios = fields.items("compress_ratios")
    types = fields.items("layer_types")
    if (ratios is None) == (types is None):
        given = "not given" if ratios is None else "both given"
        raise fields.error("compress_ratios", f"and field 'layer_types' are {given}", "one of them")
    if ratios is not None:
        names = {ratio: name for name, ratio in LAYER_TYPES.items()}
        _check_list(fields, "compress_ratios", ratios, tuple(names), layers, mtp)
        return tuple(names[ratio] for ratio in ratios[:layers])
    _check_list(fields, "layer_types", types, tuple(LAYER_TYPES), layers)
    return tuple(types)


def _compress_rates(fields: Fields) -> dict[str, int]:
    """Tokens of an entry, by layer type: the published model's, unless a configuration says otherwise."""
    rates = {name: ratio for name, ratio in LAYER_TYPES.items() if ratio}
    given = fields.object("compress_rates")
    if given is not None:
        rates = {name: given.integer(name, default=ratio, maximum=MAX_RATE) for name, ratio in rates.items()}
        given.reject_unread()
    return rates


def _hash_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Published: so many first layers. transformers: the type of each."""
    types = fields.items("mlp_layer_types")
    if types is None:
        count = fields.integer("num_hash_layers", minimum=0)
        return tuple(i < count for i in range(layers))
    _check_list(fields, "mlp_layer_types", types, ("hash_moe", "moe"), layers)
    return tuple(kind == "hash_moe" for kind in types)


def _ropes(fields: Fields, part: float) -> tuple[RopeConfig, RopeConfig]:
    """Published: rope_theta, compress_rope_theta and rope_scaling, which is for the latter only. transformers: all in
    rope_parameters, by `main` and `compress`."""
    nested = fields.object("rope_parameters")
    if nested is None:
        theta, compress_theta = read_theta(fields, "rope_theta"), read_theta(fields, "compress_rope_theta")
        scaling = fields.object("rope_scaling")
        yarn = None
        if scaling is not None:
            yarn = read_yarn(scaling, with_mscale=False) if read_rope_type(scaling) == "yarn" else None
            scaling.reject_unread()
        return RopeConfig(theta, None), RopeConfig(compress_theta, yarn)
    ropes = []
    for name, theta_field in (("main", "rope_theta"), ("compress", "compress_rope_theta")):
        one = nested.object(name)
        if one is None:
            raise nested.error(name, "is missing", "an object")
        theta = read_theta(one, "rope_theta")
        fields.one_of(theta_field, (theta,), default=theta)
        one.one_of("partial_rotary_factor", (part,), default=part)
        # The published model does not multiply cos and sin by YaRN's factor.
        one.one_of("attention_factor", (1,), default=1)
        yarn = read_yarn(one, with_mscale=False) if read_rope_type(one) == "yarn" else None
        one.reject_unread()
        ropes.append(RopeConfig(theta, yarn))
    nested.reject_unread()
    return ropes[0], ropes[1]


def _check_list(fields: Fields, name: str, values: list[Any], accepted: tuple, layers: int, mtp: int = 0) -> None:
    """mtp: multi-token-prediction layers, which the list may hold or leave out."""
    kinds = {type(value) for value in accepted}  # 0, False and 0.0 are equal
    wrong = [value for value in values if type(value) not in kinds or value not in accepted]
    if not wrong and len(values) in (layers, layers + mtp):
        return
    problem = f"holds {shown_json(wrong[0])}" if wrong else f"has {len(values)} entries"
    counts = f"{layers} (num_hidden_layers)"
    if mtp:
        counts += f" or {layers + mtp} (with num_nextn_predict_layers={mtp})"
    *others, last = map(repr, accepted)
    raise fields.error(name, problem, f"{counts}, each {', '.join(others)} or {last}")


def _check_consistency(fields: Fields, config: DeepseekV4Config) -> None:
    if config.qk_rope_head_dim % 2 or config.qk_rope_head_dim > min(config.head_dim, config.index_head_dim):
        least = min(config.head_dim, config.index_head_dim)
        raise fields.error("qk_rope_head_dim", f"is {config.qk_rope_head_dim}", f"an even number up to {least}")
    if config.num_attention_heads % config.o_groups:
        accepted = f"a divisor of num_attention_heads={config.num_attention_heads}"
        raise fields.error("o_groups", f"is {config.o_groups}", accepted)
    if config.num_experts_per_tok > config.n_routed_experts:
        accepted = f"at most n_routed_experts={config.n_routed_experts}"
        raise fields.error("num_experts_per_tok", f"is {config.num_experts_per_tok}", accepted)
