"""How a peer is loaded: its package is imported, or only single files of the package are loaded."""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch


@dataclass(frozen=True)
class Library:
    """A package that is imported.

    name: the name in tables. modules: names of modules; the first that is installed is imported. set_up: called with
    the module after the import, to set the options that engines set.
    """

    name: str
    modules: tuple[str, ...]
    set_up: Callable[[ModuleType], None] | None = None

    def load(self) -> ModuleType | None:
        """Import the module. Return None if none is installed; raise what the import raises."""
        for name in self.modules:
            try:
                module = importlib.import_module(name)
            except ModuleNotFoundError as error:
                # Raise if the missing module is not the peer's but one that the peer needs.
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
    """One Python file of an engine's package. The package is not imported, because it needs all that the engine needs.

    name: the name in tables. package: the package's name, without a dot. file: path in the package's folder.
    """

    name: str
    package: str
    file: str

    def load(self) -> ModuleType | None:
        """Execute the file as a module. Return None if it is not installed; raise what its code raises."""
        path = _installed(self.package, self.file)
        return None if path is None else _executed(path)


@dataclass(frozen=True)
class Operators:
    """Operators in shared libraries of an engine's package. The package is not imported: an import takes seconds,
    changes settings of the process, and needs all that the engine needs.

    name: the name in tables. package: the package's name, without a dot. files: paths in the package's folder.
    """

    name: str
    package: str
    files: tuple[str, ...]

    def load(self) -> ModuleType | None:
        """Load the files and return `torch.ops`, which then has the operators. Return None if a file is not installed.

        Raises OSError with the loader's message for a file that cannot be loaded.
        """
        paths = [path for file in self.files if (path := _installed(self.package, file))]
        if len(paths) < len(self.files):
            return None
        for path in paths:
            try:
                torch.ops.load_library(str(path))  # does nothing if the library is already loaded
            except OSError as error:
                # The error's message has only the path; the message of its cause has the reason.
                raise OSError(str(error.__cause__ or error)) from error
        return torch.ops


def _installed(package: str, file: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    folders = (spec and spec.submodule_search_locations) or ()
    return next((path for folder in folders if (path := Path(folder, file)).is_file()), None)


@functools.cache  # executed once per process, because the module caches compiled kernels
def _executed(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
