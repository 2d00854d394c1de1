"""Look up, check, replace and restore attributes of an engine's modules and classes."""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class NotFound(LookupError):
    """Something that the plugin needs from the engine is missing, or differs from what the plugin expects."""


class Attribute(NamedTuple):
    """owner: the module or class whose __dict__ has the name. value: the entry there, such as a classmethod object."""

    owner: Any
    name: str
    value: Any


def find(path: str) -> Attribute:
    """Return the attribute "package.module:name" or "package.module:Class.name". Raise NotFound if it is missing."""
    module, _, names = path.partition(":")
    try:
        owner = importlib.import_module(module)
    except Exception as error:  # importing an engine's module may raise anything
        raise NotFound(f"{module} cannot be imported ({type(error).__name__}: {error})") from error
    value = owner
    for name in names.split("."):
        owner = value
        if name not in vars(owner):
            raise NotFound(f"{path} is not there")
        value = vars(owner)[name]
    return Attribute(owner, name, value)


def check_parameters(path: str, expected: Sequence[str]) -> None:
    """Raise NotFound unless the function at `path` has exactly these parameters, in this order."""
    attribute = find(path)
    try:
        found = list(inspect.signature(getattr(attribute.owner, attribute.name)).parameters)
    except (TypeError, ValueError) as error:
        raise NotFound(f"{path} is no function whose parameters can be read") from error
    if found != list(expected):
        raise NotFound(f"{path} takes ({', '.join(found)}), and was tested with ({', '.join(expected)})")


class Replacements:
    """Replaced attributes and their original values."""

    def __init__(self) -> None:
        self._before: list[Attribute] = []

    def put(self, new: Mapping[str, Any]) -> None:
        """Replace the attributes at these paths. If one does not exist, raise NotFound and replace none."""
        found = {path: find(path) for path in new}
        for path, attribute in found.items():
            self._before.append(attribute)
            setattr(attribute.owner, attribute.name, new[path])

    def undo(self) -> None:
        """Restore the original values."""
        while self._before:
            owner, name, value = self._before.pop()
            setattr(owner, name, value)
