"""Compilation at the first call, for parts of a model whose kernels depend on the shapes of a layer's weights."""

import logging
from collections.abc import Callable, Hashable

import torch

from dsa.runtime.variants import growing

_logger = logging.getLogger("dsa")
_ready: dict[Hashable, bool] = {}  # (part, kind of layer): whether its kernels compiled


def is_ready(engine: str, part: str, kind: Hashable, call: Callable[[int], object], most: int) -> bool:
    """Return whether the kernels for layers of a kind are compiled. The first time, compile them.

    call  runs the part for a number of tokens; it is called with numbers from 1 to `most` that grow by a factor of 1.3

    Returns False if a kernel does not compile, which is logged once; the caller must then call the engine's function.
    Also returns False if memory was lacking, and while a CUDA graph is captured; a later call tries again.
    """
    if (part, kind) not in _ready:
        if torch.cuda.is_current_stream_capturing():
            return False
        try:
            for tokens in growing(most, 1.3):
                call(tokens)
            _ready[part, kind] = True
        except torch.OutOfMemoryError:
            return False
        except Exception as error:  # whatever it is, the engine has its own function
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            _logger.warning("dsa: %s: %s; %s of such layers stays the engine's own", engine, reason, part)
            _ready[part, kind] = False
    return _ready[part, kind]
