"""Modules whose parameters have shapes and no memory yet, for a checkpoint to fill."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _LeaveParameters(TorchFunctionMode):
    """torch.nn.init does nothing: of parameters without memory it fills none, yet imports all of Dynamo to do it, which
    takes two seconds."""

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


@contextlib.contextmanager
def unfilled() -> Iterator[None]:
    """Modules that are made inside are on the meta device."""
    with torch.device("meta"), _LeaveParameters():
        yield
