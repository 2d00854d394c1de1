"""Compilation at the first call, for parts of a model whose kernels depend on the shapes of a layer's weights."""

import logging
from collections.abc import Callable, Hashable

import torch

from dsa_layers.compilation.passes import growing

_logger = logging.getLogger("dsa")
_ready: dict[Hashable, bool] = {}  # (part, kind of layer): whether its kernels compiled


def is_ready(engine: str, part: str, kind: Hashable, call: Callable[[int], object], most: int) -> bool:
    """Return whether the kernels for layers of a kind are compiled. The first time, compile them.

    call  runs the part for a number of tokens. It is called with numbers up to `most`, close enough to each other that
          few kernels are left for the numbers in between.

    Returns False if a kernel does not compile, which is logged once. The engine's own function must then be called.
    While a CUDA graph is captured nothing compiles, and kinds that are not ready give False.
    """
    if (part, kind) not in _ready:
        if torch.cuda.is_current_stream_capturing():
            return False
        try:
            for tokens in growing(most, 1.3):
                call(tokens)
            _ready[part, kind] = True
        except Exception as error:  # whatever it is, the engine has its own function
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            _logger.warning("dsa: %s: %s; %s of such layers stays the engine's own", engine, reason, part)
            _ready[part, kind] = False
    return _ready[part, kind]
