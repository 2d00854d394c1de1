"""JSON objects whose fields are taken by name and checked, so that none that counts goes unread."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsa_layers.arguments import shown_json
from dsa_layers.errors import ConfigError
from dsa_layers.other_formats import check_quantization, found_instead
from dsa_layers.untrusted_files import read_json_object

# Numbers are limited one by one, each far beyond what any model has, so that no tensor of a model can have 2^63 bytes
# or be enumerated for long. What a checkpoint's files hold limits the rest.
MAX_DIMENSION = 2**20
MAX_HEADS = 2**12
MAX_EXPERTS = 2**13
MAX_SHARED_EXPERTS = 2**10
MAX_LAYERS = 2**8
MAX_SELECTED = 2**16  # tokens that a query attends to: its row of indices is as long
MAX_TOKENS = 2**31 - 1  # positions are int32

MAX_CONFIG_BYTES = 2**20
_NAMED_FIELDS = 50  # in one warning

# Fields with no influence on inference: where the file came from, how training ran, what a forward returns by default,
# which implementation another library chooses, and labels of heads that these models do not have.
NO_INFLUENCE = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_experts_implementation",
        "_name_or_path",
        "add_cross_attention",
        "architectures",
        "attn_implementation",
        "auto_map",
        "aux_loss_alpha",
        "chunk_size_feed_forward",
        "finetuning_task",
        "gradient_checkpointing",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "router_aux_loss_coef",
        "router_z_loss_coef",
        "seq_aux",
        "tokenizer_class",
        "torchscript",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    }
)

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


_REQUIRED = object()


class Fields:
    """A JSON object whose fields are taken by name and checked; what was never taken can be named.

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
        return ConfigError(f"{self._path}: field {self._named(name)} {problem}; accepted: {accepted}")

    def _named(self, name: str) -> str:
        return shown_json(self._prefix + name)

    def _take(self, name: str, default: Any, accepted: str) -> Any:
        self._taken.add(name)
        value = self._values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.error(name, "is null" if name in self._values else "is missing", accepted)
        return default

    def one_of(self, name: str, accepted: tuple, default: Any = _REQUIRED) -> Any:
        listed = ", ".join(map(shown_json, accepted))
        value = self._take(name, default, listed)
        if name not in self:
            return value
        for choice in accepted:
            if _same(value, choice):
                return choice
        raise self.error(name, f"is {shown_json(value)}", listed)

    def boolean(self, name: str) -> bool:
        return self.one_of(name, (True, False))

    def integer(self, name: str, minimum: int = 1, default: Any = _REQUIRED, *, maximum: int = MAX_DIMENSION) -> int:
        accepted = f"an integer of at least {minimum}, up to {maximum}"
        value = self._take(name, default, accepted)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.error(name, f"is {shown_json(value)}", accepted)
        return value

    def positive(self, name: str, default: Any = _REQUIRED, *, minimum: float = 1e-9, maximum: float = 1e9) -> float:
        accepted = f"a finite number above 0, from {minimum:g} to {maximum:g}"
        value = self._take(name, default, accepted)
        # Comparing is exact: an integer that no float can hold is not converted, and NaN is in no range.
        if not isinstance(value, int | float) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.error(name, f"is {shown_json(value)}", accepted)
        return float(value)

    def strings(self, name: str) -> tuple[str, ...]:
        """The strings in a list; () for null."""
        value = self._take(name, None, "")
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise self.error(name, f"is {shown_json(value)}", "a list of strings, or null")
        return tuple(value or ())

    def each_of(self, name: str, accepted: tuple[str, ...], count: int) -> tuple[str, ...] | None:
        """The `count` items of a list, or letters of a string, each of them one of `accepted`; None for null."""
        listed = f"{count} items, each one of {', '.join(map(repr, accepted))}, or null"
        value = self._take(name, None, listed)
        if value is None:
            return None
        if not isinstance(value, list | str):
            raise self.error(name, f"is {shown_json(value)}", listed)
        if len(value) != count:
            raise self.error(name, f"has {len(value)} items", listed)
        for item in value:
            if item not in accepted:
                raise self.error(name, f"holds {shown_json(item)}", listed)
        return tuple(value)

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """The ids of a field that holds an integer, a list of them, or null."""
        value = self._take(name, None, "")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
                raise self.error(name, f"is {shown_json(value)}", f"token ids in [0, vocab_size={vocab_size}), or null")
        return tuple(ids)

    def epsilon(self, name: str) -> float:
        """What is added to a denominator: fp32 holds it, and it does not drown what it is added to."""
        return self.positive(name, minimum=1e-30, maximum=1.0)

    def items(self, name: str) -> list[Any] | None:
        value = self._take(name, None, "")
        if value is not None and not isinstance(value, list):
            raise self.error(name, f"is {shown_json(value)}", "a list or null")
        return value

    def object(self, name: str) -> "Fields | None":
        value = self._take(name, None, "")
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
            elif not any(_same(self._values[name], value) for value in neutral):
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
        return [name for name in self._values if name not in self._taken and name in self]

    def _unsupported(self, name: str, reason: str) -> ConfigError:
        got = shown_json(self._values[name])
        return ConfigError(f"{self._path}: field {self._named(name)} is not supported: {reason} (got {got})")


def _same(value: Any, choice: Any) -> bool:
    """0 == False in Python, but not in a configuration."""
    return value == choice and isinstance(value, bool) == isinstance(choice, bool)


def read_object(path: Path) -> Fields:
    try:
        return Fields(read_json_object(path, ConfigError, MAX_CONFIG_BYTES), path)
    except FileNotFoundError:
        instead = found_instead(path.parent)
        raise ConfigError(f"{path}: no such file; a checkpoint directory holds a config.json{instead}") from None
