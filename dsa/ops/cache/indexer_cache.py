"""Writing FP8 index keys into cache pages and reading them back."""

import functools
from collections.abc import Callable

import torch

from dsa import backends
from dsa.ops._kernel_arguments import check_rows, dtype_name, pages_as_rows
from dsa.reference.cache import indexer_cache as reference

DIMS = (32, 64, 128)


def write_indexer_cache(k: torch.Tensor, k_scale: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes token t's key and scale into slot slots[t] = page * P + offset, in place.

    k        [T, D] float8_e4m3fn
    k_scale  [T] fp32
    cache    [pages, P, 1, D + 4] uint8: the P x D values of a page, then its P fp32 scales; pages any distance apart
    slots    [T] int32 or int64; -1 skips the token. Two tokens must not share a slot

    Every other byte of the cache stays as it is. Raises TypeError or ValueError for other types, dtypes, shapes and
    strides; the reference also for a slot below -1 or beyond the cache, which the kernel skips.
    On Hopper: D in {32, 64, 128}, rows and pages at multiples of 16 bytes. CUDA-graph safe, no host synchronisation.
    Source: the layout is DeepGEMM's, of `fp8_paged_mqa_logits`.
    """
    if torch.compiler.is_compiling():
        return torch.ops.dsa.write_indexer_cache(k, k_scale, cache, slots)
    return _write(k, k_scale, cache, slots)


def read_indexer_cache(cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and scales in `slots`: (k [T, D] float8_e4m3fn, k_scale [T] fp32), both contiguous.

    cache  [pages, P, 1, D + 4] uint8, as `write_indexer_cache` leaves it
    slots  [T] int32 or int64, page * P + offset; -1 or any slot outside the cache gives key 0 and scale 0

    Raises TypeError or ValueError for other types, dtypes, shapes and strides. On Hopper as `write_indexer_cache`.
    """
    if torch.compiler.is_compiling():
        return torch.ops.dsa.read_indexer_cache(cache, slots)
    return _read(cache, slots)


def _write(k: torch.Tensor, k_scale: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    reference.check_write(k, k_scale, cache, slots)
    if not backends.runs_kernel("write_indexer_cache", cache):
        return reference.write_indexer_cache(k, k_scale, cache, slots)
    _check_kernel_takes(cache, slots)
    check_rows("k", k)
    if k.shape[0] and cache.shape[0]:
        _launch(k, k_scale, cache, slots, True)


def _read(cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    reference.check_read(cache, slots)
    if not backends.runs_kernel("read_indexer_cache", cache):
        return reference.read_indexer_cache(cache, slots)
    _check_kernel_takes(cache, slots)
    k, k_scale = _allocate(cache, slots)
    if cache.shape[0] == 0:
        return k.zero_(), k_scale.zero_()
    if slots.shape[0]:
        _launch(k, k_scale, cache, slots, False)
    return k, k_scale


def _launch(k: torch.Tensor, k_scale: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, write: bool) -> None:
    rows = k.view(torch.uint8)
    if rows.shape[0] == 1:  # a single row's stride means nothing, and may be any number
        rows = rows.as_strided(rows.shape, (rows.shape[1], 1))
    with backends.on_device(cache):
        _kernel(k.shape[1], slots.dtype, write)(rows, k_scale, pages_as_rows("cache", cache), slots, cache.shape[1])


@functools.cache
def _kernel(dim: int, slot_dtype: torch.dtype, write: bool) -> Callable[..., None]:
    from dsa.kernels.cache.indexer_cache_sm90 import compile_indexer_cache

    return compile_indexer_cache(dim, dtype_name(slot_dtype), write)


def _allocate(cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    k = torch.empty(slots.shape[0], cache.shape[3] - 4, dtype=torch.float8_e4m3fn, device=cache.device)
    return k, torch.empty(slots.shape[0], dtype=torch.float32, device=cache.device)


def _check_kernel_takes(cache: torch.Tensor, slots: torch.Tensor) -> None:
    if cache.shape[3] - 4 not in DIMS:
        raise ValueError(f"cache: the Hopper kernel takes D {DIMS}, got {cache.shape[3] - 4}")
    if slots.shape[0] > 1 and slots.stride(0) != 1:
        raise ValueError(f"slots: must be contiguous, got strides {list(slots.stride())}")


torch.library.custom_op("dsa::write_indexer_cache", mutates_args=("cache",))(_write)
torch.library.custom_op("dsa::read_indexer_cache", mutates_args=())(_read)


@torch.library.register_fake("dsa::write_indexer_cache")
def _(k: torch.Tensor, k_scale: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    reference.check_write(k, k_scale, cache, slots)


@torch.library.register_fake("dsa::read_indexer_cache")
def _(cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    reference.check_read(cache, slots)
    return _allocate(cache, slots)
