"""Comparison with vLLM's own function at the first call, for versions of vLLM that were not tested."""

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch

from dsa_engines.replacements import NotFound

_logger = logging.getLogger("vllm.dsa")


def compared(original: Callable[..., Any], new: Callable[..., Any], part: str) -> Callable[..., Any]:
    """Call both functions until vLLM's result is not zero and no CUDA graph is captured. Then keep `new` if the results
    agree, else `original`, with a line in the log."""
    chosen: list[Callable[..., Any]] = []
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if chosen:
            return chosen[0](*args, **kwargs)
        result = original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        written = bound.arguments.get("output")
        expected = written if result is None else result
        if torch.cuda.is_current_stream_capturing() or not isinstance(expected, torch.Tensor) or not expected.any():
            return result
        expected = expected.clone()
        if written is not None:
            bound.arguments["output"] = torch.empty_like(written)
        try:
            found = new(*bound.args, **bound.kwargs)
            agree(part, bound.arguments["output"] if found is None else found, expected)
            chosen.append(new)
        except Exception as error:
            _logger.warning("dsa: vllm: %s; %s stays the engine's own", " ".join(str(error).split()), part)
            chosen.append(original)
        return result

    return call


def agree(what: str, found: torch.Tensor, expected: torch.Tensor, most: float = 0.05) -> None:
    """Raise NotFound if the relative difference, in the norm, is more than `most`."""
    found, expected = found.double(), expected.double()
    difference = ((found - expected).norm() / expected.norm()).item()
    if not difference <= most:
        raise NotFound(f"{what} differs from vLLM's own by {difference:.1e}; accepted is {most}")
