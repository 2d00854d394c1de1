"""Comparison with an engine's own function at the first call, for versions that were not tested."""

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch

from dsa_engines.replacements import NotFound

_logger = logging.getLogger("dsa")


class _Declined(Exception):
    """A replacement would call the engine's function."""


def _declines(*args: Any, **kwargs: Any) -> None:
    raise _Declined


def compared(
    original: Callable[..., Any], make: Callable[[Callable[..., Any]], Callable[..., Any]], part: str, engine: str
) -> Callable[..., Any]:
    """Call an engine's function and its replacement until the engine's result is not zero and no CUDA graph is
    captured. Then keep the replacement if the results agree, else `original`, with a line in the log.

    make  returns the replacement of a function, which calls it for what dsa does not serve; such calls decide nothing
    """
    chosen: list[Callable[..., Any]] = []
    signature, new = inspect.signature(original), make(_declines)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if chosen:
            return chosen[0](*args, **kwargs)
        if torch.cuda.is_current_stream_capturing():
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        written = bound.arguments.get("output")
        if written is not None:
            bound.arguments["output"] = torch.empty_like(written)
        failed = None
        try:  # first, because an engine's function may write to its inputs
            result = new(*bound.args, **bound.kwargs)
            found = _tensor(bound.arguments["output"] if result is None else result)
        except _Declined:
            return original(*args, **kwargs)
        except Exception as error:
            failed = error
        result = original(*args, **kwargs)
        expected = _tensor(written if result is None else result)
        if not isinstance(expected, torch.Tensor) or not expected.any():
            return result
        try:
            if failed is not None:
                raise failed
            agree(part, found, expected)
            chosen.append(make(original))
        except Exception as error:
            _logger.warning("dsa: %s: %s; %s stays the engine's own", engine, " ".join(str(error).split()), part)
            chosen.append(original)
        return result

    return call


def _tensor(result: Any) -> Any:
    """The tensor of a result; SGLang's experts return it as `hidden_states`."""
    return getattr(result, "hidden_states", result)


def agree(what: str, found: torch.Tensor, expected: torch.Tensor, most: float = 0.05) -> None:
    """Raise NotFound if the relative difference, in the norm, is more than `most`."""
    found, expected = found.double(), expected.double()
    difference = ((found - expected).norm() / expected.norm()).item()
    if not difference <= most:
        raise NotFound(f"{what} differs from the engine's own by {difference:.1e}; accepted is {most}")
