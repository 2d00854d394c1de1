"""Multi-head latent attention with a sliding window."""

from typing import Any

import torch

from dsa.runtime.checks import integer
from dsa_layers.batch.token_batch import TokenBatch, check_no_cache, check_tokens
from dsa_layers.cache.windowed_kv_cache import RingCache
from dsa_layers.layers.attention import DSAAttention


class WindowAttention(DSAAttention):
    """`DSAAttention` without an indexer, in which a token attends to the latest `window` tokens, including itself.

    forward(x [T, hidden], cos, sin fp32 [T, rope_dim / 2], batch, cache=None, selected=None)
        -> (y [T, hidden], selected)
    batch: complete packed sequences. selected: returned unchanged.
    This class supports gradients but no cache; `dsa_layers.fuse` converts it to `PagedWindowAttention`.
    options: further arguments of `DSAAttention`, except sinks and shares_latents. Parameters and errors are those of
    `DSAAttention`.
    """

    def __init__(self, hidden: int, n_heads: int, *, window: int, **options: Any) -> None:
        for name in ("sinks", "shares_latents"):
            if options.get(name):
                raise ValueError(f"{name}: must be False in a layer with a window, got {options[name]!r}")
        super().__init__(hidden, n_heads, None, **options)
        self.window = integer("window", window, at_least=1)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: TokenBatch,
        cache: RingCache | None = None,
        selected: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.check_pass(x, batch)
        check_tokens(x, batch.positions)
        check_no_cache(cache, batch)
        rope = cos, sin
        q, _, gate = self._queries(x, batch)
        kv = self._norm_and_rotate(self._key_inputs(self.kv_a_proj_with_mqa(x)), rope)
        rows = batch.windows(self.window, self.window).indices
        return self._output(self._attend(self._rotate(q, rope), kv, rows, batch), gate), selected
