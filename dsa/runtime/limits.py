"""Limits of sizes and numbers, declared as data.

    limits={"H": (32, 64), "K": multiple_of(16), "T*D": at_most(2**31), "softmax_scale": POSITIVE}

A key is a word of the op's shapes, a formula of such words (`shapes`), or the name of an Int or a Number. "rows" is the
product of the dimensions that "..." stands for, and "itemsize" the bytes of a number of the first tensor. A value
contains what is accepted: a tuple of numbers, or an object from below.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from dsa.runtime.shapes import Sizes, Word, listed


class Accepted(Protocol):
    """What a message says is accepted by its str()."""

    def __contains__(self, value: object, /) -> bool: ...


@dataclass(frozen=True)
class Multiples:
    """Multiples of `of` from `least` to `most`."""

    of: int = 1
    least: int = 0
    most: float = math.inf

    def __contains__(self, value: int) -> bool:
        return self.least <= value <= self.most and value % self.of == 0

    def __str__(self) -> str:
        bounds = [f"a multiple of {self.of}"] if self.of > 1 else []
        if self.least:
            bounds.append(f"at least {self.least}")
        if self.most < math.inf:
            bounds.append(f"at most {self.most}")
        return ", ".join(bounds)


class _Positive:
    def __contains__(self, value: float) -> bool:
        return 0 < value < math.inf

    def __str__(self) -> str:
        return "a positive number"


POSITIVE = _Positive()


def at_least(least: int) -> Multiples:
    return Multiples(1, least)


def at_most(most: int, least: int = 0) -> Multiples:
    return Multiples(1, least, most)


def multiple_of(of: int, least: int = 0, most: float = math.inf) -> Multiples:
    return Multiples(of, least, most)


class Limits:
    """Limits by word, as the module says. names: those that the words use"""

    def __init__(self, limits: Mapping[str, Accepted]) -> None:
        self.limits = [(Word(text), accepted) for text, accepted in limits.items()]
        self.names = {name for word, _ in self.limits for name in word.names}

    def broken(self, sizes: Sizes) -> Iterator[tuple[str, str, str, object]]:
        """(argument, what is accepted, word, size) of each size that is not accepted."""
        for word, accepted in self.limits:
            known = word.known(sizes)
            if not known:
                continue  # the size of an optional argument that is not given
            size = word.size(sizes)
            if size not in accepted:
                taken = listed(map(str, accepted), "or") if isinstance(accepted, tuple) else str(accepted)
                yield sizes.origin[known[0]], taken, word.shown, size
