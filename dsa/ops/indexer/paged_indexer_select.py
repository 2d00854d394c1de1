"""Lightning-indexer scores over a paged key cache and the selection of the largest in one launch, for decoding."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from dsa import backends
from dsa.kernels.indexer.limits import PAGED, VALUES
from dsa.kernels.indexer.select_limits import MAX_SELECTED
from dsa.ops._kernel_arguments import pages_as_rows
from dsa.ops.declaration import op
from dsa.ops.indexer import fp8_paged_mqa_logits as of_scores
from dsa.reference.indexer import paged_indexer_select as reference

__all__ = ["paged_indexer_select", "paged_indexer_select_workspace"]

paged_indexer_select_workspace = reference.paged_indexer_select_workspace


def paged_indexer_select(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    top_k: int,
    *,
    slots: bool = False,
    return_values: bool = False,
    accumulators: torch.dtype = torch.float32,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The top_k keys of the largest scores I[b * next_n + i, s] = k_scale[b, s] * sum_h weights[b * next_n + i, h] *
    relu(q[b, i, h] . k[b, s]) among those that query i of sequence b sees; of equal scores the lowest keys.

    q                [B, next_n, H, D] float8_e4m3fn, contiguous; its scale belongs in `weights`
    kv_cache         [pages, P, 1, D + 4] uint8: P x D e4m3 and then P fp32 scales per page (`write_indexer_cache`);
                     pages may lie any multiple of 16 bytes apart, and the cache may exceed 2^31 bytes
    weights          [B * next_n, H] fp32, any row stride, may be negative
    context_lens     [B] int32: query i sees the first context_lens[b] - next_n + i + 1 keys, so that the last one sees
                     all of them; or [B, next_n] int32: query i sees the first context_lens[b, i] keys. May be 0; what
                     a query sees is clipped to [0, min(max_context_len, max_pages * P)]
    block_table      [B, max_pages] int32: key s is at offset s % P of page block_table[b, s // P]. Entries past a
                     query's keys mean nothing; a page outside the cache is not read
    max_context_len  keys beyond them are left out
    top_k            how many to select, at least 1, possibly more than there are keys
    slots            True: in place of key s its slot in the cache, block_table[b, s // P] * P + s % P
    return_values    True: also return the selected keys' scores
    accumulators     torch.float32, or torch.float16 for the half scores of `fp8_paged_mqa_logits`
    workspace        None, or zeros of `paged_indexer_select_workspace` for at least B * next_n queries. The op writes
                     to it and leaves it as good as zero for another call of any shape: one serves all layers of a step
                     and later steps, but not two calls at the same time. It must hold nothing else: then a call may
                     take seconds, its results are any numbers, and only `zero_()` makes it good again. Without one the
                     op makes its own, which takes the time to set it to zero

    Returns indices [B * next_n, top_k] int32, and with return_values also values [B * next_n, top_k] fp32: bit by bit
    what `topk_indices(fp8_paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, None, max_context_len),
    top_k, lengths=L, ...)` gives for L as it is clipped. Keys ascend; queries that see fewer than top_k keys end in -1,
    where values are -inf. A value that is zero is 0.0. A NaN score is never selected. A key whose page is not in the
    cache scores -inf, and is selected where too few others are there; but of a cache without pages none is. With slots
    an index becomes -1, and its value -inf, where `topk_indices` says so: for a negative page, or a slot of 2^31 or
    more.
    Exact for any input: a query's result does not depend on the other queries, on the machine or on the run.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: one kernel for up to 32 sequences, whose scores stay in shared memory. This bounds sequences times keys
    that they may see, min(max_context_len, max_pages * P): more sequences take further launches, and a max_context_len
    for which not even one has room is refused: with 132 multiprocessors and 64 heads above 1.1 million keys of next_n 4
    and 5 million of next_n 1.
    H in {8, 16, 32, 64}, D in {32, 64, 128}, next_n in {1, 2, 3, 4}, P in {32, 64}, top_k up to 2048. CUDA-graph safe
    with new lengths and keys, no plan, no host synchronisation. All CTAs run at once and wait for each other. It pays
    with one query a sequence and half a million keys or more. Not differentiable.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), equation 1, and its top-k selection.
    """
    indices, values = _paged_indexer_select(
        *(q, kv_cache, weights, context_lens, block_table),
        *(max_context_len, top_k, slots, return_values, accumulators, workspace),
    )
    return (indices, values) if return_values else indices


def _results(q: torch.Tensor, top_k: int, return_values: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices, values), the latter empty unless asked for."""
    queries = q.shape[0] * q.shape[1]
    indices = torch.empty(queries, top_k, dtype=torch.int32, device=q.device)
    shape = (queries, top_k) if return_values else (0, 0)
    return indices, torch.empty(shape, dtype=torch.float32, device=q.device)


def _check_limits(q: torch.Tensor, kv_cache: torch.Tensor, context_lens: torch.Tensor, top_k: int) -> None:
    of_scores.check_inputs(q, kv_cache, context_lens)
    if top_k > MAX_SELECTED:
        raise ValueError(f"top_k: the kernel takes up to {MAX_SELECTED}, got {top_k}")


@op(
    arguments=reference.PAGED_INDEXER_SELECT,
    reference=reference.indices_and_values,
    results=_results,
    kernels={"sm_90": ("dsa.kernels.indexer.paged_indexer_select_sm90", "dsa.kernels.indexer.paged_select_plan")},
    limits=_check_limits,
)
def _paged_indexer_select(
    kernels: tuple[ModuleType, ModuleType],
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    top_k: int,
    slots: bool,
    return_values: bool,
    accumulators: torch.dtype,
    workspace: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    indices, values = _results(q, top_k, return_values)
    (batch, next_n, heads, dim), page_size = q.shape, kv_cache.shape[1]
    keys = min(max_context_len, block_table.shape[1] * page_size)
    if batch == 0 or kv_cache.shape[0] == 0 or keys == 0:
        return indices.fill_(-1), values.fill_(-torch.inf)
    kernel, plan = kernels
    half = accumulators == torch.float16 and kernel.bound_by_arithmetic(heads, next_n)
    config = kernel.choose_config(heads, next_n, half)
    room, ctas = config.capacity(heads * next_n, next_n, half), min(backends.num_sms(q.device), plan.MAX_CTAS)
    most = plan.sequences_of_launch(keys, room, ctas)
    if most == 0:
        raise ValueError(
            f"max_context_len: the kernel takes up to {room * (ctas - 1)} keys of {next_n} queries a sequence of "
            f"{heads} heads, got {max_context_len}"
        )
    each = -(-batch // -(-batch // most))  # sequences of a launch, about as many in all of them
    if workspace is None:
        workspace = torch.zeros(each * next_n, plan.ROW_WORDS, dtype=torch.int32, device=q.device)
    launch = _kernel(kernel, heads, dim, next_n, page_size, half, config)
    pages, weights = pages_as_rows(kv_cache), of_scores._aligned_rows(weights)
    lengths, table = of_scores._matrix(context_lens), of_scores._matrix(block_table)
    options = (PAGED if slots else 0) | (VALUES if return_values else 0)
    for first in range(0, batch, each):
        part = slice(first, min(first + each, batch))
        rows = slice(part.start * next_n, part.stop * next_n)
        # What is not asked for is not written: any matrix of fp32 stands for it.
        results = indices[rows], (values if return_values else weights)[rows]
        given = q[part].view(-1, dim), pages, weights[rows], lengths[part], table[part]
        launch(*given, workspace[: (part.stop - part.start) * next_n], *results, keys, options, ctas)
    return indices, values


@functools.cache
def _kernel(
    kernels: ModuleType, heads: int, dim: int, next_n: int, page_size: int, half: bool, config: Any
) -> Callable[..., None]:
    return kernels.compile_paged_indexer_select(heads, dim, next_n, page_size, half, config)
