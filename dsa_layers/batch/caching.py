"""Values that an object computes once."""

from collections.abc import Callable
from typing import Any


class cached_property:
    """functools.cached_property without its lock, which torch.compile does not trace in Python 3.11."""

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        value = self._compute(instance)
        object.__setattr__(instance, self._name, value)
        return value
