"""Shapes in words: numbers, names of sizes and formulas of these, and the sizes that a call binds the names to."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from dsa.runtime.checks import check_tensor, is_tensor, shape_of

REST = "..."  # any number of dimensions
ROWS = "rows"  # the product of these


class Sizes(dict[str, Any]):
    """{name: size} of a call.

    origin  {name: the argument that the size comes from, as messages call it}
    """

    def __init__(self) -> None:
        self.origin: dict[str, str] = {}

    def bind(self, name: str, size: object, argument: str) -> None:
        """Bind a name that is not bound yet."""
        self.setdefault(name, size)
        self.origin.setdefault(name, argument)


class Word:
    """A word of a shape, parsed once: parsing takes longer than the launch of a small op."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.number = int(text) if text.isdigit() else None
        self.names = tuple(name for name in re.findall(r"[A-Za-z_]\w*", text) if name != "ceil")
        self.shown = re.sub(r"([+*/])", r" \1 ", text)  # in messages, if the size may be any
        more = re.fullmatch(r"([A-Za-z_]\w*)\+(\d+)", text)
        self.more_than = (more[1], int(more[2])) if more else None
        formula = re.sub(r"ceil\((\w+)/(\w+)\)", r"(-(-\1//\2))", text)
        formula = re.sub(r"([A-Za-z_]\w*)", r"sizes['\1']", formula)
        # The texts are constants of this package, so eval runs nothing of a caller.
        self.formula: Callable[[Sizes], int] = eval(f"lambda sizes: {formula}", {"__builtins__": {}})

    def known(self, sizes: Sizes) -> tuple[str, ...]:
        """The names in it, if all of them are bound."""
        if self.text in sizes:
            return (self.text,)
        return self.names if all(name in sizes for name in self.names) else ()

    def size(self, sizes: Sizes) -> int | str:
        """The size that it stands for, or words for a message if the size may be any."""
        if self.number is not None:
            return self.number
        if self.text in sizes:
            return sizes[self.text]
        return self.formula(sizes) if self.known(sizes) else self.shown

    def bind(self, argument: str, size: int, shape: Sequence[int], sizes: Sizes) -> None:
        """Bind an unknown word to this size, and B in "B+1" to one less."""
        if self.number is not None or self.known(sizes):
            return
        sizes.bind(self.text, size, argument)
        if self.more_than:
            base, more = self.more_than
            if size < more:
                raise ValueError(f"{argument}: must have {base} + {more} entries, got shape {list(shape)}")
            sizes.bind(base, size - more, argument)


class _Shape:
    """The words of one shape."""

    def __init__(self, text: str) -> None:
        words = text.split()
        self.open = REST in words
        cut = words.index(REST) if self.open else len(words)
        self.front, self.back = [Word(one) for one in words[:cut]], [Word(one) for one in words[cut + 1 :]]

    def check(self, argument: str, value: object, dtypes: Sequence[torch.dtype], sizes: Sizes) -> None:
        """Check a tensor's dtype and shape, and bind the names that occur here first."""
        shape = shape_of(value)
        middle: tuple[int, ...] = ()
        if self.open:
            middle = sizes[REST] if REST in sizes else self._middle(argument, value, dtypes, shape)
        front, back = ([word.size(sizes) for word in words] for words in (self.front, self.back))
        expected = [*front, *middle, *back]
        if not is_tensor(value, dtypes, expected):
            check_tensor(argument, value, dtypes, expected, listed(self.sources(sizes)))
        if self.open:
            sizes.bind(REST, middle, argument)
            sizes.bind(ROWS, math.prod(middle), argument)
        for word, size in zip(self.front, shape):
            word.bind(argument, size, shape, sizes)
        for word, size in zip(self.back, shape[len(shape) - len(self.back) :]):
            word.bind(argument, size, shape, sizes)

    def _middle(
        self, argument: str, value: object, dtypes: Sequence[torch.dtype], shape: tuple[int, ...]
    ) -> tuple[int, ...]:
        """The dimensions that "..." stands for."""
        count = len(self.front) + len(self.back)
        if len(shape) < count:
            check_tensor(argument, value, dtypes, shape)
            many = f"{count} dimension{'s' if count > 1 else ''}"
            raise ValueError(f"{argument}: must have at least {many}, got shape {list(shape)}")
        return shape[len(self.front) : len(shape) - len(self.back)]

    def sources(self, sizes: Sizes) -> dict[str, None]:
        """The arguments that sizes of its words come from."""
        known = [name for word in (*self.front, *self.back) for name in word.known(sizes)]
        rest = [REST] if self.open and REST in sizes else []
        return dict.fromkeys(sizes.origin[name] for name in (*known, *rest))

    def expected(self, sizes: Sizes) -> list[int | str]:
        return [word.size(sizes) for word in self.front]

    def fits(self, shape: tuple[int, ...], sizes: Sizes) -> bool:
        expected = self.expected(sizes)
        return len(shape) == len(expected) and all(isinstance(n, str) or n == size for n, size in zip(expected, shape))


class Shapes:
    """The shapes of which a tensor has one, written with "|" between them."""

    def __init__(self, text: str) -> None:
        self.shapes = [_Shape(words) for words in text.split("|")]
        words = [word for shape in self.shapes for word in (*shape.front, *shape.back)]
        self.names = {name for word in words for name in word.names}
        if any(shape.open for shape in self.shapes):
            self.names.add(ROWS)

    def check(self, argument: str, value: object, dtypes: Sequence[torch.dtype], sizes: Sizes) -> None:
        """Check a tensor's dtype and shape, and bind the names that occur here first."""
        shape = self.shapes[0]
        if len(self.shapes) > 1:
            got = shape_of(value)
            check_tensor(argument, value, dtypes, got)
            fitting = [one for one in self.shapes if one.fits(got, sizes)]
            if not fitting:
                sources = dict.fromkeys(source for one in self.shapes for source in one.sources(sizes))
                either = " or ".join(f"[{', '.join(map(str, one.expected(sizes)))}]" for one in self.shapes)
                of = f" (sizes as of {listed(sources)})" if sources else ""
                raise ValueError(f"{argument}: shape must be {either}, got {list(got)}{of}")
            shape = fitting[0]
        shape.check(argument, value, dtypes, sizes)


def listed(names: Iterable[str], last_with: str = "and") -> str:
    *most, last = names or [""]
    return f"{', '.join(most)} {last_with} {last}" if most else last
