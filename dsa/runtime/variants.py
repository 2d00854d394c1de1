"""A kernel's compiled variants, and a hook that replaces compilation."""

from collections.abc import Callable
from typing import Any, NamedTuple

Kernel = Callable[..., None]


class Variant(NamedTuple):
    """A compile function of a kernel module, by the names of the module and the function, and its arguments."""

    module: str
    function: str
    arguments: tuple[Any, ...]


# If set, this function is called in place of the compile functions. `asked_variants` and tests set it.
stand_in: Callable[[Variant], Kernel] | None = None
