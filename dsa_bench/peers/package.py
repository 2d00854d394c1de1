"""A peer's package, and the calls of peers that a benchmark's case times."""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType

from dsa_bench.harness.calls import Call, reason


@dataclass(frozen=True)
class Library:
    """name: as the tables show it. modules: where it may be installed; the first that is found counts."""

    name: str
    modules: tuple[str, ...]

    def load(self) -> ModuleType | None:
        """The module, or None where it is not installed. Raises what the import of a broken one raises."""
        for name in self.modules:
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError as error:
                # Not a module that the peer itself lacks.
                if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                    raise
        return None


@dataclass
class Peers:
    """calls: name -> the calls over a case's inputs. failed: name -> why an installed peer has none."""

    calls: dict[str, list[Call]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, library: Library, make: Callable[..., Call], inputs: Iterable[tuple], name: str = "") -> None:
        """Adds `make(module, *input)` of every input, if the library is installed. name: the library's, if empty."""
        name = name or library.name
        try:
            module = library.load()
            if module is not None:
                self.calls[name] = [make(module, *one) for one in inputs]
        except Exception as error:  # a peer may say no in any way, and must not end the others' run
            self.failed[name] = f"failed: {reason(error)}"
