"""Model configurations, read from a checkpoint's config.json.

`read_config` accepts the two spellings in use for DeepSeek-V3.2: the published one (`rope_theta`, `rope_scaling`,
`torch_dtype`) and the one that transformers 5 writes (`rope_parameters`, `dtype`, `mlp_layer_types`). It is strict: a
field that is neither read here nor known to have no influence on inference stops the load by its name, because a
model that ignores one line of its configuration still runs, and answers wrongly.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

SUPPORTED_MODEL_TYPES = ("deepseek_v32",)

# _Fields with no influence on inference: where the file came from, how training ran, what a forward returns by default.
NO_INFLUENCE = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "aux_loss_alpha",
        "initializer_range",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "return_dict",
        "router_aux_loss_coef",
        "seq_aux",
        "transformers_version",
        "use_cache",
    }
)


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
    """

    weight_block: tuple[int, int]
    scale_fmt: str | None


@dataclass(frozen=True)
class DeepseekV32Config:
    """What the DeepSeek-V3.2 model needs to know. Names are config.json's own; dimensions are in elements.

    eos_token_ids: every id that ends a sequence, () if there is none. bos_token_id: None if there is none.
    dtype: of the tensors that are not quantised: "bfloat16", "float16" or "float32".
    quantization: None if no tensor is quantised.
    """

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
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    num_nextn_predict_layers: int
    quantization: QuantizationConfig | None
    dtype: str


class ConfigError(ValueError):
    """A configuration that cannot be used. The message names the file, the field, its value and what is accepted."""


_REQUIRED = object()


class _Fields:
    """A JSON object whose fields are taken by name and checked; what was never taken can be rejected by its name.

    A field without a default must be there. null counts as absent, for writers disagree on whether to write it.
    """

    def __init__(self, values: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self._values = values
        self._path = path
        self._prefix = prefix
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def error(self, name: str, problem: str, accepted: str) -> ConfigError:
        return ConfigError(f"{self._path}: field '{self._prefix}{name}' {problem}; accepted: {accepted}")

    def _take(self, name: str, default: Any, accepted: str) -> Any:
        self._taken.add(name)
        value = self._values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.error(name, "is null" if name in self._values else "is missing", accepted)
        return default

    def one_of(self, name: str, accepted: tuple, default: Any = _REQUIRED) -> Any:
        listed = ", ".join(map(repr, accepted))
        value = self._take(name, default, listed)
        if name not in self:
            return value
        # 0 == False in Python, but not in a configuration.
        if not any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in accepted):
            raise self.error(name, f"is {value!r}", listed)
        return value

    def boolean(self, name: str) -> bool:
        return self.one_of(name, (True, False))

    def integer(self, name: str, minimum: int = 1, default: Any = _REQUIRED) -> int:
        accepted = f"an integer of at least {minimum}"
        value = self._take(name, default, accepted)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(name, f"is {value!r}", accepted)
        return value

    def positive(self, name: str, default: Any = _REQUIRED) -> float:
        accepted = "a finite number above 0"
        value = self._take(name, default, accepted)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            raise self.error(name, f"is {value!r}", accepted)
        return float(value)

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """The ids of a field that holds an integer, a list of them, or null."""
        value = self._take(name, None, "")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
                raise self.error(name, f"is {value!r}", f"token ids in [0, vocab_size={vocab_size}), or null")
        return tuple(ids)

    def object(self, name: str) -> "_Fields | None":
        value = self._take(name, None, "")
        if value is not None and not isinstance(value, dict):
            raise self.error(name, f"is {value!r}", "an object or null")
        return None if value is None else _Fields(value, self._path, f"{self._prefix}{name}.")

    def reject_unread(self, ignored: frozenset[str] = frozenset()) -> None:
        for name in self._values:
            if name not in self._taken and name not in ignored:
                raise ConfigError(
                    f"{self._path}: field '{self._prefix}{name}' is not supported: it is neither read nor known to "
                    f"have no influence on inference (got {self._values[name]!r})"
                )


def _read_object(path: Path) -> _Fields:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a checkpoint directory holds a config.json") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return _Fields(value, path)


def read_config(directory: str | PathLike[str]) -> DeepseekV32Config:
    """The configuration in `directory`/config.json.

    If `directory`/generation_config.json names end-of-sequence ids, they replace config.json's.
    Raises ConfigError (a ValueError) that names the file and the field, what it holds and what is accepted: for a file
    that is missing or not a JSON object, a model type or a value that is not supported, a field that is missing, of
    the wrong type or unknown, and fields that contradict each other.
    """
    directory = Path(directory)
    fields = _read_object(directory / "config.json")
    fields.one_of("model_type", SUPPORTED_MODEL_TYPES)
    generation_path = directory / "generation_config.json"
    return _deepseek_v32(fields, _read_object(generation_path) if generation_path.exists() else None)


def _deepseek_v32(fields: _Fields, generation: _Fields | None) -> DeepseekV32Config:
    # One accepted value each: another would need code that is not here.
    fields.one_of("hidden_act", ("silu",), default="silu")
    fields.one_of("attention_bias", (False,), default=False)
    fields.one_of("mlp_bias", (False,), default=False)
    fields.one_of("attention_dropout", (0,), default=0)
    fields.one_of("ep_size", (1,), default=1)
    fields.one_of("moe_layer_freq", (1,), default=1)
    # MLA rotates pairs (2i, 2i + 1), the indexer pairs (i, i + 32). Some converters write that down.
    fields.one_of("rope_interleave", (True,), default=True)
    fields.one_of("indexer_rope_interleave", (False,), default=False)

    vocab_size = fields.integer("vocab_size")
    bos = fields.token_ids("bos_token_id", vocab_size)
    if len(bos) > 1:
        raise fields.error("bos_token_id", f"is {list(bos)}", "one token id, or null")
    eos = fields.token_ids("eos_token_id", vocab_size)
    if generation is not None:
        eos = generation.token_ids("eos_token_id", vocab_size) or eos

    config = DeepseekV32Config(
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        moe_intermediate_size=fields.integer("moe_intermediate_size"),
        num_hidden_layers=fields.integer("num_hidden_layers"),
        num_attention_heads=fields.integer("num_attention_heads"),
        first_k_dense_replace=fields.integer("first_k_dense_replace", minimum=0),
        n_routed_experts=fields.integer("n_routed_experts"),
        n_shared_experts=fields.integer("n_shared_experts"),
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
        rms_norm_eps=fields.positive("rms_norm_eps"),
        index_n_heads=fields.integer("index_n_heads"),
        index_head_dim=fields.integer("index_head_dim"),
        index_topk=fields.integer("index_topk"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rope=_rope(fields),
        tie_word_embeddings=fields.one_of("tie_word_embeddings", (False,), default=False),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=eos,
        num_nextn_predict_layers=fields.integer("num_nextn_predict_layers", minimum=0, default=0),
        quantization=_quantization(fields),
        dtype=_dtype(fields),
    )
    _check_consistency(fields, config)
    fields.reject_unread(NO_INFLUENCE)
    return config


def _rope(fields: _Fields) -> RopeConfig:
    """Published: rope_theta beside rope_scaling {type, ...} or null. transformers 5: all in rope_parameters."""
    nested = fields.object("rope_parameters")
    scaling = fields.object("rope_scaling")
    if nested is not None and scaling is not None:
        raise fields.error("rope_scaling", "and field 'rope_parameters' are both given", "one of them")
    if nested is not None and "rope_theta" in nested:
        theta = nested.positive("rope_theta")
        fields.one_of("rope_theta", (theta,), default=theta)
    else:
        theta = fields.positive("rope_theta")
    parameters = nested if nested is not None else scaling
    if parameters is None:
        return RopeConfig(theta, yarn=None)

    types = {name: parameters.one_of(name, ("default", "yarn"), default=None) for name in ("rope_type", "type")}
    given = set(types.values()) - {None}
    if len(given) != 1:
        raise parameters.error("rope_type", f"and field 'type' hold {types}", "one of 'default', 'yarn'")
    yarn = None
    if given == {"yarn"}:
        yarn = YarnConfig(
            factor=parameters.positive("factor"),
            original_max_position_embeddings=parameters.integer("original_max_position_embeddings"),
            beta_fast=parameters.positive("beta_fast", default=32.0),
            beta_slow=parameters.positive("beta_slow", default=1.0),
            mscale=parameters.positive("mscale"),
            mscale_all_dim=parameters.positive("mscale_all_dim"),
        )
        if yarn.factor < 1:
            raise parameters.error("factor", f"is {yarn.factor}", "a number of at least 1")
        if yarn.beta_fast <= yarn.beta_slow:
            raise parameters.error("beta_fast", f"is {yarn.beta_fast}", f"a number above beta_slow={yarn.beta_slow}")
    parameters.reject_unread()
    return RopeConfig(theta, yarn)


def _quantization(fields: _Fields) -> QuantizationConfig | None:
    quantization = fields.object("quantization_config")
    if quantization is None:
        return None
    quantization.one_of("quant_method", ("fp8",))
    quantization.one_of("fmt", ("e4m3",), default="e4m3")
    quantization.one_of("activation_scheme", ("dynamic",))
    block = quantization.one_of("weight_block_size", ([128, 128],))
    # "float" is transformers' word for scales of any fp32 value.
    scale_fmt = quantization.one_of("scale_fmt", ("ue8m0", "float"), default=None)
    # transformers writes these; the published format fixes which tensors are FP8, and lm_head is not one.
    quantization.one_of("dequantize", (False,), default=False)
    quantization.one_of("modules_to_convert", ([],), default=None)
    quantization.one_of("modules_to_not_convert", ([], ["lm_head"]), default=None)
    quantization.one_of("expert_dtype", ("fp8",), default="fp8")
    quantization.reject_unread()
    return QuantizationConfig(tuple(block), None if scale_fmt == "float" else scale_fmt)


def _dtype(fields: _Fields) -> str:
    accepted = ("bfloat16", "float16", "float32")
    if "dtype" not in fields:
        return fields.one_of("torch_dtype", accepted)
    dtype = fields.one_of("dtype", accepted)
    fields.one_of("torch_dtype", (dtype,), default=dtype)
    return dtype


def _check_consistency(fields: _Fields, config: DeepseekV32Config) -> None:
    heads = config.num_attention_heads
    fields.one_of("num_key_value_heads", (heads,), default=heads)
    qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    fields.one_of("qk_head_dim", (qk_head_dim,), default=qk_head_dim)
    # transformers 5 means the part that rope turns, older configurations the whole head.
    fields.one_of("head_dim", (config.qk_rope_head_dim, qk_head_dim), default=qk_head_dim)
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
    fields.one_of("layer_types", (["indexed_attention"] * layers,), default=None)

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
