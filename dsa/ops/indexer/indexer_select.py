"""Lightning-indexer scores and the selection of the largest in one op, without the scores in memory."""

import functools
from collections.abc import Callable
from types import ModuleType

import torch

from dsa import backends
from dsa.kernels.indexer.limits import HEAD_DIMS, HEADS, MAX_COLS, PAGED, ROW_TO_SEQ, VALUES
from dsa.kernels.indexer.select_limits import MAX_SELECTED
from dsa.ops._kernel_arguments import unit_inner
from dsa.ops.declaration import op
from dsa.reference.indexer import indexer_select as reference
from dsa.reference.indexer.fp8_mqa_logits import pair

__all__ = ["indexer_select"]


def indexer_select(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    top_k: int,
    *,
    block_table: torch.Tensor | None = None,
    page_size: int | None = None,
    row_to_seq: torch.Tensor | None = None,
    return_values: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The top_k keys of the largest scores I[t, s] = k_scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s]) among
    ks[t] <= s < ke[t], for every query t; of equal scores the lowest keys.

    q                   [S, H, D] float8_e4m3fn, contiguous; its scale belongs in `weights`
    kv                  (k [Skv, D] float8_e4m3fn, k_scale [Skv] fp32)
    weights             [S, H] fp32, any row stride, may be negative
    cu_seq_len_k_start  [S] int32, ks: the first key that query t sees
    cu_seq_len_k_end    [S] int32, ke: one past the last. With ke <= ks query t sees no key; both are clipped to
                        [0, Skv]
    top_k               how many to select, at least 1, possibly more than there are keys
    block_table         [B, max_pages] int32, turns an index into a cache slot: block_table[b, index // page_size] *
                        page_size + index % page_size, b = row_to_seq[t]
    page_size           keys per page, given with block_table
    row_to_seq          [S] int32, the query's sequence; query t belongs to sequence t if None
    return_values       True: also return the selected keys' scores

    Returns indices [S, top_k] int32, and with return_values also values [S, top_k] fp32: bit by bit what
    `topk_indices(fp8_mqa_logits(q, kv, weights, ks, ke), top_k, starts=ks, lengths=ke - ks, ...)` gives for ks and ke
    as they are clipped. Indices ascend and count from the first key that the query sees; queries that see fewer than
    top_k keys end in -1, where values are -inf. A value that is zero is 0.0. A NaN score is never selected. With
    block_table an index becomes -1 where `topk_indices` says so.
    Exact for any input: a query's result does not depend on the other queries, on the machine or on the run. The time
    does: ascending scores take longest. Raises TypeError or ValueError for other types, dtypes and shapes.
    On Hopper: one kernel, no memory beside the results; H in {8, 16, 32, 64}, D in {32, 64, 128}, top_k up to 2048,
    less than 2^30 keys; rows of k 16-byte aligned. A block of four queries is one multiprocessor's work, so it pays
    from about two thousand queries on. CUDA-graph safe with new ranges, no host synchronisation. Not differentiable.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), equation 1, and its top-k selection.
    """
    options = top_k, block_table, page_size, row_to_seq, return_values
    indices, values = _indexer_select(q, *pair(kv), weights, cu_seq_len_k_start, cu_seq_len_k_end, *options)
    return (indices, values) if return_values else indices


def _results(q: torch.Tensor, top_k: int, return_values: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices, values), the latter empty unless asked for."""
    indices = torch.empty(len(q), top_k, dtype=torch.int32, device=q.device)
    shape = (len(q), top_k) if return_values else (0, 0)
    return indices, torch.empty(shape, dtype=torch.float32, device=q.device)


def _check_limits(q: torch.Tensor, k: torch.Tensor, top_k: int) -> None:
    if q.shape[1] not in HEADS:
        raise ValueError(f"q: the kernel takes {HEADS} heads, got {q.shape[1]}")
    if q.shape[2] not in HEAD_DIMS:
        raise ValueError(f"q: the kernel takes head dimensions {HEAD_DIMS}, got {q.shape[2]}")
    if len(k) >= MAX_COLS:
        raise ValueError(f"kv[0]: the kernel takes less than {MAX_COLS} keys, got {len(k)}")
    if top_k > MAX_SELECTED:
        raise ValueError(f"top_k: the kernel takes up to {MAX_SELECTED}, got {top_k}")


@op(
    arguments=reference.INDEXER_SELECT,
    reference=reference.indices_and_values,
    results=_results,
    kernels={"sm_90": "dsa.kernels.indexer.indexer_select_sm90"},
    limits=_check_limits,
)
def _indexer_select(
    kernels: ModuleType,
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    top_k: int,
    block_table: torch.Tensor | None,
    page_size: int | None,
    row_to_seq: torch.Tensor | None,
    return_values: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    indices, values = _results(q, top_k, return_values)
    (queries, heads, dim), keys = q.shape, len(k)
    if queries == 0 or keys == 0:
        return indices.fill_(-1), values.fill_(-torch.inf)
    if keys == 1:  # a single row's stride means nothing, and may be any number
        k = k.as_strided(k.shape, (dim, 1))
    options = VALUES if return_values else 0
    # What is not given is not read: any tensor of its kind stands for it.
    table, sequences = indices, cu_seq_len_k_start
    if block_table is not None:
        table, options = block_table, options | PAGED
        if row_to_seq is not None:
            sequences, options = row_to_seq, options | ROW_TO_SEQ
    ctas = min(kernels.work_tiles(queries), backends.num_sms(q.device))
    ranges = cu_seq_len_k_start, cu_seq_len_k_end
    arguments = q.view(queries * heads, dim), k, k_scale, weights, *ranges, unit_inner(table), sequences, indices
    _kernel(kernels, heads, dim)(*arguments, values if return_values else weights, page_size or 1, options, ctas)
    return indices, values


@functools.cache
def _kernel(kernels: ModuleType, heads: int, dim: int) -> Callable[..., None]:
    return kernels.compile_indexer_select(heads, dim, kernels.CONFIG)
