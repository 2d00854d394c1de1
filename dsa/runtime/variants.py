"""The name of a kernel's compiled variant, and a hook that replaces compilation."""

from collections.abc import Callable
from typing import Any, NamedTuple

Kernel = Callable[..., None]


class Variant(NamedTuple):
    """A call of a compile function: the name of the kernel module, the name of the function, and the arguments."""

    module: str
    function: str
    arguments: tuple[Any, ...]


# Called in place of the compile functions. `asked_variants` and tests set it.
stand_in: Callable[[Variant], Kernel] | None = None
