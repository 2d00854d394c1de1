"""Ops whose kernel is still to be written: the reference under its public name."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from dsa import backends

P = ParamSpec("P")
R = TypeVar("R")


def reference_only(function: Callable[P, R]) -> Callable[P, R]:
    """`function` with its signature and documentation, and one warning when a Hopper GPU runs it."""

    @functools.wraps(function)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor):
                backends.note_reference_only(function.__name__, value)
                break
        return function(*args, **kwargs)

    return op
