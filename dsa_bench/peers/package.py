"""A peer's package, or the shared libraries in one, and the calls of peers that a benchmark's case times."""

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch

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


@dataclass(frozen=True)
class Operators:
    """Operators in shared libraries of an engine's package, which is not imported itself: that takes seconds, changes
    settings of the process, and needs all that the engine depends on.

    name: as the tables show it. package: whose folder the files are in, without a dot. files: paths in that folder.
    """

    name: str
    package: str
    files: tuple[str, ...]

    def load(self) -> ModuleType | None:
        """`torch.ops`, where the operators are then, or None where a file is not installed. Raises OSError, with what
        the system's loader says, for a file that cannot be loaded."""
        paths = [path for file in self.files if (path := self._path(file))]
        if len(paths) < len(self.files):
            return None
        for path in paths:
            try:
                torch.ops.load_library(str(path))  # nothing happens where it is loaded already
            except OSError as error:
                # The message has the path alone, and its cause the reason.
                raise OSError(str(error.__cause__ or error)) from error
        return torch.ops

    def _path(self, file: str) -> Path | None:
        spec = importlib.util.find_spec(self.package)
        folders = (spec and spec.submodule_search_locations) or ()
        return next((path for folder in folders if (path := Path(folder, file)).is_file()), None)


@dataclass
class Peers:
    """calls: name -> the calls over a case's inputs. failed: name -> why an installed peer has none."""

    calls: dict[str, list[Call]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def add(
        self,
        library: Library | Operators,
        make: Callable[..., Call],
        inputs: Iterable[tuple],
        name: str = "",
        needs: Sequence[Library | Operators] = (),
    ) -> None:
        """Adds `make(module, *input)` of every input, if the library is installed. name: the library's, if empty.
        needs: libraries that must be installed, too."""
        name = name or library.name
        try:
            if all((module := one.load()) is not None for one in (*needs, library)):
                self.calls[name] = [make(module, *one) for one in inputs]
        except Exception as error:  # a peer may say no in any way, and must not end the others' run
            self.failed[name] = f"failed: {reason(error)}"
