"""Declarative parsing of JSON objects. A dataclass declares the values that each field accepts. `Fields` records which
fields were read, so that it can reject an unread field that would change results."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self

from dsa.runtime.checks import shown_json
from dsa_layers.errors import ConfigError
from dsa_layers.untrusted_files import read_json_object

# Upper limits of numbers in config.json, far above the values of real models. They keep every tensor below 2^63 bytes,
# and they bound loops over these numbers.
MAX_DIMENSION = 2**20
MAX_HEADS = 2**12
MAX_EXPERTS = 2**13
MAX_TOKENS = 2**31 - 1  # positions are int32

MAX_CONFIG_BYTES = 2**20

# Fields that do not affect inference, grouped by reason.
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

# {field that changes the results of some models: values of the field that change nothing (neutral values)}. If a family
# does not read such a field, only a neutral value or null is accepted.
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
# Unread fields with these prefixes that are not in _CHANGES_RESULTS are rejected: they probably change results.
_PREFIXES = ("index", "compress", "dspark", "engram", "hc_", "rope_", "quantization")

_REQUIRED = object()


class Fields:
    """A JSON object that records which of its fields were read. A field with value null counts as absent, because some
    tools write null and others omit the field.

    values: the object; path: the file; prefix: the names of the objects that contain this object, for error messages
    """

    def __init__(self, values: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self._values = values
        self._path = path
        self._prefix = prefix
        self._read: set[str] = set()

    @classmethod
    def of_file(cls, path: Path) -> Self:
        return cls(read_json_object(path, ConfigError, MAX_CONFIG_BYTES), path)

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def error(self, name: str, problem: str, accepted: str) -> ConfigError:
        field = shown_json(self._prefix + name)
        return ConfigError(f"{self._path}: field {field} {problem}; accepted: {accepted}")

    def read(self, name: str, declared: Any) -> Any:
        """Return the value of a field. declared: the result of a function such as `integer`. Raise ConfigError if the
        value is not accepted, or if the field is missing and has no default."""
        accepted, fits, default, convert = declared.metadata["accepted"]
        self._read.add(name)
        value = self._values.get(name)
        if value is None and default is not _REQUIRED:
            return default
        self.require(value is not None and fits(value), name, accepted)
        return convert(value)

    def require(self, condition: bool, name: str, accepted: str) -> None:
        """Raise ConfigError with the field's value and the accepted values if `condition` is false."""
        if condition:
            return
        if name not in self._values:
            raise self.error(name, "is missing", accepted)
        value = self._values[name]
        # shown_json abbreviates a long list, so the message adds the number of items.
        count = f" ({len(value)} items)" if isinstance(value, list) and len(value) > 8 else ""
        raise self.error(name, f"is {shown_json(value)}{count}", accepted)

    def object(self, name: str) -> "Fields | None":
        value = self.read(name, _accepting("an object or null", lambda value: isinstance(value, dict), None))
        return None if value is None else Fields(value, self._path, f"{self._prefix}{name}.")

    def reject_unread(self) -> None:
        """Raise ConfigError if a field that is not null was not read. Call this for an object in which every field
        changes results."""
        for name in self._unread():
            self.require(False, name, "null, because every field of this object changes what is computed")

    def warn_unread(self) -> None:
        """Raise ConfigError for an unread field that changes results (_CHANGES_RESULTS, _PREFIXES), unless its value is
        null or neutral (_CHANGES_RESULTS). Issue one warning that lists all other unread fields, except those that are
        null or in NO_INFLUENCE. Call this for the top level of config.json, to which tools add fields."""
        unknown = []
        for name in self._unread():
            if name in _CHANGES_RESULTS or name.startswith(_PREFIXES):
                neutral = _CHANGES_RESULTS.get(name, ())
                self.require(_is_one_of(self._values[name], neutral), name, _listed(neutral) or "null")
            elif name not in NO_INFLUENCE:
                unknown.append(shown_json(name))
        if unknown:
            warnings.warn(f"{self._path}: unknown fields are ignored: {', '.join(unknown)}", stacklevel=2)

    def _unread(self) -> list[str]:
        return [name for name in self._values if name not in self._read and name in self]


class Declared:
    """Base class of dataclasses that are read from a JSON object.

    A subclass declares each field, under its JSON name, with a function of this module. Fields are read in the order of
    their declarations.
    checked: {name: declaration} of JSON fields that are checked first and have no field in the dataclass
    """

    checked: ClassVar[dict[str, Any]] = {}

    def check(self, fields: Fields) -> None:
        """Raise ConfigError if fields contradict each other. fields: the JSON object from which `self` was read."""

    @classmethod
    def read(cls, fields: Fields, **given: Any) -> Self:
        """Read an instance from `fields`. given: values of dataclass fields that are not read from `fields`. Raise
        ConfigError if a value is not accepted, a required field is missing, or fields contradict each other."""
        for name, declared in cls.checked.items():
            fields.read(name, declared)
        known = SimpleNamespace(**given)
        for field in dataclasses.fields(cls):
            if field.name not in given:
                compute = field.metadata.get("compute")
                value = fields.read(field.name, field) if compute is None else compute(fields, known)
                setattr(known, field.name, value)
        config = cls(**vars(known))
        config.check(fields)
        return config


def computed(compute: Callable[[Fields, SimpleNamespace], Any]) -> Any:
    """Declare a field whose value is compute(fields, known). fields: the JSON object. known: a namespace of the values
    in `given` of `Declared.read` and of all fields declared earlier."""
    return dataclasses.field(metadata={"compute": compute})


def integer(minimum: int = 1, maximum: int = MAX_DIMENSION, default: Any = _REQUIRED) -> Any:
    accepted = f"an integer of at least {minimum}, up to {maximum}"
    return _accepting(accepted, lambda value: type(value) is int and minimum <= value <= maximum, default)


def number(minimum: float = 1e-9, maximum: float = 1e9, default: Any = _REQUIRED) -> Any:
    """Declare a field that holds a number from `minimum` to `maximum`. It is converted to float."""

    def fits(value: Any) -> bool:
        # Also rejects NaN, and integers too large for a float: Python compares int and float exactly.
        return type(value) in (int, float) and minimum <= value <= maximum

    return _accepting(f"a number from {minimum:g} to {maximum:g}", fits, default, float)


def epsilon() -> Any:
    """Declare a field that holds an epsilon for denominators, from 1e-30 to 1. The minimum does not round to 0 in
    fp32."""
    return number(minimum=1e-30, maximum=1.0)


def one_of(*choices: Any, default: Any = _REQUIRED) -> Any:
    return _accepting(_listed(choices), lambda value: _is_one_of(value, choices), default)


def only(value: Any) -> Any:
    """Declare a field with a single accepted value, which is also the default."""
    return one_of(value, default=value)


def refused(problem: str) -> Any:
    """Declare a field that must be missing or null. problem: the reason, for the error message."""
    return _accepting(f"null: {problem}", lambda value: False, None)


def each_of(*choices: Any, counts: dict[int, str]) -> Any:
    """Declare a field that holds a list of choices, a string of one-letter choices, or null. Lists and strings are
    converted to tuples. counts: {accepted number of items: source of this number, for error messages}."""

    def fits(value: Any) -> bool:
        if not isinstance(value, list | str) or len(value) not in counts:
            return False
        return all(_is_one_of(item, choices) for item in value)

    numbers = " or ".join(f"{count} ({source})" for count, source in counts.items())
    return _accepting(f"{numbers} items, each one of {_listed(choices)}, or null", fits, None, tuple)


def integers(count: int, source: str, maximum: int) -> Any:
    """Declare a field that holds a list of at least `count` integers from 0 to `maximum`, or null. The first `count`
    items are converted to a tuple. source: the origin of `count`, for error messages."""

    def fits(value: Any) -> bool:
        return (
            isinstance(value, list)
            and len(value) >= count
            and all(type(item) is int and 0 <= item <= maximum for item in value)
        )

    listed = f"at least {count} ({source}) integers from 0 to {maximum}, or null"
    return _accepting(listed, fits, None, lambda value: tuple(value[:count]))


def anything() -> Any:
    """Declare a field that accepts any value."""
    return _accepting("anything", lambda value: True, None)


def token_ids(vocab_size: int) -> Any:
    """Declare a field that holds a token id, a list of token ids, or null. The result is a tuple of ids, () for
    null."""

    def ids(value: Any) -> tuple:
        return tuple(value) if isinstance(value, list) else (value,)

    def fits(value: Any) -> bool:
        return all(type(token) is int and 0 <= token < vocab_size for token in ids(value))

    return _accepting(f"token ids in [0, vocab_size={vocab_size}), or null", fits, (), ids)


def _accepting(
    listed: str, fits: Callable[[Any], bool], default: Any, convert: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Declare a field. listed: the accepted values, for error messages. fits: whether a value is accepted. default: the
    result for a missing or null field. convert: function from an accepted JSON value to the result."""
    return dataclasses.field(metadata={"accepted": (listed, fits, default, convert)})


def _listed(choices: tuple) -> str:
    return ", ".join(map(shown_json, choices))


def _is_one_of(value: Any, choices: tuple) -> bool:
    """Return whether `value` equals one of `choices`, where 0 and False differ, and so do 1 and True."""
    return any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in choices)
