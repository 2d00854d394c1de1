"""Specs of an op's arguments. The checks and their messages follow from them.

    RMS_NORM = Arguments(
        x=Tensor("... D", FLOATS, layout=ROWS),
        weight=Tensor("D", F32, optional=True, layout=ROWS),
        eps=Number(least=0),
    )
    RMS_NORM.check(x, weight, eps)          # types, dtypes, shapes and devices, for references and kernels
    RMS_NORM.check_layouts(x, weight, eps)  # strides and alignment, for kernels

A shape consists of words: numbers, names, and formulas of names that are bound before ("2*n", "ceil(K/128)"). The first
use of a word binds it to the size there, and "B+1" binds B too. Later uses must agree. "..." stands for any number of
dimensions, the same in all shapes. "B | B T" allows either shape; neither may contain "...". The name of an earlier Int
is a word too, for its value.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from dsa.runtime.checks import (
    INT_MAX,
    check_choice,
    check_dtype,
    check_flag,
    check_int,
    check_number,
    check_same_device,
    check_same_dtype,
    check_writable,
)
from dsa.runtime.limits import Accepted, Limits
from dsa.runtime.shapes import Shapes, Sizes

F32 = (torch.float32,)
# Layouts that kernels require of a tensor's memory. References take any.
ANY = "any strides"
INNER = "the last dimension contiguous"
ROWS = "the last dimension contiguous, rows at multiples of 16 bytes"
CONTIGUOUS = "contiguous"
ALIGNED = "contiguous, from a multiple of 16 bytes on"
PAGES = "the first dimension's entries contiguous each, and at multiples of 16 bytes"
Layout = str | Callable[[torch.Tensor], str]


@dataclass(frozen=True)
class Tensor:
    """A tensor.

    shape     words, see the module
    dtypes    accepted dtypes
    like      name of the argument whose dtype it must have
    besides   those of `dtypes` that are accepted as well
    optional  whether it may be None
    layout    what the kernels require of its memory: ANY, INNER, ROWS, CONTIGUOUS, ALIGNED or PAGES, or a function that
              returns one of these for a tensor of a valid dtype and shape
    merged    (first, end): the kernels view its dimensions first:end as one, so these must be mergeable
    written   whether the op writes to it in place
    name      its name in messages, if that is not the parameter's name: "kv[0]"
    rule      called with this name and a tensor of a valid dtype and shape; raises ValueError. If it returns sizes,
              they replace the sizes of these names
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
    """A list of at least one tensor, all of one dtype and shape.

    count           a word, bound to the number of tensors
    layout, merged  as of `Tensor`, for each of them
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
    """An int. most: a number, or a word that is bound before."""

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
    """The specs of an op's arguments, in their order.

    limits  of sizes and numbers (`dsa.runtime.limits`), for the reference too
    rule    called after these checks with the arguments that its parameters name, for what specs and limits cannot
            say; raises ValueError
    first   arguments to check first: the sizes and the device of the others come from them
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
        # What a check goes through, in its order: an argument's place, name, spec, name in messages, and shapes.
        self._rows = [(i, names[i], specs[names[i]], self.names[i], self.shapes.get(names[i])) for i in in_order]
        self._first = first
        self._numbers = tuple(i for i, spec in enumerate(specs.values()) if isinstance(spec, Number))

    def writing(self, outputs: Mapping[str, Tensor]) -> "Arguments":
        """The same, with outputs of these specs that the caller gives."""
        written = {name: replace(spec, written=True) for name, spec in outputs.items()}
        return Arguments(limits=self.limits, rule=self.rule, first=self._first, **self.specs, **written)

    def limits_of(self, what: str, limits: Mapping[str, Accepted]) -> Limits:
        """Limits of sizes and numbers of these arguments; TypeError for a key that is none. what: for messages."""
        numbers = {name for name, spec in self.specs.items() if isinstance(spec, (Int, Number))}
        counts = {spec.count for spec in self.specs.values() if isinstance(spec, Tensors)}
        known = numbers.union(["itemsize"], counts, *(shapes.names for shapes in self.shapes.values()))
        made = Limits(limits)
        if unknown := made.names - known:
            raise TypeError(f"{what}: must be of {', '.join(sorted(known))}, got {', '.join(sorted(unknown))}")
        return made

    def check(self, *values: object) -> Sizes:
        """Return the sizes by name. Raises TypeError or ValueError that names a wrong argument."""
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

    def check_ints_for_floats(self, *values: object) -> None:
        """Check ints that are given for floats, before torch's dispatcher converts them to floats."""
        for i in self._numbers:
            if isinstance(values[i], int):
                spec, shown = [*self.specs.values()][i], self.names[i]
                spec.check(shown, values[i])

    def taking(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that takes all arguments in order and passes on those that `function` names.

        A parameter `a` gets a tuple of the arguments that messages call a[0], a[1], ... Raises TypeError for a
        parameter that is not an argument. what: the function's name in this message
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
        """Raise ValueError for a tensor whose memory layout the kernels do not take."""
        for spec, shown, value in zip(self.specs.values(), self.names, values, strict=True):
            if isinstance(spec, Tensor) and isinstance(value, torch.Tensor):
                _check_memory(shown, value, spec)
            elif isinstance(spec, Tensors) and value is not None:
                for i, x in enumerate(value):
                    _check_memory(f"{shown}[{i}]", x, spec)

    def _shown(self, name: str) -> str:
        return self.specs[name].name or name


def check_layout(name: str, x: torch.Tensor, layout: str) -> None:
    """Raise ValueError unless x has this layout. Strides of dimensions with less than two elements do not matter."""
    if not x.numel():
        return
    if layout in (CONTIGUOUS, ALIGNED) and not x.is_contiguous():
        raise ValueError(f"{name}: must be contiguous, got strides {list(x.stride())}")
    if layout == ALIGNED and x.data_ptr() % 16:
        raise ValueError(f"{name}: must start at a multiple of 16 bytes, got an address {x.data_ptr() % 16} past one")
    if layout in (INNER, ROWS) and x.dim() and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name}: the last dimension must be contiguous, got strides {list(x.stride())}")
    if layout == ROWS:
        strides = [s * x.element_size() for s, n in zip(x.stride()[:-1], x.shape[:-1]) if n > 1]
        if x.data_ptr() % 16 or any(s % 16 for s in strides):
            raise ValueError(
                f"{name}: rows must start at multiples of 16 bytes, got an address {x.data_ptr() % 16} bytes past one "
                f"and strides of {strides} bytes"
            )
    if layout == PAGES:
        if not x[0].is_contiguous():
            raise ValueError(f"{name}: every page must be contiguous, got strides {list(x.stride())}")
        stride = x.stride(0) * x.element_size() if len(x) > 1 else 0
        if x.data_ptr() % 16 or stride % 16:
            raise ValueError(
                f"{name}: pages must start at multiples of 16 bytes, got an address {x.data_ptr() % 16} bytes past one "
                f"and a page stride of {stride} bytes"
            )


def check_mergeable(name: str, x: torch.Tensor, first: int, end: int) -> None:
    """Raise ValueError unless x's dimensions first:end can be viewed as one. An empty tensor's can."""
    dims = range(x.dim())[first:end]
    if len(dims) < 2 or not x.numel():
        return
    try:
        x.view(*x.shape[:first], -1, *x.shape[end:])
    except RuntimeError:
        raise ValueError(
            f"{name}: dimensions {dims[0]} to {dims[-1]} must be mergeable into one with a single stride, got shape "
            f"{list(x.shape)} with strides {list(x.stride())}"
        ) from None


def _check_memory(name: str, x: torch.Tensor, spec: Tensor | Tensors) -> None:
    # A lazily negated tensor, such as z.conj().imag: its memory holds the numbers without the sign. torch.compile
    # cannot trace this check.
    if not torch.compiler.is_compiling() and x.is_neg():
        raise ValueError(f"{name}: must be negated in memory, got a lazily negated tensor; call resolve_neg()")
    check_layout(name, x, spec.layout if isinstance(spec.layout, str) else spec.layout(x))
    check_mergeable(name, x, *spec.merged)


def _check_list(name: str, spec: Tensors, shapes: Shapes, value: object, sizes: Sizes) -> dict[str, torch.Tensor]:
    """Check a list of tensors, and return them by their names in messages."""
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
    """Check that a tensor has the dtype of the argument `like`, or one of `besides`."""
    if value.dtype == other.dtype or value.dtype in spec.besides:
        return
    besides = [dtype for dtype in spec.besides if dtype != other.dtype]
    if not besides:
        check_same_dtype((like, other), **{name: value})
    own, got, *besides = (str(dtype).removeprefix("torch.") for dtype in (other.dtype, value.dtype, *besides))
    raise ValueError(f"{name}: dtype must be {like}'s {own} or {' or '.join(besides)}, got {got}")


def _check_most(name: str, spec: Int, value: int, sizes: Sizes) -> None:
    """Check that a number is at most the size that its spec names."""
    if isinstance(spec.most, str) and value > sizes[spec.most]:
        of = sizes.origin[spec.most]
        raise ValueError(f"{name}: must be at most {spec.most} = {sizes[spec.most]}, got {value} (sizes as of {of})")
