"""A kernel's compiled variants, and what stands in for them where nothing is to be compiled."""

from collections.abc import Callable
from typing import Any, NamedTuple

Kernel = Callable[..., None]


class Variant(NamedTuple):
    """A compile function of a module of kernels, by their names, and its arguments."""

    module: str
    function: str
    arguments: tuple[Any, ...]


# Called in place of the compile functions, if set: by `asked_variants`, and by tests.
stand_in: Callable[[Variant], Kernel] | None = None
