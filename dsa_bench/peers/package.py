"""A peer's package, or single files in one, and the calls of peers that a benchmark's case times."""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch


@dataclass(frozen=True)
class Library:
    """name: as the tables show it. modules: where it may be installed; the first that is found counts. set_up: called
    with the module after its import, to set the options that the engines set.
    """

    name: str
    modules: tuple[str, ...]
    set_up: Callable[[ModuleType], None] | None = None

    def load(self) -> ModuleType | None:
        """The module, or None where it is not installed. Raises what the import of a broken one raises."""
        for name in self.modules:
            try:
                module = importlib.import_module(name)
            except ModuleNotFoundError as error:
                # Not a module that the peer itself lacks.
                if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                    raise
                continue
            if self.set_up is not None:
                self.set_up(module)
            return module
        return None


def launch_programmatically(module: ModuleType) -> None:
    """Turn on programmatic dependent launch, as vLLM and SGLang do on Hopper."""
    module.set_pdl(True)


@dataclass(frozen=True)
class SourceFile:
    """One Python file of an engine's package. The package itself is not imported: it needs all that the engine needs.

    name: as the tables show it. package: the package's name, without a dot. file: path in the package's folder.
    """

    name: str
    package: str
    file: str

    def load(self) -> ModuleType | None:
        """The file as a module, or None where it is not installed. Raises what the file's code raises."""
        path = _installed(self.package, self.file)
        return None if path is None else _executed(path)


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
        paths = [path for file in self.files if (path := _installed(self.package, file))]
        if len(paths) < len(self.files):
            return None
        for path in paths:
            try:
                torch.ops.load_library(str(path))  # nothing happens where it is loaded already
            except OSError as error:
                # The message has the path alone, and its cause the reason.
                raise OSError(str(error.__cause__ or error)) from error
        return torch.ops


def _installed(package: str, file: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    folders = (spec and spec.submodule_search_locations) or ()
    return next((path for folder in folders if (path := Path(folder, file)).is_file()), None)


@functools.cache  # compiled kernels are cached in the module
def _executed(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
