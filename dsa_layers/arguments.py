"""Check arguments. An error names the argument, the value that was given and the accepted values."""

import math
import numbers
import operator
import reprlib
from os import PathLike
from pathlib import Path
from typing import Any


def integer(name: str, value: Any, *, at_least: int | None = None, at_most: int | None = None) -> int:
    """`value` as an int. TypeError for what is no integer, a bool among them; ValueError outside the bounds."""
    if isinstance(value, bool):
        raise TypeError(f"{name}: must be an integer, got {value}")
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: must be an integer, got {shown(value)}") from None
    if at_least is not None and value < at_least:
        raise ValueError(f"{name}: must be at least {at_least}, got {shown(value)}")
    if at_most is not None and value > at_most:
        raise ValueError(f"{name}: must be at most {at_most}, got {shown(value)}")
    return value


def number(name: str, value: Any) -> float:
    """`value` as a float, infinite where it is too large for one. TypeError for what is no real number."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name}: must be a number, got {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def flag(name: str, value: Any) -> bool:
    """`value`, if it is True or False; else TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: must be True or False, got {shown(value)}")
    return value


def instance(name: str, value: Any, kind: type, what: str) -> None:
    """TypeError unless `value` is of this class, which messages call `what`."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: must be {what}, got {type(value).__name__}")


def path_of(name: str, value: Any) -> Path:
    """`value` as a Path; TypeError for what is no string and no path."""
    if not isinstance(value, str | PathLike):
        raise TypeError(f"{name}: must be a string or a path, got {shown(value)}")
    return Path(value)


class _Repr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 200
        self.maxlong = 60
        self.maxlist = self.maxtuple = self.maxdict = 8
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:  # of more digits than Python writes
            return f"an integer of {x.bit_length()} bits"


class _JsonRepr(_Repr):
    def repr_bool(self, x: bool, level: int) -> str:
        return "true" if x else "false"

    def repr_NoneType(self, x: None, level: int) -> str:
        return "null"


_REPR, _JSON_REPR = _Repr(), _JsonRepr()


def shown(value: Any) -> str:
    """`value` as a message shows it: its repr on one line, shortened in the middle or after the first items if it is
    long. What a stranger has written, as in a checkpoint's files, makes no message long either."""
    return " ".join(_REPR.repr(value).split())


def shown_json(value: Any) -> str:
    """`shown`, of a value that a JSON file holds: true, false and null have their names there."""
    return " ".join(_JSON_REPR.repr(value).split())
