"""Turn autocast off inside the references. With autocast, matrix products would run in bf16 or fp16 instead of fp32,
and results could have another dtype than the docstrings say."""

import functools
from collections.abc import Callable

import torch


def without_autocast(function: Callable) -> Callable:
    @functools.wraps(function)
    def run(*args, **kwargs):
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    return run(*args, **kwargs)
        return function(*args, **kwargs)

    return run
