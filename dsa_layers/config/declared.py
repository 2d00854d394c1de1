"""Dataclasses that declare, per field, which values of a JSON object they accept."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, Self

from dsa_layers.arguments import shown_json
from dsa_layers.config.fields import MAX_DIMENSION, REQUIRED, Accepted, Fields, same


class Declared:
    """Base class of dataclasses that are read from a JSON object.

    A subclass declares each field with a function of this module, under the JSON field's name. Fields are read in the
    order of their declarations.
    checked: declarations of JSON fields that are checked before all others and have no field in the dataclass
    """

    checked: ClassVar[dict[str, Any]] = {}

    def check(self, fields: Fields) -> None:
        """Raises ConfigError for fields that contradict each other. fields: the object that this was read from."""

    @classmethod
    def read(cls, fields: Fields, **given: Any) -> Self:
        """The dataclass from `fields`. given: values of fields that are not read.

        Raises ConfigError that names the field, what it holds and what is accepted.
        """
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
    """A field that is read in its own way. compute: (the JSON object, the dataclass's fields read before) -> value"""
    return dataclasses.field(metadata={"compute": compute})


def integer(minimum: int = 1, maximum: int = MAX_DIMENSION, default: Any = REQUIRED) -> Any:
    accepted = f"an integer of at least {minimum}, up to {maximum}"
    return _accepting(accepted, lambda value: type(value) is int and minimum <= value <= maximum, default)


def number(minimum: float = 1e-9, maximum: float = 1e9, default: Any = REQUIRED) -> Any:
    """A float above 0."""

    def fits(value: Any) -> bool:
        # The comparison is exact: an integer that no float can hold is not converted, and NaN is in no range.
        return type(value) in (int, float) and minimum <= value <= maximum

    return _accepting(f"a finite number above 0, from {minimum:g} to {maximum:g}", fits, default, float)


def epsilon() -> Any:
    """An addend of a denominator. fp32 can hold it, and it is at most 1."""
    return number(minimum=1e-30, maximum=1.0)


def one_of(*choices: Any, default: Any = REQUIRED) -> Any:
    def chosen(value: Any) -> Any:
        return next(choice for choice in choices if same(value, choice))

    return _accepting(_listed(choices), lambda value: _is_one_of(value, choices), default, chosen)


def only(value: Any) -> Any:
    """The one accepted value, and the default. Another value needs code that does not exist."""
    return one_of(value, default=value)


def refused(problem: str, accepted: str) -> Any:
    """A field that must be missing or null."""
    return _declaration(accepted, lambda value: problem, None, None)


def each_of(*choices: Any, counts: dict[int, str]) -> Any:
    """A list of choices, a string of them as letters, or null. counts: accepted number of items -> what it follows
    from"""

    def problem(value: Any) -> str | None:
        if not isinstance(value, list | str):
            return f"is {shown_json(value)}"
        for item in value:
            if not _is_one_of(item, choices):
                return f"holds {shown_json(item)}"
        return None if len(value) in counts else f"has {len(value)} items"

    numbers = " or ".join(f"{count} ({source})" for count, source in counts.items())
    accepted = f"{numbers} items, each one of {_listed(choices)}, or null"
    return _declaration(accepted, problem, None, tuple)


def strings() -> Any:
    def fits(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)

    return _accepting("a list of strings, or null", fits, (), tuple)


def token_ids(vocab_size: int) -> Any:
    """The tuple of a token id, of a list of them, or of null."""

    def ids(value: Any) -> tuple:
        return tuple(value) if isinstance(value, list) else (value,)

    def fits(value: Any) -> bool:
        return all(type(token) is int and 0 <= token < vocab_size for token in ids(value))

    return _accepting(f"token ids in [0, vocab_size={vocab_size}), or null", fits, (), ids)


def _accepting(
    listed: str, fits: Callable[[Any], bool], default: Any, convert: Callable[[Any], Any] = lambda value: value
) -> Any:
    def problem(value: Any) -> str | None:
        return None if fits(value) else f"is {shown_json(value)}"

    return _declaration(listed, problem, default, convert)


def _declaration(*accepted: Any) -> Any:
    return dataclasses.field(metadata={"accepted": Accepted(*accepted)})


def _listed(choices: tuple) -> str:
    return ", ".join(map(shown_json, choices))


def _is_one_of(value: Any, choices: tuple) -> bool:
    return any(same(value, choice) for choice in choices)
