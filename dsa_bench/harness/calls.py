"""Calls that a benchmark times, of one function over several inputs and of other libraries."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, Protocol

Call = Callable[[], object]
_LINE = 200  # characters of a reason


def over(inputs: Iterable[tuple], functions: Mapping[str, Callable[..., object]]) -> dict[str, list[Call]]:
    """{name: a call of the function for each of the inputs}."""
    inputs = list(inputs)
    return {name: [partial(function, *given) for given in inputs] for name, function in functions.items()}


def reason(error: BaseException) -> str:
    """The first line of an exception's message, or its type."""
    lines = str(error).strip().splitlines()
    return lines[0][:_LINE] if lines else type(error).__name__


def into(out: object, call: Call) -> object:
    """Make a call that writes to given tensors, and return these."""
    call()
    return out


class Loadable(Protocol):
    """A library, or a part of one: its name in tables, and its module, None where it is not installed."""

    name: str

    def load(self) -> ModuleType | None: ...


@dataclass
class Peers:
    """calls: name -> the calls over a case's inputs. failed: name -> why an installed peer has none."""

    calls: dict[str, list[Call]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        makes: Mapping[Loadable, Callable[..., Call]],
        inputs: Iterable[tuple],
        name: str = "{}",
        needs: Sequence[Loadable] = (),
    ) -> "Peers":
        """`make(module, *input)` for every input and every library that is installed.

        name: in which {} stands for the library's. needs: further libraries that must be installed.
        """
        found, inputs = cls(), list(inputs)
        for library, make in makes.items():
            own = name.format(library.name)
            try:
                if all((module := one.load()) is not None for one in (*needs, library)):
                    found.calls[own] = [make(module, *given) for given in inputs]
            except Exception as error:  # a peer may raise anything, and must not end the other peers' run
                found.failed[own] = f"failed: {reason(error)}"
        return found

    def __or__(self, other: "Peers") -> "Peers":
        return Peers(self.calls | other.calls, self.failed | other.failed)

    def renamed(self, name: str) -> "Peers":
        """The same by other names. name: in which {} stands for the present one."""
        calls, failed = ({name.format(own): x for own, x in each.items()} for each in (self.calls, self.failed))
        return Peers(calls, failed)

    def then(self, step: Callable[[Any], object]) -> "Peers":
        """The same calls, each followed by `step` of its result."""
        calls = {name: [partial(_then, call, step) for call in own] for name, own in self.calls.items()}
        return Peers(calls, self.failed)


def _then(call: Call, step: Callable[[Any], object]) -> object:
    return step(call())
