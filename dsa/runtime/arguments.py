"""Specs of an op's arguments. The checks of arguments, and the error messages, are derived from the specs.

    RMS_NORM = Arguments(
        x=Tensor("... D", FLOATS, layout=ROWS),
        weight=Tensor("D", F32, optional=True, layout=ROWS),
        eps=Number(least=0),
    )
    RMS_NORM.check(x, weight, eps)          # types, dtypes, shapes and devices, for references and kernels
    RMS_NORM.check_layouts(x, weight, eps)  # strides and alignment, for kernels

A shape consists of words, one per dimension: a number, a name, or a formula of names that are bound before ("2*n",
"ceil(K/128)"). The first use of a word binds the word to the size of this dimension; "B+1" also binds B. At later uses
the dimension must have this size. "..." stands for any number of dimensions, the same in all shapes. "B | B T" allows
either shape; these may contain "..." if an argument that is checked before has it, too. The name of an Int that is
checked before is also a word and stands for the Int's value.

Limits of sizes and numbers are data:

    limits={"H": (32, 64), "K": multiple_of(16), "T*D": at_most(2**31), "softmax_scale": POSITIVE}

A key is a word of the op's shapes, a formula of such words, the `count` of a Tensors, or the name of an Int or a
Number. "rows" is the product of the dimensions that "..." stands for, and "itemsize" the bytes per element of the first
tensor. A value is a container of the accepted numbers: a tuple, an object made by `at_least`, `at_most` or
`multiple_of`, or POSITIVE.

The error messages are in `checks`, except for those about alternative shapes, limits and lists of tensors.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from dsa.runtime.checks import (
    ANY,
    INT_MAX,
    check_address,
    check_choice,
    check_dtype,
    check_flag,
    check_int,
    check_layout,
    check_mergeable,
    check_number,
    check_same_device,
    check_same_dtype,
    check_tensor,
    check_writable,
    dtype_name,
    is_tensor,
    shape_of,
)

F32 = (torch.float32,)
Layout = str | Callable[[torch.Tensor], str]
REST = "..."
ROW_COUNT = "rows"


class Sizes(dict[str, Any]):
    """The sizes of a call, {name: size}, and the values of the call's ints and numbers.

    origin  {name: the argument whose shape or value gave the size}; arguments are named as in messages, such as "a[0]"
    """

    def __init__(self) -> None:
        self.origin: dict[str, str] = {}

    def bind(self, name: str, size: object, argument: str) -> None:
        """argument: the argument that gave the size, for messages"""
        self.setdefault(name, size)
        self.origin.setdefault(name, argument)


class Word:
    """A word of a shape, parsed once: parsing in every call would take longer than the launch of a small op."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.number = int(text) if text.isdigit() else None
        self.names = tuple(name for name in re.findall(r"[A-Za-z_]\w*", text) if name != "ceil")
        self.shown = re.sub(r"([+*/])", r" \1 ", text)  # "2 * n" for "2*n", in messages
        more = re.fullmatch(r"([A-Za-z_]\w*)\+(\d+)", text)
        self.more_than = (more[1], int(more[2])) if more else None
        formula = re.sub(r"ceil\((\w+)/(\w+)\)", r"(-(-\1//\2))", text)
        formula = re.sub(r"(?<!/)/(?!/)", "//", formula)  # "R/2" is an integer division
        formula = re.sub(r"([A-Za-z_]\w*)", r"sizes['\1']", formula)
        # Words are constants of this package, so eval never sees a string of a caller.
        self.formula: Callable[[Sizes], int] = eval(f"lambda sizes: {formula}", {"__builtins__": {}})

    def known(self, sizes: Sizes) -> tuple[str, ...]:
        """Return the keys of `sizes` that determine the word's size: the word as text if it is bound itself ("R/2"),
        otherwise its names. Return () for a number, and for a word whose size is not known yet."""
        if self.text in sizes:
            return (self.text,)
        return self.names if all(name in sizes for name in self.names) else ()

    def size(self, sizes: Sizes) -> int | str:
        """Return the word's size, or the word as text if any size is accepted."""
        if self.number is not None:
            return self.number
        if self.text in sizes:
            return sizes[self.text]
        return self.formula(sizes) if self.known(sizes) else self.shown

    def bind(self, argument: str, size: int, shape: Sequence[int], sizes: Sizes) -> None:
        """If the word is not known, bind it to this size, and for "B+1" bind B to this size minus 1. Raises ValueError
        if the size is too small for that."""
        if self.number is not None or self.known(sizes):
            return
        sizes.bind(self.text, size, argument)
        if self.more_than:
            base, more = self.more_than
            if size < more:
                raise ValueError(f"{argument}: must have {base} + {more} entries, got shape {list(shape)}")
            sizes.bind(base, size - more, argument)


class _Shape:
    def __init__(self, text: str) -> None:
        words = text.split()
        self.open = REST in words
        cut = words.index(REST) if self.open else len(words)
        self.front, self.back = [Word(one) for one in words[:cut]], [Word(one) for one in words[cut + 1 :]]

    def check(self, argument: str, value: object, dtypes: Sequence[torch.dtype], sizes: Sizes) -> None:
        """Check a tensor's dtype and shape, and bind names."""
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
            sizes.bind(ROW_COUNT, math.prod(middle), argument)
        for word, size in zip(self.front, shape):
            word.bind(argument, size, shape, sizes)
        for word, size in zip(self.back, shape[len(shape) - len(self.back) :]):
            word.bind(argument, size, shape, sizes)

    def _middle(
        self, argument: str, value: object, dtypes: Sequence[torch.dtype], shape: tuple[int, ...]
    ) -> tuple[int, ...]:
        count = len(self.front) + len(self.back)
        if len(shape) < count:
            check_tensor(argument, value, dtypes, shape)
            many = f"{count} dimension{'s' if count > 1 else ''}"
            raise ValueError(f"{argument}: must have at least {many}, got shape {list(shape)}")
        return shape[len(self.front) : len(shape) - len(self.back)]

    def sources(self, sizes: Sizes) -> dict[str, None]:
        known = [name for word in (*self.front, *self.back) for name in word.known(sizes)]
        rest = [REST] if self.open and REST in sizes else []
        return dict.fromkeys(sizes.origin[name] for name in (*known, *rest))

    def expected(self, sizes: Sizes) -> list[int | str]:
        middle = sizes[REST] if self.open else ()
        return [*(w.size(sizes) for w in self.front), *middle, *(w.size(sizes) for w in self.back)]

    def fits(self, shape: tuple[int, ...], sizes: Sizes) -> bool:
        expected = self.expected(sizes)
        return len(shape) == len(expected) and all(isinstance(n, str) or n == size for n, size in zip(expected, shape))


class Shapes:
    """Alternative shapes, written with "|" between them."""

    def __init__(self, text: str) -> None:
        self.shapes = [_Shape(words) for words in text.split("|")]
        words = [word for shape in self.shapes for word in (*shape.front, *shape.back)]
        self.names = {name for word in words for name in word.names}
        if any(shape.open for shape in self.shapes):
            self.names.add(ROW_COUNT)

    def check(self, argument: str, value: object, dtypes: Sequence[torch.dtype], sizes: Sizes) -> None:
        """Check a tensor's dtype and shape. Bind names by the first alternative that fits."""
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


class Accepted(Protocol):
    """A container of accepted values. Messages show its str(), or the members of a tuple."""

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
    """The limits of an op, with their words parsed. names: the names in these words"""

    def __init__(self, limits: Mapping[str, Accepted]) -> None:
        self.limits = [(Word(text), accepted) for text, accepted in limits.items()]
        self.names = {name for word, _ in self.limits for name in word.names}

    def broken(self, sizes: Sizes) -> Iterator[tuple[str, str, str, object]]:
        """Yield (argument that gave the size, accepted values as text, word, size) for each size that is not
        accepted."""
        for word, accepted in self.limits:
            known = word.known(sizes)
            if not known:
                continue  # the word occurs only in an optional argument that is not given
            size = word.size(sizes)
            if size not in accepted:
                taken = listed(map(str, accepted), "or") if isinstance(accepted, tuple) else str(accepted)
                yield sizes.origin[known[0]], taken, word.shown, size


@dataclass(frozen=True)
class Tensor:
    """A tensor.

    shape     the dimensions as words, see the module's docstring
    dtypes    accepted dtypes
    like      name of the argument whose dtype it must have
    besides   with `like`: dtypes that are accepted besides that dtype
    optional  whether it may be None
    layout    what the kernels require of its memory: ANY, INNER, ROWS, CONTIGUOUS, ALIGNED or PAGES, or a function that
              returns one of these for a tensor of a valid dtype and shape
    merged    (first, end): the kernels view the dimensions first:end as one dimension, so these dimensions must be
              mergeable
    written   whether the op writes to it in place
    name      its name in messages, if that is not the parameter's name: "kv[0]"
    rule      rule(name, tensor) is called with the name in messages and a tensor of a valid dtype and shape, and raises
              ValueError if the tensor is wrong. It can return {name: size} to bind names to other sizes than those of
              the shape
    """

    shape: str
    dtypes: tuple[torch.dtype, ...]
    like: str = ""
    besides: tuple[torch.dtype, ...] = ()
    optional: bool = False
    layout: Layout = ANY
    merged: tuple[int, int] = (0, 0)
    written: bool = False
    name: str = ""
    rule: Callable[[str, torch.Tensor], Mapping[str, int] | None] | None = None


@dataclass(frozen=True)
class Tensors:
    """A list of one or more tensors, all with the same dtype and shape.

    count           a name that is bound to the number of tensors; a later list with this name must be as long
    layout, merged  see `Tensor`; they apply to each tensor of the list
    """

    shape: str
    dtypes: tuple[torch.dtype, ...]
    count: str
    layout: Layout = ANY
    merged: tuple[int, int] = (0, 0)
    optional: bool = False
    name: str = ""


@dataclass(frozen=True)
class Int:
    """An int from `least` to `most`. most: a number, or a word that is bound before."""

    least: int = 1
    most: int | str = INT_MAX
    optional: bool = False

    def check(self, name: str, value: object) -> None:
        check_int(name, value, self.least, INT_MAX if isinstance(self.most, str) else self.most)


@dataclass(frozen=True)
class Number:
    least: float | None = None
    optional: bool = False

    def check(self, name: str, value: object) -> None:
        check_number(name, value, self.least)


@dataclass(frozen=True)
class Flag:
    optional: bool = False

    def check(self, name: str, value: object) -> None:
        check_flag(name, value)


@dataclass(frozen=True)
class Choice:
    choices: tuple[str, ...]
    optional: bool = False

    def check(self, name: str, value: object) -> None:
        check_choice(name, value, self.choices)


@dataclass(frozen=True)
class Dtype:
    dtypes: tuple[torch.dtype, ...]
    optional: bool = False

    def check(self, name: str, value: object) -> None:
        check_dtype(name, value, self.dtypes)


Spec = Tensor | Tensors | Int | Number | Flag | Choice | Dtype


class Arguments:
    """The specs of an op's arguments, in the order of the arguments.

    limits  limits of sizes and numbers that also hold for the reference
    rule    a function that raises ValueError for arguments that are wrong for reasons that specs and limits cannot
            express. It is called after the other checks, with the arguments that its parameters name
    first   arguments to check before the others, so that messages compare the others' sizes and devices with those of
            these arguments
    """

    def __init__(
        self,
        *,
        limits: Mapping[str, Accepted] | None = None,
        rule: Callable[..., None] | None = None,
        first: tuple[str, ...] = (),
        **specs: Spec,
    ) -> None:
        self.specs, self.limits, self.rule = specs, limits or {}, rule
        self.names = tuple(getattr(spec, "name", "") or name for name, spec in specs.items())
        self._check_rule = None if rule is None else self.taking("rule", rule)
        self.written = tuple(name for name, spec in specs.items() if isinstance(spec, Tensor) and spec.written)
        with_shape = ((name, spec) for name, spec in specs.items() if isinstance(spec, (Tensor, Tensors)))
        self.shapes = {name: Shapes(spec.shape) for name, spec in with_shape}
        self._limits = self.limits_of("limits", self.limits)
        names = list(specs)
        in_order = [names.index(name) for name in (*first, *(name for name in names if name not in first))]
        # In the order of the checks: (index, name, spec, name in messages, shapes).
        self._rows = [(i, names[i], specs[names[i]], self.names[i], self.shapes.get(names[i])) for i in in_order]
        self._first = first
        # (index, spec, name in messages) of the arguments that torch's dispatcher converts
        rows = zip(specs.values(), self.names, strict=True)
        self._scalars = [(i, *row) for i, row in enumerate(rows) if isinstance(row[0], (Int, Number, Flag))]

    def writing(self, outputs: Mapping[str, Tensor]) -> "Arguments":
        """Return Arguments with these arguments and then `outputs`, {name: spec}, to which the op writes."""
        written = {name: replace(spec, written=True) for name, spec in outputs.items()}
        return Arguments(limits=self.limits, rule=self.rule, first=self._first, **self.specs, **written)

    def limits_of(self, what: str, limits: Mapping[str, Accepted]) -> Limits:
        """Parse limits of these arguments' sizes and numbers. Raises TypeError for other keys. what: the name of the
        limits in messages"""
        numbers = {name for name, spec in self.specs.items() if isinstance(spec, (Int, Number))}
        counts = {spec.count for spec in self.specs.values() if isinstance(spec, Tensors)}
        known = numbers.union(["itemsize"], counts, *(shapes.names for shapes in self.shapes.values()))
        made = Limits(limits)
        if unknown := made.names - known:
            raise TypeError(f"{what}: must be of {', '.join(sorted(known))}, got {', '.join(sorted(unknown))}")
        return made

    def check(self, *values: object) -> Sizes:
        """Check the values of all arguments, and return the sizes by name. Raises TypeError or ValueError that names
        the wrong argument."""
        sizes = Sizes()
        found: dict[str, torch.Tensor] = {}
        if len(values) != len(self.names):
            raise ValueError(f"values: must be of {', '.join(self.names)}, got {len(values)}")
        for place, name, spec, shown, shapes in self._rows:
            value = values[place]
            if spec.optional and value is None:
                continue
            if isinstance(spec, Tensors):
                found |= _check_list(shown, spec, shapes, value, sizes)
                continue
            if not isinstance(spec, Tensor):
                spec.check(shown, value)
                if isinstance(spec, Int):
                    _check_most(shown, spec, value, sizes)
                if isinstance(spec, (Int, Number)):
                    sizes.bind(name, value, shown)
                continue
            shapes.check(shown, value, spec.dtypes, sizes)
            sizes.bind("itemsize", value.element_size(), shown)
            if spec.like:
                like = self._shown(spec.like)
                _check_like(shown, spec, value, like, found[like])
            if spec.rule is not None:
                more = spec.rule(shown, value) or {}
                sizes |= more
                sizes.origin |= dict.fromkeys(more, shown)
            if spec.written:
                check_writable(shown, value)
            found[shown] = value
        first, *others = found.items()
        check_same_device(first, **dict(others))
        for argument, accepted, word, size in self._limits.broken(sizes):
            what = "" if word == argument else f"{word} "
            raise ValueError(f"{argument}: {what}must be {accepted}, got {size}")
        if self._check_rule is not None:
            self._check_rule(*values)
        return sizes

    def check_types(self, *values: object) -> None:
        """Check the types of ints, numbers and flags. torch's dispatcher converts them, for example any number to a
        flag, and raises another error for an int of more than 64 bits."""
        for i, spec, shown in self._scalars:
            value = values[i]
            if spec.optional and value is None:
                continue
            right = {Int: int, Number: float, Flag: bool}[type(spec)]
            if not isinstance(value, right) or isinstance(value, bool) != (right is bool):
                spec.check(shown, value)

    def taking(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that takes all arguments in order, and calls `function` with those that its parameters
        name.

        A parameter `a` gets a tuple of the arguments that messages call a[0], a[1], ... Raises TypeError for a
        parameter that is not an argument. what: the function's name in the message of this error
        """
        places: dict[str, int | tuple[int, ...]] = {name: i for i, name in enumerate(self.specs)}
        for i, shown in enumerate(self.names):
            if shown.endswith("]"):
                of = shown.partition("[")[0]
                places[of] = (*places.get(of, ()), i)
        positions, keywords = [], {}
        for name, parameter in inspect.signature(function).parameters.items():
            if name not in places or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                got = parameter.replace(annotation=parameter.empty, default=parameter.empty)
                raise TypeError(f"{what}: must take arguments by their names, {', '.join(self.specs)}, got {got}")
            if parameter.kind == parameter.KEYWORD_ONLY:
                keywords[name] = places[name]
            else:
                positions.append(places[name])
        if positions == [*range(len(self.specs))]:
            return function

        def call(*values: Any) -> Any:
            def given(at: int | tuple[int, ...]) -> Any:
                return values[at] if isinstance(at, int) else tuple(values[i] for i in at)

            return function(*map(given, positions), **{name: given(at) for name, at in keywords.items()})

        return call

    def check_layouts(self, *values: object) -> None:
        for spec, shown, value in zip(self.specs.values(), self.names, values, strict=True):
            if isinstance(spec, Tensor) and isinstance(value, torch.Tensor):
                _check_memory(shown, value, spec)
            elif isinstance(spec, Tensors) and value is not None:
                for i, x in enumerate(value):
                    _check_memory(f"{shown}[{i}]", x, spec)

    def _shown(self, name: str) -> str:
        return self.specs[name].name or name


def _check_memory(name: str, x: torch.Tensor, spec: Tensor | Tensors) -> None:
    check_address(name, x)
    # Kernels would read the numbers before a lazy negation, such as that of z.conj().imag. torch.compile cannot trace
    # is_neg().
    if not torch.compiler.is_compiling() and x.is_neg():
        raise ValueError(f"{name}: must be negated in memory, got a lazily negated tensor; call resolve_neg()")
    check_layout(name, x, spec.layout if isinstance(spec.layout, str) else spec.layout(x))
    check_mergeable(name, x, *spec.merged)


def _check_list(name: str, spec: Tensors, shapes: Shapes, value: object, sizes: Sizes) -> dict[str, torch.Tensor]:
    """Return {name in messages: tensor}."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name}: must be a list of tensors, got {type(value).__name__}")
    if not value:
        raise ValueError(f"{name}: must be a list of at least one tensor, got none")
    sizes.bind(spec.count, len(value), name)
    count, source = sizes[spec.count], sizes.origin[spec.count]
    if len(value) != count:
        raise ValueError(f"{name}: must be a list of as many tensors as {source}, {count}, got {len(value)}")
    found = {f"{name}[{i}]": x for i, x in enumerate(value)}
    for shown, x in found.items():
        shapes.check(shown, x, spec.dtypes, sizes)
        check_same_dtype((f"{name}[0]", value[0]), **{shown: x})
    return found


def _check_like(name: str, spec: Tensor, value: torch.Tensor, like: str, other: torch.Tensor) -> None:
    if value.dtype == other.dtype or value.dtype in spec.besides:
        return
    besides = [dtype for dtype in spec.besides if dtype != other.dtype]
    if not besides:
        check_same_dtype((like, other), **{name: value})
    own, got, *besides = map(dtype_name, (other.dtype, value.dtype, *besides))
    raise ValueError(f"{name}: dtype must be {like}'s {own} or {' or '.join(besides)}, got {got}")


def _check_most(name: str, spec: Int, value: int, sizes: Sizes) -> None:
    if isinstance(spec.most, str) and value > sizes[spec.most]:
        of = sizes.origin[spec.most]
        raise ValueError(f"{name}: must be at most {spec.most} = {sizes[spec.most]}, got {value} (sizes as of {of})")
