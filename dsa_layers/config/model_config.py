"""The fields of config.json that all model families have, and the parsing of rope and quantisation fields."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

from dsa.runtime.checks import shown_json
from dsa_layers.config.fields import (
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_TOKENS,
    Declared,
    Fields,
    anything,
    computed,
    epsilon,
    integer,
    number,
    one_of,
    only,
    token_ids,
)

# The base of rope frequencies. YaRN divides by the logarithm of the base, so the minimum is above 1.
THETA = number(minimum=2.0, maximum=1e30)


@dataclass(frozen=True)
class YarnConfig(Declared):
    """YaRN's extension of the context from n = `original_max_position_embeddings` tokens to `factor` * n tokens.

    `yarn_frequencies` (layers/rope.py) computes the frequencies; beta_fast and beta_slow are numbers of rotations
    within n tokens. With m(x) = 0.1 * x * ln(factor) + 1, the softmax scale is multiplied by m(mscale_all_dim)^2, and
    cos and sin are multiplied by m(mscale) / m(mscale_all_dim).
    """

    factor: float = number(minimum=1, maximum=1e6)
    original_max_position_embeddings: int = integer(maximum=MAX_TOKENS)
    beta_fast: float = number(default=32.0)
    beta_slow: float = number(default=1.0)
    mscale: float = number(maximum=1e3)
    mscale_all_dim: float = number(maximum=1e3)

    def check(self, fields: Fields) -> None:
        fields.require(self.beta_fast > self.beta_slow, "beta_fast", f"a number above beta_slow={self.beta_slow}")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding with base `theta`. yarn: YaRN's parameters; None for plain rope."""

    theta: float
    yarn: YarnConfig | None


def read_rope(fields: Fields, known: SimpleNamespace, ignored: tuple[str, ...] = ()) -> RopeConfig:
    """Read the rope fields. Published files have rope_theta and rope_scaling, which is an object or null. Files of
    transformers 5 have the object rope_parameters, which contains rope_theta and the scaling fields. ignored: fields of
    these objects that may have any value."""
    nested, scaling = fields.object("rope_parameters"), fields.object("rope_scaling")
    if nested is not None and scaling is not None:
        raise fields.error("rope_scaling", "and field 'rope_parameters' are both given", "one of them")
    theta = (nested if nested is not None and "rope_theta" in nested else fields).read("rope_theta", THETA)
    fields.read("rope_theta", only(theta))
    parameters = nested if nested is not None else scaling
    for name in ignored if parameters is not None else ():
        parameters.read(name, anything())
    return RopeConfig(theta, read_yarn(parameters))


def read_yarn(parameters: Fields | None, **given: float) -> YarnConfig | None:
    """Read the YaRN parameters of a JSON object; return None for plain rope. given: values of `YarnConfig` fields that
    the object does not have."""
    if parameters is None:
        return None
    types = {name: parameters.read(name, one_of("default", "yarn", default=None)) for name in ("rope_type", "type")}
    distinct = set(types.values()) - {None}
    if len(distinct) != 1:
        raise parameters.error("rope_type", f"and field 'type' hold {shown_json(types)}", "one of 'default', 'yarn'")
    yarn = YarnConfig.read(parameters, **given) if distinct == {"yarn"} else None
    parameters.reject_unread()
    return yarn


@dataclass(frozen=True)
class QuantizationConfig(Declared):
    """The quantisation of FP8 checkpoints: e4m3 weights with one scale per 128 x 128 block.

    scale_fmt: "ue8m0" if all scales of weights and activations are powers of two; "float" for arbitrary fp32 scales.
    expert_dtype: the storage of routed experts, "fp8". A family with FP4 experts reads this field itself; the value may
    then also be "fp4", or None if config.json does not name the dtype.
    """

    checked: ClassVar[dict[str, Any]] = {
        "quant_method": one_of("fp8"),
        "fmt": only("e4m3"),
        "activation_scheme": one_of("dynamic"),
        "weight_block_size": one_of([128, 128]),
        "dequantize": only(False),
        "modules_to_convert": only([]),
        # Not checked here: loading fails if a weight is not quantised where the model expects it to be.
        "modules_to_not_convert": anything(),
    }

    scale_fmt: str = one_of("ue8m0", "float", default="float")
    expert_dtype: str | None = only("fp8")


def read_quantization(quantization: Fields | None, **given: Any) -> QuantizationConfig | None:
    """Read the JSON object quantization_config; return None if there is none. given: values of `QuantizationConfig`
    fields that the caller has already read."""
    if quantization is None:
        return None
    config = QuantizationConfig.read(quantization, **given)
    quantization.reject_unread()
    return config


def read_dtype(fields: Fields, known: SimpleNamespace) -> str:
    name = "dtype" if "dtype" in fields else "torch_dtype"
    dtype = fields.read(name, one_of("bfloat16", "float16", "float32"))
    fields.read("torch_dtype", only(dtype))
    return dtype


def read_bos(fields: Fields, known: SimpleNamespace) -> int | None:
    ids = fields.read("bos_token_id", token_ids(known.vocab_size))
    fields.require(len(ids) < 2, "bos_token_id", "one token id, or null")
    return ids[0] if ids else None


@dataclass(frozen=True)
class ModelConfig(Declared):
    """The fields of config.json that all model families have. Each family has a subclass with additional fields.

    Fields have the names of config.json, except for eos_token_ids and quantization.
    model_type       the family's value of model_type in config.json
    eos_token_ids    token ids that end a sequence (eos_token_id); () if there are none
    bos_token_id     token id that begins a sequence, or None
    dtype            default dtype of activations and unquantised weights: "bfloat16", "float16" or "float32"
    quantization     quantization_config; None if no tensor is quantised
    """

    model_type: ClassVar[str]
    checked: ClassVar[dict[str, Any]] = {
        "hidden_act": only("silu"),
        "attention_bias": only(False),
        "mlp_bias": only(False),
        "attention_dropout": only(0),
        "topk_method": only("noaux_tc"),
        "tie_word_embeddings": only(False),
    }

    vocab_size: int = integer(maximum=2**24)
    hidden_size: int = integer()
    num_hidden_layers: int = integer(maximum=2**8)
    num_nextn_predict_layers: int = integer(minimum=0, maximum=16, default=0)
    num_attention_heads: int = integer(maximum=MAX_HEADS)
    q_lora_rank: int = integer()
    index_n_heads: int = integer(maximum=MAX_HEADS)
    index_head_dim: int = integer()
    index_topk: int = integer(maximum=2**16)  # limited, because every token has a row of index_topk indices
    moe_intermediate_size: int = integer()
    n_routed_experts: int = integer(maximum=MAX_EXPERTS)
    n_shared_experts: int = integer(maximum=2**10)
    num_experts_per_tok: int = integer()
    routed_scaling_factor: float = number()
    rms_norm_eps: float = epsilon()
    max_position_embeddings: int = integer(maximum=MAX_TOKENS)
    bos_token_id: int | None = computed(read_bos)
    eos_token_ids: tuple[int, ...] = computed(
        lambda fields, known: fields.read("eos_token_id", token_ids(known.vocab_size))
    )
    quantization: QuantizationConfig | None = computed(
        lambda fields, known: read_quantization(fields.object("quantization_config"))
    )
    dtype: str = computed(read_dtype)

    @property
    def has_fp8_cache(self) -> bool:
        """Whether FP8 caches, whose byte layouts have fixed sizes, support this model's sizes."""
        raise NotImplementedError

    @property
    def use_ue8m0(self) -> bool:
        """Whether every FP8 scale is a power of two."""
        return self.quantization is not None and self.quantization.scale_fmt == "ue8m0"
