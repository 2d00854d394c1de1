"""What the configurations of several families have in common: rope, quantisation, dtype, tokens."""

import re
from dataclasses import dataclass

from dsa_layers.arguments import shown_json
from dsa_layers.families.fields import MAX_LAYERS, MAX_TOKENS, Fields


@dataclass(frozen=True)
class YarnConfig:
    """YaRN's extension of the context from `original_max_position_embeddings` tokens to `factor` times as many.

    beta_fast and beta_slow are in rotations over the original context. The softmax scale is multiplied by
    (0.1 * mscale_all_dim * ln(factor) + 1)^2; cos and sin by the ratio of that term's mscale and mscale_all_dim forms.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base `theta`, and YaRN when `yarn` is not None."""

    theta: float
    yarn: YarnConfig | None


@dataclass(frozen=True)
class QuantizationConfig:
    """FP8 e4m3 weights with one fp32 scale per `weight_block` (rows, columns).

    scale_fmt: "ue8m0" if every scale, of weights and of activations, is a power of two; None if it is any fp32.
    expert_dtype: "fp8" or "fp4", how routed experts are stored; None if the configuration does not say.
    """

    weight_block: tuple[int, int]
    scale_fmt: str | None
    expert_dtype: str | None = "fp8"


# GLM's configurations call the indexer's weights_proj "indexers_proj".
_NEVER_QUANTIZED = re.compile(
    r"lm_head|model\.embed_tokens|model\.norm|model\.layers\.\d+\.("
    r"(input|post_attention)_layernorm|self_attn\.(q_a|kv_a)_layernorm|self_attn\.indexer\.k_norm(\.bias)?"
    r"|self_attn\.(indexer\.weights_proj|indexers_proj)|mlp\.gate(\.e_score_correction_bias)?"
    r"|embed_tokens|enorm|hnorm|eh_proj|shared_head\.(norm|head))"
)


def read_rope(fields: Fields) -> RopeConfig:
    """Published: rope_theta beside rope_scaling {type, ...} or null. transformers 5: all in rope_parameters."""
    nested = fields.object("rope_parameters")
    scaling = fields.object("rope_scaling")
    if nested is not None and scaling is not None:
        raise fields.error("rope_scaling", "and field 'rope_parameters' are both given", "one of them")
    if nested is not None and "rope_theta" in nested:
        theta = read_theta(nested, "rope_theta")
        fields.one_of("rope_theta", (theta,), default=theta)
    else:
        theta = read_theta(fields, "rope_theta")
    parameters = nested if nested is not None else scaling
    if parameters is None:
        return RopeConfig(theta, yarn=None)

    yarn = read_yarn(parameters, with_mscale=True) if read_rope_type(parameters) == "yarn" else None
    parameters.reject_unread()
    return RopeConfig(theta, yarn)


def read_theta(fields: Fields, name: str) -> float:
    """A base of frequencies. YaRN divides by its logarithm."""
    return fields.positive(name, minimum=2.0, maximum=1e30)


def read_rope_type(parameters: Fields) -> str:
    """'default' or 'yarn', which two fields may say."""
    types = {name: parameters.one_of(name, ("default", "yarn"), default=None) for name in ("rope_type", "type")}
    given = set(types.values()) - {None}
    if len(given) != 1:
        raise parameters.error("rope_type", f"and field 'type' hold {shown_json(types)}", "one of 'default', 'yarn'")
    return given.pop()


def read_yarn(parameters: Fields, *, with_mscale: bool) -> YarnConfig:
    """with_mscale: the softmax scale and the angles depend on it; else they do not, and mscale is 0."""
    yarn = YarnConfig(
        factor=parameters.positive("factor", maximum=1e6),
        original_max_position_embeddings=parameters.integer("original_max_position_embeddings", maximum=MAX_TOKENS),
        beta_fast=parameters.positive("beta_fast", default=32.0),
        beta_slow=parameters.positive("beta_slow", default=1.0),
        mscale=parameters.positive("mscale", maximum=1e3) if with_mscale else 0.0,
        mscale_all_dim=parameters.positive("mscale_all_dim", maximum=1e3) if with_mscale else 0.0,
    )
    if yarn.factor < 1:
        raise parameters.error("factor", f"is {yarn.factor}", "a number of at least 1")
    if yarn.beta_fast <= yarn.beta_slow:
        raise parameters.error("beta_fast", f"is {yarn.beta_fast}", f"a number above beta_slow={yarn.beta_slow}")
    return yarn


def read_quantization(fields: Fields, expert_dtypes: tuple[str, ...] = ("fp8",)) -> QuantizationConfig | None:
    quantization = fields.object("quantization_config")
    if quantization is None:
        return None
    quantization.one_of("quant_method", ("fp8",))
    quantization.one_of("fmt", ("e4m3",), default="e4m3")
    quantization.one_of("activation_scheme", ("dynamic",))
    block = quantization.one_of("weight_block_size", ([128, 128],))
    # "float" is transformers' word for scales of any fp32 value.
    scale_fmt = quantization.one_of("scale_fmt", ("ue8m0", "float"), default=None)
    # The published formats fix which tensors are FP8. Lists of modules may say so again, but not otherwise.
    quantization.one_of("dequantize", (False,), default=False)
    quantization.one_of("modules_to_convert", ([],), default=None)
    for module in quantization.strings("modules_to_not_convert"):
        if not _NEVER_QUANTIZED.fullmatch(module):
            raise quantization.error(
                "modules_to_not_convert",
                f"holds {shown_json(module)}",
                "'lm_head', 'model.embed_tokens', and of each layer the norms, mlp.gate, the indexer's weights_proj "
                "and eh_proj",
            )
    only = expert_dtypes[0] if len(expert_dtypes) == 1 else None
    expert_dtype = quantization.one_of("expert_dtype", expert_dtypes, default=only)
    quantization.reject_unread()
    return QuantizationConfig(tuple(block), None if scale_fmt == "float" else scale_fmt, expert_dtype)


def read_dtype(fields: Fields) -> str:
    accepted = ("bfloat16", "float16", "float32")
    if "dtype" not in fields:
        return fields.one_of("torch_dtype", accepted)
    dtype = fields.one_of("dtype", accepted)
    fields.one_of("torch_dtype", (dtype,), default=dtype)
    return dtype


def read_vocab_size(fields: Fields) -> int:
    return fields.integer("vocab_size", maximum=2**24)


def read_layers(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", maximum=MAX_LAYERS)


def read_mtp_layers(fields: Fields) -> int:
    return fields.integer("num_nextn_predict_layers", minimum=0, default=0, maximum=16)


def read_token_ids(fields: Fields, generation: Fields | None, vocab_size: int) -> tuple[int | None, tuple[int, ...]]:
    """(bos_token_id, the ids that end a sequence); generation_config.json's ends replace config.json's."""
    bos = fields.token_ids("bos_token_id", vocab_size)
    if len(bos) > 1:
        raise fields.error("bos_token_id", f"is {shown_json(list(bos))}", "one token id, or null")
    eos = fields.token_ids("eos_token_id", vocab_size)
    if generation is not None:
        eos = generation.token_ids("eos_token_id", vocab_size) or eos
    return bos[0] if bos else None, eos


def share_of_heads(heads: int, of: int, multiple: int = 1) -> int:
    """`heads`, if several GPUs can have so many each of a model's; ValueError otherwise."""
    if of % heads or heads % multiple:
        shares = [n for n in range(multiple, of + 1, multiple) if of % n == 0]
        raise ValueError(f"heads: must be a GPU's share of {of} heads, one of {shares}, got {heads}")
    return heads
