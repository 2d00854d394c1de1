"""Turn autocast off inside the references, so that they compute in fp32 and their results keep their dtype."""

import functools
from collections.abc import Callable

import torch


def without_autocast(function: Callable) -> Callable:
    """Return `function` wrapped so that autocast is off while it runs."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    return run(*args, **kwargs)
        return function(*args, **kwargs)

    return run
