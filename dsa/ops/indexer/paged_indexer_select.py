"""Lightning-indexer scores over a paged key cache and top-k selection in one op, for decoding."""

import torch

from dsa.kernels.indexer.limits import MAX_COLS, MAX_K
from dsa.ops.indexer import fp8_paged_mqa_logits as of_scores
from dsa.ops.indexer import topk_indices as of_topk
from dsa.reference.indexer import paged_indexer_select as reference
from dsa.runtime.declare import Arguments, Dtype, Flag, Int, at_most, op

__all__ = ["paged_indexer_select"]

_SCORES = ("q", "kv_cache", "weights", "context_lens", "block_table", "max_context_len")
PAGED_INDEXER_SELECT = Arguments(
    **{name: of_scores.FP8_PAGED_MQA_LOGITS.specs[name] for name in _SCORES},
    top_k=Int(),
    slots=Flag(),
    return_values=Flag(),
    accumulators=Dtype(of_scores.ACCUMULATORS),
)


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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The top_k keys with the largest scores I[b * next_n + i, s] = k_scale[b, s] * sum_h weights[b * next_n + i, h] *
    relu(q[b, i, h] . k[b, s]) among those that query i of sequence b sees; ties go to the lowest key.

    q                [B, next_n, H, D] float8_e4m3fn, contiguous; the caller multiplies the scales of q into `weights`
    kv_cache         [pages, P, 1, D + 4] uint8: P x D e4m3 and then P fp32 scales per page (`write_indexer_cache`);
                     the page stride is any multiple of 16 bytes. The cache may exceed 2^31 bytes
    weights          [B * next_n, H] fp32, any row stride, may be negative
    context_lens     [B] int32: query i sees the first context_lens[b] - next_n + i + 1 keys, so the last query sees all
                     of them; or [B, next_n] int32: query i sees the first context_lens[b, i] keys. A length may be 0.
                     The number of keys that a query sees is clipped to [0, min(max_context_len, max_pages * P)]
    block_table      [B, max_pages] int32: key s is at offset s % P of page block_table[b, s // P]. Entries past a
                     query's keys are ignored; a page outside the cache is not read
    max_context_len  keys past this position are left out
    top_k            how many to select, at least 1, possibly more than there are keys
    slots            True: return the key's slot in the cache, block_table[b, s // P] * P + s % P, not its position s
    return_values    True: also return the selected keys' scores
    accumulators     torch.float32, or torch.float16 for the fp16 accumulation of `fp8_paged_mqa_logits`

    Returns indices [B * next_n, top_k] int32, and with return_values also values [B * next_n, top_k] fp32: the bits of
    `topk_indices(fp8_paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, None, max_context_len), top_k,
    lengths=L, ...)` where L are the clipped numbers of keys. Positions ascend. If a query sees fewer than top_k keys,
    its row of indices ends in -1, where values are -inf. A value of zero is 0.0. A NaN score is never selected. A key
    whose page is outside the cache has the score -inf, and is selected if fewer than top_k keys have larger scores; but
    from a cache without pages no key is selected. With slots an index becomes -1, and its value -inf, under the
    conditions of `topk_indices`: for a negative page, or a slot of 2^31 or more.
    Exact for any input: a query's result does not depend on other queries, on the machine or on the run.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: the kernels of `fp8_paged_mqa_logits` and `topk_indices`. During the call the scores take 4 bytes per
    query and key, for min(max_context_len, max_pages * P) keys. H in {8, 16, 32, 64}, D in {32, 64, 128}, next_n in {1,
    2, 3, 4}, P in {32, 64}, top_k up to 4096, fewer than 2^30 keys. CUDA-graph safe with new lengths and keys, no host
    synchronisation. The op makes the plan of the scores (`get_paged_mqa_logits_metadata`) in every call. To share one
    plan among layers with the same lengths, call `fp8_paged_mqa_logits` and `topk_indices` instead. Not differentiable.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), equation 1, and its top-k selection.
    """
    indices, values = _paged_indexer_select(
        *(q, kv_cache, weights, context_lens, block_table),
        *(max_context_len, top_k, slots, return_values, accumulators),
    )
    return (indices, values) if return_values else indices


def _results(q: torch.Tensor, top_k: int, return_values: bool) -> tuple[torch.Tensor, torch.Tensor]:
    queries = q.shape[0] * q.shape[1]
    indices = torch.empty(queries, top_k, dtype=torch.int32, device=q.device)
    shape = (queries, top_k) if return_values else (0, 0)
    return indices, torch.empty(shape, dtype=torch.float32, device=q.device)


def _columns(kv_cache: torch.Tensor, block_table: torch.Tensor, max_context_len: int) -> int:
    return min(max_context_len, block_table.shape[1] * kv_cache.shape[1])


def _check_columns(kv_cache: torch.Tensor, block_table: torch.Tensor, max_context_len: int) -> None:
    if _columns(kv_cache, block_table, max_context_len) >= MAX_COLS:
        raise ValueError(f"max_context_len: the kernel takes less than {MAX_COLS} keys, got {max_context_len}")


def _visible_keys(context_lens: torch.Tensor, next_n: int) -> torch.Tensor:
    """Return how many keys each query sees, [B * next_n] int32. The selection clips these numbers."""
    if context_lens.dim() == 2 or next_n == 1:
        return context_lens.reshape(-1)
    # Clamp before the subtraction: the lowest int32 would wrap to a large number.
    earlier = torch.arange(1 - next_n, 1, dtype=torch.int32, device=context_lens.device)
    return (context_lens.clamp(min=0)[:, None] + earlier).reshape(-1)


@op(
    arguments=PAGED_INDEXER_SELECT,
    reference=reference.indices_and_values,
    results=_results,
    limits=of_scores.LIMITS | {"top_k": at_most(MAX_K)},
    rule=_check_columns,
)
def _paged_indexer_select(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    indices, values = _results(q, top_k, return_values)
    (batch, next_n), (pages, page_size) = q.shape[:2], kv_cache.shape[:2]
    columns = _columns(kv_cache, block_table, max_context_len)
    if batch == 0 or pages == 0 or columns == 0:
        return indices.fill_(-1), values.fill_(-torch.inf)
    scores = of_scores._fp8_paged_mqa_logits.launch_on(
        *(q.device, q, kv_cache, weights, context_lens, block_table, None),
        *(columns, False, torch.float32, accumulators),
    )
    paging: tuple[torch.Tensor | int | None, ...] = None, None, None
    if slots:
        paging = block_table, page_size, None
        if next_n > 1:
            rows = torch.arange(batch * next_n, dtype=torch.int32, device=q.device)
            paging = block_table, page_size, rows // next_n
    lengths = _visible_keys(context_lens, next_n)
    of_topk.select(scores, None, lengths, *paging, False, return_values, indices, values)
    if return_values:
        values.add_(0.0)  # turns -0.0 into 0.0
    return indices, values
