"""Attributes of an engine's modules and classes: looked up, compared with what they were, replaced and put back."""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class NotFound(LookupError):
    """An attribute is not there, or not in the form that the plugin was tested with."""


class Attribute(NamedTuple):
    """owner: a module or a class, which has the name itself. value: as it lies there, a classmethod as such."""

    owner: Any
    name: str
    value: Any


def find(path: str) -> Attribute:
    """The attribute "package.module:name" or "package.module:Class.name". Raises NotFound."""
    module, _, names = path.partition(":")
    try:
        owner = importlib.import_module(module)
    except Exception as error:  # an engine's module may fail to import in any way
        raise NotFound(f"{module} cannot be imported ({type(error).__name__}: {error})") from error
    value = owner
    for name in names.split("."):
        owner = value
        if name not in vars(owner):
            raise NotFound(f"{path} is not there")
        value = vars(owner)[name]
    return Attribute(owner, name, value)


def check_parameters(path: str, expected: Sequence[str]) -> None:
    """Raises NotFound where the function at `path` does not take these parameters, by name and in this order."""
    attribute = find(path)
    try:
        found = list(inspect.signature(getattr(attribute.owner, attribute.name)).parameters)
    except (TypeError, ValueError) as error:
        raise NotFound(f"{path} is no function whose parameters can be read") from error
    if found != list(expected):
        raise NotFound(f"{path} takes ({', '.join(found)}), and was tested with ({', '.join(expected)})")


class Replacements:
    """What has been replaced, and what was there before."""

    def __init__(self) -> None:
        self._before: list[Attribute] = []

    def put(self, new: Mapping[str, Any]) -> None:
        """Replaces the attributes at these paths: all of them, or with NotFound none."""
        found = {path: find(path) for path in new}
        for path, attribute in found.items():
            self._before.append(attribute)
            setattr(attribute.owner, attribute.name, new[path])

    def undo(self) -> None:
        """Puts everything back."""
        while self._before:
            owner, name, value = self._before.pop()
            setattr(owner, name, value)
