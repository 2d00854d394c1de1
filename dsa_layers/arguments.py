"""Check arguments. Each error names the argument, the given value and the accepted values."""

import math
import numbers
import operator
import reprlib
from os import PathLike
from pathlib import Path
from typing import Any


def integer(name: str, value: Any, *, at_least: int | None = None, at_most: int | None = None) -> int:
    """Return `value` as an int. Raise TypeError if it is a bool or not an integer, and ValueError if it is out of
    bounds."""
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
    """Return `value` as a float, or an infinity if a float cannot represent it. Raise TypeError if it is a bool or not
    a real number."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name}: must be a number, got {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def flag(name: str, value: Any) -> bool:
    """Return `value`. Raise TypeError if it is not True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: must be True or False, got {shown(value)}")
    return value


def instance(name: str, value: Any, kind: type, what: str) -> None:
    """Raise TypeError if `value` is not an instance of `kind`. what: the description of `kind` in the message"""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: must be {what}, got {type(value).__name__}")


def path_of(name: str, value: Any) -> Path:
    """Return `value` as a Path. Raise TypeError if it is neither a string nor a path."""
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
        except ValueError:  # Python limits the number of digits that it converts
            return f"an integer of {x.bit_length()} bits"


class _JsonRepr(_Repr):
    def repr_bool(self, x: bool, level: int) -> str:
        return "true" if x else "false"

    def repr_NoneType(self, x: None, level: int) -> str:
        return "null"


_REPR, _JSON_REPR = _Repr(), _JsonRepr()


def shown(value: Any) -> str:
    """Return the repr of `value` for an error message, on one line. A long repr is shortened in the middle or after the
    first items, so values from untrusted files cannot make a message long."""
    return " ".join(_REPR.repr(value).split())


def shown_json(value: Any) -> str:
    """Return `shown` for a value from a JSON file. True, False and None are written as true, false and null."""
    return " ".join(_JSON_REPR.repr(value).split())
