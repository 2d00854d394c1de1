"""The configuration of DeepSeek-V4."""

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, Self

from dsa_layers.families.declared import computed, each_of, epsilon, integer, number, one_of, only, refused
from dsa_layers.families.fields import Fields
from dsa_layers.families.model import ModelConfig
from dsa_layers.families.parts import (
    THETA,
    QuantizationConfig,
    RopeConfig,
    read_quantization,
    read_yarn,
    share_of_heads,
)

# Layer types as transformers names them -> tokens per entry; 0: the layer has only the window.
LAYER_TYPES = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}

# Later releases put their drafter's dimensions into these fields.
_DSPARK = ("dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id", "dspark_target_layer_ids")
_NO_DSPARK = refused("is of the DSpark drafter, which is not supported", "configurations without it")


def _read_rope_dim(fields: Fields, known: SimpleNamespace) -> int:
    """Published: qk_rope_head_dim. transformers: a part of head_dim."""
    part = fields.read("partial_rotary_factor", number(maximum=1.0, default=1.0))
    of_part = int(known.head_dim * part)
    rope_dim = fields.read("qk_rope_head_dim", integer(default=of_part))
    if "partial_rotary_factor" in fields and of_part != rope_dim:
        accepted = f"qk_rope_head_dim={rope_dim} / head_dim={known.head_dim}"
        raise fields.error("partial_rotary_factor", f"is {part}", accepted)
    return rope_dim


def _read_layer_types(fields: Fields, known: SimpleNamespace) -> tuple[str, ...]:
    """Published: compress_ratios of the layers, with or without the multi-token-prediction layers after them.
    transformers: layer_types."""
    if ("compress_ratios" in fields) == ("layer_types" in fields):
        given = "both given" if "layer_types" in fields else "not given"
        raise fields.error("compress_ratios", f"and field 'layer_types' are {given}", "one of them")
    layers, mtp = known.num_hidden_layers, known.num_nextn_predict_layers
    counts = {layers: "num_hidden_layers"}
    with_mtp = counts | ({layers + mtp: f"with num_nextn_predict_layers={mtp}"} if mtp else {})
    names = {ratio: name for name, ratio in LAYER_TYPES.items()}
    ratios = fields.read("compress_ratios", each_of(*names, counts=with_mtp))
    types = fields.read("layer_types", each_of(*LAYER_TYPES, counts=counts))
    return types if ratios is None else tuple(names[ratio] for ratio in ratios[:layers])


def _read_compress_rates(fields: Fields, known: SimpleNamespace) -> dict[str, int]:
    rates = {name: ratio for name, ratio in LAYER_TYPES.items() if ratio}
    given = fields.object("compress_rates")
    if given is not None:
        rates = {name: given.read(name, integer(maximum=2**12, default=ratio)) for name, ratio in rates.items()}
        given.reject_unread()
    return rates


def _read_hash_layers(fields: Fields, known: SimpleNamespace) -> tuple[bool, ...]:
    """Published: the number of hashed layers, which come first. transformers: the type of each layer."""
    layers = known.num_hidden_layers
    types = fields.read("mlp_layer_types", each_of("hash_moe", "moe", counts={layers: "num_hidden_layers"}))
    if types is not None:
        return tuple(kind == "hash_moe" for kind in types)
    count = fields.read("num_hash_layers", integer(minimum=0))
    return tuple(i < count for i in range(layers))


def _read_rope(kind: str, theta_field: str, fields: Fields, known: SimpleNamespace) -> RopeConfig:
    """Published: `theta_field`, and rope_scaling for the kind "compress". transformers: rope_parameters, with an
    object per kind."""
    nested = fields.object("rope_parameters")
    if nested is None:
        scaling = fields.object("rope_scaling") if kind == "compress" else None
        return RopeConfig(fields.read(theta_field, THETA), read_yarn(scaling, mscale=0.0, mscale_all_dim=0.0))
    of_kind = {name: nested.object(name) for name in ("main", "compress")}
    nested.reject_unread()
    parameters = of_kind[kind]
    if parameters is None:
        raise nested.error(kind, "is missing", "an object")
    theta = parameters.read("rope_theta", THETA)
    fields.read(theta_field, only(theta))
    parameters.read("partial_rotary_factor", only(known.qk_rope_head_dim / known.head_dim))
    # The published model does not multiply cos and sin by YaRN's factor.
    parameters.read("attention_factor", only(1))
    return RopeConfig(theta, read_yarn(parameters, mscale=0.0, mscale_all_dim=0.0))


def _read_quantization(fields: Fields, known: SimpleNamespace) -> QuantizationConfig | None:
    """Published: expert_dtype is in config.json itself, or missing. transformers: in quantization_config, or in
    both."""
    accepted = one_of("fp4", "fp8", default=None)
    published = fields.read("expert_dtype", accepted)
    nested = fields.object("quantization_config")
    written = None if nested is None else nested.read("expert_dtype", accepted)
    if None not in (published, written) and written != published:
        raise fields.error("expert_dtype", f"is {published!r}", f"quantization_config.expert_dtype={written!r}")
    return read_quantization(nested, expert_dtype=published or written)


@dataclass(frozen=True)
class DeepseekV4Config(ModelConfig):
    """The fields of DeepSeek-V4 in addition to the common ones.

    layer_types: a key of LAYER_TYPES per layer. compress_rates: tokens per entry, by layer type. hash_layers: per
    layer, whether the token determines its experts. rope: of layers without entries; compress_rope: of the other
    layers, of their entries and of their indexers.
    """

    model_type: ClassVar[str] = "deepseek_v4"
    fp8_cache_sizes: ClassVar[dict[str, int]] = {"head_dim": 512, "qk_rope_head_dim": 64}
    checked: ClassVar[dict[str, Any]] = {
        **dict.fromkeys(_DSPARK, _NO_DSPARK),
        **ModelConfig.checked,
        "num_key_value_heads": only(1),
        "scoring_func": only("sqrtsoftplus"),
        "norm_topk_prob": only(True),
        "router_jitter_noise": only(0),
    }

    head_dim: int = integer()
    qk_rope_head_dim: int = computed(_read_rope_dim)
    o_groups: int = integer()
    o_lora_rank: int = integer()
    sliding_window: int = integer(maximum=2**13)  # the length of a sequence's ring of keys
    layer_types: tuple[str, ...] = computed(_read_layer_types)
    compress_rates: dict[str, int] = computed(_read_compress_rates)
    hash_layers: tuple[bool, ...] = computed(_read_hash_layers)
    swiglu_limit: float = number()
    hc_mult: int = integer(maximum=2**6)
    hc_sinkhorn_iters: int = integer(maximum=1000)
    hc_eps: float = epsilon()
    rope: RopeConfig = computed(partial(_read_rope, "main", "rope_theta"))
    compress_rope: RopeConfig = computed(partial(_read_rope, "compress", "compress_rope_theta"))
    quantization: QuantizationConfig | None = computed(_read_quantization)

    def fp8_widths(self) -> dict[str, int]:
        names = ("hidden_size", "q_lora_rank", "moe_intermediate_size", "o_lora_rank")
        widths = {name: getattr(self, name) for name in names}
        return widths | {"o_groups": self.num_attention_heads * self.head_dim // self.o_groups}

    def with_heads(self, heads: int) -> Self:
        """A share has whole groups of the output projection."""
        of_group = self.num_attention_heads // self.o_groups
        heads = share_of_heads(heads, self.num_attention_heads, of_group)
        return replace(self, num_attention_heads=heads, o_groups=heads // of_group)

    def check(self, fields: Fields) -> None:
        rope, heads, experts = self.qk_rope_head_dim, self.num_attention_heads, self.n_routed_experts
        most = min(self.head_dim, self.index_head_dim)
        fields.require(rope % 2 == 0 and rope <= most, "qk_rope_head_dim", f"an even number up to {most}")
        fields.require(heads % self.o_groups == 0, "o_groups", f"a divisor of num_attention_heads={heads}")
        accepted = f"at most n_routed_experts={experts}"
        fields.require(self.num_experts_per_tok <= experts, "num_experts_per_tok", accepted)
