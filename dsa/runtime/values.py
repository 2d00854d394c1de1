"""Checks of arguments that are no tensors, and the text of a value in an error message.

The message of a check names the argument, what it got and what is accepted. `check_int`, `check_number` and
`check_flag` also accept symbolic values of torch.compile (SymInt, SymFloat, SymBool).
"""

import contextlib
import math
import numbers
import operator
import reprlib
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

INT_MAX = 2**31 - 1  # the largest int argument of an op; kernels count in int32
_FP32_MAX = torch.finfo(torch.float32).max
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


def check_int(name: str, value: object, least: int | None, most: int | None = INT_MAX) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}: must be an integer, got {shown(value)}")
    if least is not None and value < least:
        raise ValueError(f"{name}: must be at least {least}, got {shown(value)}")
    if most is not None and value > most:
        raise ValueError(f"{name}: must be at most {most}, got {shown(value)}")


def check_positive(name: str, value: object, most: int = INT_MAX) -> None:
    check_int(name, value, 1, most)


def integer(name: str, value: Any, *, at_least: int | None = None, at_most: int | None = None) -> int:
    """Return `value` as an int. In contrast to `check_int`, accept other libraries' integers, such as numpy's."""
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):  # `check_int` raises the error
            value = operator.index(value)
    check_int(name, value, at_least, at_most)
    return value


def check_number(name: str, value: object, least: float | None = None) -> None:
    """Check that `value` is a number that is finite in fp32 and, if `least` is given, at least `least`. An int must fit
    in 64 bits."""
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name}: must be a number, got {shown(value)}")
    if not -_FP32_MAX <= value <= _FP32_MAX:  # also false for NaN
        raise ValueError(f"{name}: must be finite in fp32, got {shown(value)}")
    if isinstance(value, int) and not _INT64_MIN <= value <= _INT64_MAX:
        raise ValueError(f"{name}: must be a float or an int of 64 bits, got {shown(value)}")
    if least is not None and value < least:
        raise ValueError(f"{name}: must be at least {least}, got {shown(value)}")


def number(name: str, value: Any) -> float:
    """Return `value` as a float, or an infinity if a float cannot represent it. In contrast to `check_number`, accept
    other libraries' real numbers, infinities and NaN."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: must be a number, got {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, (bool, torch.SymBool)):
        raise TypeError(f"{name}: must be True or False, got {shown(value)}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name}: must be {alternatives(map(repr, choices))}, got {shown(value)}")
    if value not in choices:
        raise ValueError(f"{name}: must be {alternatives(map(repr, choices))}, got {shown(value)}")


def check_instance(name: str, value: object, kind: type, what: str) -> None:
    """Raise TypeError if `value` is not an instance of `kind`. what: the description of `kind` in the message"""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: must be {what}, got {type(value).__name__}")


def check_pair(name: str, value: object, what: str) -> tuple:
    """Return `value` as a tuple of two. what: the two values in words, for the message"""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        got = f"{len(value)} of them" if isinstance(value, (tuple, list)) else type(value).__name__
        raise TypeError(f"{name}: must be a pair {what}, got {got}")
    return tuple(value)


def path_of(name: str, value: Any) -> Path:
    """Return `value` as a Path. Raise TypeError if it is neither a string nor a path."""
    if not isinstance(value, str | PathLike):
        raise TypeError(f"{name}: must be a string or a path, got {shown(value)}")
    return Path(value)


def alternatives(words: Iterable[str]) -> str:
    """Return the words with commas, and "or" before the last one."""
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


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
