"""Calls that a benchmark times: calls of our functions and of other libraries, each over several inputs."""

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from types import ModuleType
from typing import Any, Protocol

import torch

Call = Callable[[], object]
_LINE = 200  # largest number of characters of a `reason`


def over(inputs: Iterable[tuple], functions: Mapping[str, Callable[..., object]]) -> dict[str, list[Call]]:
    """Return {name: [a call of this function per input]}."""
    inputs = list(inputs)
    return {name: [partial(function, *one) for one in inputs] for name, function in functions.items()}


def reason(error: BaseException) -> str:
    """Return the first line of an exception's message, cut to _LINE characters. Without a message, return the
    exception's type."""
    lines = str(error).strip().splitlines()
    return lines[0][:_LINE] if lines else type(error).__name__


def into(out: object, *calls: Call) -> object:
    """Run calls that write into `out`, and return `out`."""
    for call in calls:
        call()
    return out


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


class Loadable(Protocol):
    """A library or a part of a library. name: the name in tables. load: returns its module, or None if it is not
    installed."""

    name: str

    def load(self) -> ModuleType | None: ...


@dataclass
class Peers:
    """calls: {peer: its calls over a case's inputs}. failed: {installed peer that has no calls: reason}."""

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
        """Make a call, `make(module, *input)`, for every input and every installed library. A library that cannot be
        imported, or whose `make` raises, gets an entry in `failed` instead.

        makes: {library: make}. name: the peer's name in tables, with {} for the library's name. needs: libraries that
        must be installed as well.
        """
        found, inputs = cls(), list(inputs)
        for library, make in makes.items():
            shown = name.format(library.name)
            try:
                if all((module := one.load()) is not None for one in (*needs, library)):
                    found.calls[shown] = [make(module, *one) for one in inputs]
            except Exception as error:  # a peer may raise anything, and must not end the run of the others
                found.failed[shown] = f"failed: {reason(error)}"
        return found

    def __or__(self, other: "Peers") -> "Peers":
        return Peers(self.calls | other.calls, self.failed | other.failed)

    def renamed(self, name: str) -> "Peers":
        """Return these peers under other names. name: the new name, with {} for the present name."""
        return Peers(*({name.format(old): x for old, x in each.items()} for each in (self.calls, self.failed)))

    def then(self, step: Callable[[Any], object]) -> "Peers":
        calls = {name: [partial(_then, call, step) for call in each] for name, each in self.calls.items()}
        return Peers(calls, self.failed)


def peer(
    library: Loadable, name: str = "{}", needs: Sequence[Loadable] = ()
) -> Callable[[Callable[..., Call]], Callable[[Iterable[tuple]], Peers]]:
    """Return a decorator that turns a function (module, *input) -> call into a function inputs -> `Peers` of this
    library."""

    def of_inputs(make: Callable[..., Call]) -> Callable[[Iterable[tuple]], Peers]:
        @wraps(make)
        def peers(inputs: Iterable[tuple]) -> Peers:
            return Peers.of({library: make}, inputs, name, needs)

        return peers

    return of_inputs


def _then(call: Call, step: Callable[[Any], object]) -> object:
    return step(call())
