"""Replace attributes within a block."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any
from unittest.mock import patch


@contextlib.contextmanager
def replaced(values: Iterable[tuple[object, str, Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name, value in values:
            stack.enter_context(patch.object(owner, name, value))
        yield
