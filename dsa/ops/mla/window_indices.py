"""The keys of a sliding window as lists for sparse attention: the same for all layers of a pass."""

import functools
from collections.abc import Callable

import torch

from dsa import backends
from dsa.kernels.mla.limits import MAX_WINDOW
from dsa.reference.mla import window_indices as reference

__all__ = ["window_indices", "window_slots"]


def window_indices(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, total_q: int, window: int) -> torch.Tensor:
    """indices[t] = k0 + max(0, p - window + 1), ..., k0 + p: the keys that query t sees, p its position among them.

    Query t = cu_seqlens_q[b] + i is number i of the Lq queries of sequence b, whose Lk keys begin at k0 =
    cu_seqlens_k[b]. The queries are the last of the keys: p = Lk - Lq + i, and with p < 0 a query sees no key.

    cu_seqlens_q  [B + 1] int32, not decreasing: sequence b has the queries cu_seqlens_q[b] up to cu_seqlens_q[b + 1]
    cu_seqlens_k  [B + 1] int32, likewise for the keys
    total_q       queries, at least 0; those of no sequence see no key
    window        keys that a query sees at most, itself included; at least 1

    Returns [total_q, window] int32, contiguous: rows of keys as `sliding_window_attention` sees them, ascending, with
    -1 behind the last one. Each is below the largest number in cu_seqlens_k, and so an int32. In any order of
    boundaries a query belongs to the sequence with queries that begins last before it, if that ends behind it: a
    boundary below 0 or beyond total_q spoils the lists of the sequences beside it alone. An index is then still -1 or
    at least 0, and no memory but that of the arguments is read.
    Raises TypeError or ValueError for other types, dtypes, shapes and devices.
    On Hopper: one kernel, any strides, total_q and window up to 2^30. Deterministic. CUDA-graph safe with new
    cu_seqlens, no host synchronisation, no workspace.
    Source: DeepSeek-V4 (arXiv 2606.19348), the window branch.
    """
    arguments = (cu_seqlens_q, cu_seqlens_k, total_q, window)
    return (torch.ops.dsa.window_indices if torch.compiler.is_compiling() else _indices)(*arguments)


def window_slots(
    block_table: torch.Tensor | None, cache_seqlens: torch.Tensor, s_q: int, page_size: int, window: int
) -> torch.Tensor:
    """slots[b, i] = where the keys max(0, p - window + 1), ..., p of sequence b lie in its cache, for query i of s_q.

    p = cache_seqlens[b] - s_q + i: the queries are the last of the cached keys. With p < 0 a query sees no key.

    block_table    [B, max_pages] int32: key s is in slot block_table[b, s // page_size] * page_size + s % page_size.
                   None, a ring: sequence b has page b to itself, and key s is in slot b * page_size + s % page_size
    cache_seqlens  [B] int32, keys per sequence, the queries' own included
    s_q            queries per sequence, at least 0
    page_size      keys per page; of a ring at least window + s_q - 1, what all queries together see
    window         keys that a query sees at most, itself included; at least 1

    Returns [B, s_q, window] int32, contiguous: `flash_mla_with_kvcache`'s indices, from the lowest position to the
    highest, with -1 behind the last key, and also for a key whose page is negative or outside the table or whose slot,
    2^31 or more, is no int32.
    Raises TypeError or ValueError for other types, dtypes, shapes, sizes and devices, also for a ring of more than 2^31
    slots.
    On Hopper: one kernel, any strides; B * s_q, page_size and window up to 2^30. Deterministic. CUDA-graph safe with
    new tables and lengths, no host synchronisation, no workspace.
    Source: the window branch of DeepSeek-V4 (arXiv 2606.19348); its public code keeps a ring, engines keep pages.
    """
    arguments = (block_table, cache_seqlens, s_q, page_size, window)
    return (torch.ops.dsa.window_slots if torch.compiler.is_compiling() else _slots)(*arguments)


def _indices(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, total_q: int, window: int) -> torch.Tensor:
    reference.check_indices(cu_seqlens_q, cu_seqlens_k, total_q, window)
    if not backends.runs_kernel("window_indices", cu_seqlens_q):
        return reference.window_indices(cu_seqlens_q, cu_seqlens_k, total_q, window)
    _check_sizes(total_q=total_q, window=window)
    indices = cu_seqlens_q.new_empty(total_q, window)
    if total_q:
        with backends.on_device(indices):
            _indices_kernel()(cu_seqlens_q, cu_seqlens_k, indices)
    return indices


def _slots(
    block_table: torch.Tensor | None, cache_seqlens: torch.Tensor, s_q: int, page_size: int, window: int
) -> torch.Tensor:
    reference.check_slots(block_table, cache_seqlens, s_q, page_size, window)
    if not backends.runs_kernel("window_slots", cache_seqlens):
        return reference.window_slots(block_table, cache_seqlens, s_q, page_size, window)
    batch = cache_seqlens.shape[0]
    _check_sizes(page_size=page_size, window=window, **{"B * s_q": batch * s_q})
    slots = cache_seqlens.new_empty(batch, s_q, window)
    if block_table is not None and block_table.shape[1] == 0:
        return slots.fill_(-1)
    if batch * s_q:
        with backends.on_device(slots):
            _slots_kernel(block_table is None)(block_table, cache_seqlens, slots, page_size)
    return slots


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size > MAX_WINDOW:
            raise ValueError(f"{name}: the Hopper kernel takes at most {MAX_WINDOW}, got {size}")


@functools.cache
def _indices_kernel() -> Callable[..., None]:
    from dsa.kernels.mla.window_indices_sm90 import compile_window_indices

    return compile_window_indices()


@functools.cache
def _slots_kernel(ring: bool) -> Callable[..., None]:
    from dsa.kernels.mla.window_indices_sm90 import compile_window_slots

    return compile_window_slots(ring)


torch.library.custom_op("dsa::window_indices", mutates_args=())(_indices)
torch.library.custom_op("dsa::window_slots", mutates_args=())(_slots)


@torch.library.register_fake("dsa::window_indices")
def _(cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, total_q: int, window: int) -> torch.Tensor:
    reference.check_indices(cu_seqlens_q, cu_seqlens_k, total_q, window)
    return cu_seqlens_q.new_empty(total_q, window)


@torch.library.register_fake("dsa::window_slots")
def _(
    block_table: torch.Tensor | None, cache_seqlens: torch.Tensor, s_q: int, page_size: int, window: int
) -> torch.Tensor:
    reference.check_slots(block_table, cache_seqlens, s_q, page_size, window)
    return cache_seqlens.new_empty(cache_seqlens.shape[0], s_q, window)
