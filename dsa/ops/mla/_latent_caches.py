"""Specs and checks of the paged caches and outputs that the decoding ops share."""

import torch

from dsa.ops.cache._specs import cache_dim
from dsa.reference.cache.kv_cache import BYTE_DTYPES
from dsa.runtime.declare import FLOATS, ROWS, Tensor, check_flag, dtype_name

# The output of dense and of sparse decoding. The heads of a query are contiguous; the stride of queries is free.
OUT = {"out": Tensor("B s_q h_q head_dim_v", FLOATS, like="q", layout=ROWS, merged=(2, 4))}


def latent_cache(shape: str, **options: object) -> Tensor:
    """Return the spec of a paged cache for queries q. The cache's elements have the dtype of q or are bytes."""
    return Tensor(shape, (*FLOATS, *BYTE_DTYPES), like="q", besides=BYTE_DTYPES, **options)


def check_latent_cache(name: str, cache: torch.Tensor, q: torch.Tensor) -> None:
    """Check what specs cannot express, mainly that a row of the cache has as many channels as a query."""
    heads = cache.shape[2]
    if heads == 0:
        raise ValueError(f"{name}: must have at least one head, got shape {list(cache.shape)}")
    if heads > 1 and cache.dtype in BYTE_DTYPES:
        raise ValueError(f"{name}: a byte cache must have h_k = 1, got shape {list(cache.shape)}")
    cached, d = cache_dim(cache[:, :, :1], name), q.shape[-1]
    if cached != d:
        raise ValueError(f"{name}: a last dimension of {cache.shape[-1]} means d = {cached}, but q has d = {d}")


def check_layout_flag(name: str, cache: object, is_fp8_kvcache: bool) -> None:
    """Raise ValueError unless is_fp8_kvcache is True for a byte cache and False for other caches."""
    check_flag("is_fp8_kvcache", is_fp8_kvcache)
    if isinstance(cache, torch.Tensor) and is_fp8_kvcache != (cache.dtype in BYTE_DTYPES):
        accepted = "uint8, int8 or float8_e4m3fn" if is_fp8_kvcache else "float32, bfloat16 or float16"
        got = dtype_name(cache.dtype)
        raise ValueError(f"{name}: dtype must be {accepted} with is_fp8_kvcache={is_fp8_kvcache}, got {got}")


def check_unused(values: dict[str, torch.Tensor | None], needed: str) -> None:
    for name, value in values.items():
        if value is not None:
            raise ValueError(f"{name}: must be None without {needed}, got {type(value).__name__}")
