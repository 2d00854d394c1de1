"""What a model's pass checks of its arguments, once for all layers."""

import torch

from dsa.runtime.checks import check_tensor
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.cache import Cache
from dsa_layers.layers.pass_checks import check_batch

_TOKENS = (torch.int64,)


def check_pass(tokens: torch.Tensor, batch: TokenBatch, cache: Cache | None) -> None:
    """TypeError or ValueError unless tokens int64 [T] are as many as the batch has, and the cache is one of a model.
    Which tokens they are is not looked at: the host would have to wait."""
    check_batch(batch)
    check_tensor("tokens", tokens, _TOKENS, (sum(batch.query_lens),), "batch")
    if cache is not None and not hasattr(cache, "layer"):
        raise TypeError(f"cache: must be one of the model's make_cache, or None, got {type(cache).__name__}")
