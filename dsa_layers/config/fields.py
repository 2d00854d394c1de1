"""JSON objects whose fields are read by name and checked, so that none that changes results stays unread."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dsa_layers.arguments import shown_json
from dsa_layers.errors import ConfigError
from dsa_layers.other_formats import check_quantization, found_instead
from dsa_layers.untrusted_files import read_json_object

# Each number has its own limit, far beyond what models have, so that no tensor of a model can have 2^63 bytes or be
# enumerated for long. The checkpoint's files limit the rest.
MAX_DIMENSION = 2**20
MAX_HEADS = 2**12
MAX_EXPERTS = 2**13
MAX_TOKENS = 2**31 - 1  # positions are int32

MAX_CONFIG_BYTES = 2**20
_NAMED_FIELDS = 50  # in one warning

# Fields with no influence on inference.
_NO_INFLUENCE = {
    "where the file came from": "_commit_hash _name_or_path architectures auto_map finetuning_task tokenizer_class "
    "transformers_version unsloth_fixed unsloth_version",
    "how training ran": "aux_loss_alpha gradient_checkpointing initializer_range pretraining_tp router_aux_loss_coef "
    "router_z_loss_coef seq_aux",
    "which implementation another library chooses": "_attn_implementation _attn_implementation_autoset "
    "_experts_implementation attn_implementation chunk_size_feed_forward torchscript use_bfloat16",
    "what a forward pass returns by default": "output_attentions output_hidden_states output_router_logits return_dict "
    "use_cache",
    "parts that these models do not have": "add_cross_attention id2label is_decoder is_encoder_decoder label2id "
    "num_labels pad_token_id problem_type",
}
NO_INFLUENCE = frozenset(" ".join(_NO_INFLUENCE.values()).split())

# Fields of other models that change what a layer computes, and the values with which they do not. A family that reads
# one of them has its own check.
_CHANGES_RESULTS: dict[str, tuple[Any, ...]] = {
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "index_topk_freq": (1,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mla_scale_q_lora": (False,),
    "mla_scale_kv_lora": (False,),
    "num_hash_layers": (0,),
    "o_groups": (1,),
    "partial_rotary_factor": (1,),
    "qkv_bias": (False,),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "sliding_window": (),
    "swiglu_limit": (),
    "use_qk_norm": (False,),
    "use_qkv_bias": (False,),
    "use_sliding_window": (False,),
}
# And every unknown field whose name begins so: of layers that these families or their successors have.
_PREFIXES = ("index", "compress", "dspark", "engram", "hc_", "rope_", "quantization")


REQUIRED = object()


class Accepted(NamedTuple):
    """The values that a field accepts."""

    listed: str  # as error messages list them
    problem: Callable[[Any], str | None]  # value -> what is wrong with it
    default: Any  # of a field that is missing or null; REQUIRED: there is none
    convert: Callable[[Any], Any]  # accepted value -> what the configuration holds


class Fields:
    """A JSON object that records which of its fields were read, so that unread fields can be named.

    null counts as absent, because writers disagree on whether to write it.
    """

    def __init__(self, values: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self._values = values
        self._path = path
        self._prefix = prefix
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def error(self, name: str, problem: str, accepted: str) -> ConfigError:
        return ConfigError(f"{self._path}: field {self._named(name)} {problem}; accepted: {accepted}")

    def _named(self, name: str) -> str:
        return shown_json(self._prefix + name)

    def read(self, name: str, declared: Any) -> Any:
        """The value of a field. declared: the accepted values, from a function of `declared.py`. Raises ConfigError
        for another value, and for a missing field without a default."""
        accepted: Accepted = declared.metadata["accepted"]
        self._read.add(name)
        value = self._values.get(name)
        if value is None:
            if accepted.default is REQUIRED:
                raise self.error(name, "is null" if name in self._values else "is missing", accepted.listed)
            return accepted.default
        problem = accepted.problem(value)
        if problem is not None:
            raise self.error(name, problem, accepted.listed)
        return accepted.convert(value)

    def require(self, condition: bool, name: str, accepted: str) -> None:
        """Raises ConfigError that says what the field holds, unless the condition is true."""
        if not condition:
            raise self.error(name, f"is {shown_json(self._values.get(name))}", accepted)

    def object(self, name: str) -> "Fields | None":
        self._read.add(name)
        value = self._values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, f"is {shown_json(value)}", "an object or null")
        return None if value is None else Fields(value, self._path, f"{self._prefix}{name}.")

    def reject_unread(self) -> None:
        """For objects of which every field counts: ConfigError for one that was not read, unless it is null."""
        for name in self._unread():
            raise self._unsupported(name, "every field of this object changes what is computed")

    def warn_unread(self) -> None:
        """For config.json itself, to which tools add fields of their own. Fields that are known to have no influence,
        and null, are ignored; one warning names the others. ConfigError for a field that is known to change results."""
        unknown = []
        for name in self._unread():
            neutral = _CHANGES_RESULTS.get(name, () if name.startswith(_PREFIXES) else None)
            if neutral is None:
                unknown += [] if name in NO_INFLUENCE else [name]
            elif not any(same(self._values[name], value) for value in neutral):
                accepted = ", ".join(map(shown_json, neutral))
                raise self._unsupported(name, f"accepted: {accepted or 'null'}")
        if unknown:
            listed = ", ".join(map(self._named, unknown[:_NAMED_FIELDS]))
            if len(unknown) > _NAMED_FIELDS:
                listed += f" and {len(unknown) - _NAMED_FIELDS} more"
            warnings.warn(f"{self._path}: unknown fields are ignored: {listed}", stacklevel=2)

    def check_quantization(self) -> None:
        """For config.json itself: ConfigError, of one line, for the formats of other tools."""
        check_quantization(self._path, self._values)

    def _unread(self) -> list[str]:
        return [name for name in self._values if name not in self._read and name in self]

    def _unsupported(self, name: str, reason: str) -> ConfigError:
        got = shown_json(self._values[name])
        return ConfigError(f"{self._path}: field {self._named(name)} is not supported: {reason} (got {got})")


def same(value: Any, choice: Any) -> bool:
    """0 == False in Python, but not in a configuration."""
    return value == choice and isinstance(value, bool) == isinstance(choice, bool)


def read_object(path: Path) -> Fields:
    try:
        return Fields(read_json_object(path, ConfigError, MAX_CONFIG_BYTES), path)
    except FileNotFoundError:
        instead = found_instead(path.parent)
        raise ConfigError(f"{path}: no such file; a checkpoint directory holds a config.json{instead}") from None
