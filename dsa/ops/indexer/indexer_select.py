"""Lightning-indexer scores and top-k selection in one op. With more than TWO_OPS_KEYS keys the op stores only a few of
the scores."""

import torch

from dsa.kernels.indexer.limits import (
    HEAD_DIMS,
    HEADS,
    MAX_COLS,
    MAX_SELECTED,
    PAGED,
    ROW_TO_SEQ,
    TWO_OPS_KEYS,
    VALUES,
)
from dsa.ops.indexer import fp8_mqa_logits, topk_indices
from dsa.reference.indexer import indexer_select as reference
from dsa.runtime import backends
from dsa.runtime.declare import INNER, INT32, Arguments, Dtype, Flag, Int, Tensor, at_most, op, unit_inner

__all__ = ["indexer_select"]

MOST_QUERIES = 2**19  # upper limit per launch, so that offsets into the candidate lists fit in 32 bits


def _check_paging(
    q: torch.Tensor, block_table: torch.Tensor | None, page_size: int | None, row_to_seq: torch.Tensor | None
) -> None:
    """q stands for the scores: only the number of rows matters."""
    topk_indices.check_paging(q, block_table, page_size, row_to_seq)


INDEXER_SELECT = Arguments(
    rule=_check_paging,
    **{name: fp8_mqa_logits.FP8_MQA_LOGITS.specs[name] for name in ("q", "k", "k_scale", "weights")},
    cu_seq_len_k_start=Tensor("S", INT32, layout=INNER),
    cu_seq_len_k_end=Tensor("S", INT32, layout=INNER),
    top_k=Int(),
    block_table=Tensor("B max_pages", INT32, optional=True, layout=INNER),
    page_size=Int(optional=True),
    row_to_seq=Tensor("S", INT32, optional=True),
    return_values=Flag(),
    accumulators=Dtype(fp8_mqa_logits.ACCUMULATORS),
)


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
    accumulators: torch.dtype = torch.float32,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The top_k keys with the largest scores I[t, s] = k_scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s]) among
    ks[t] <= s < ke[t], for every query t; ties go to the lowest key.

    q                   [S, H, D] float8_e4m3fn, contiguous; the caller multiplies the scales of q into `weights`
    kv                  (k [Skv, D] float8_e4m3fn, k_scale [Skv] fp32)
    weights             [S, H] fp32, any row stride, may be negative
    cu_seq_len_k_start  [S] int32, ks: the first key that query t sees
    cu_seq_len_k_end    [S] int32, ke: one past the last key. If ke <= ks, query t sees no key. Both are clipped to
                        [0, Skv]
    top_k               how many to select, at least 1, possibly more than there are keys
    block_table         [B, max_pages] int32, maps an index to a cache slot: block_table[b, index // page_size] *
                        page_size + index % page_size, b = row_to_seq[t]
    page_size           keys per page, given with block_table
    row_to_seq          [S] int32, the query's sequence; query t belongs to sequence t if None
    return_values       True: also return the selected keys' scores
    accumulators        torch.float32, or torch.float16 for the fp16 accumulation of `fp8_mqa_logits`

    Returns indices [S, top_k] int32, and with return_values also values [S, top_k] fp32: the bits of
    `topk_indices(fp8_mqa_logits(q, kv, weights, ks, ke), top_k, starts=ks, lengths=ke - ks, ...)` for the clipped ks
    and ke. Indices ascend and count from the first key that the query sees. If a query sees fewer than top_k keys, its
    row of indices ends in -1, where values are -inf. A value of zero is 0.0. A NaN score is never selected. With
    block_table an index becomes -1 under the conditions of `topk_indices`.
    Exact for any input: a query's result does not depend on other queries, on the machine or on the run. The time
    depends on the scores: many equal scores take longest. Raises TypeError or ValueError for other types, dtypes and
    shapes.
    On Hopper: for up to 8192 keys `fp8_mqa_logits` and `topk_indices` run. For more keys a sample of the keys gives,
    per query, a bound that the top_k-th largest score almost certainly reaches. The keys that reach the bound are the
    query's candidates, which are stored in a list. The workspace is at most 33 KiB per query, for up to 2^19 queries at
    a time. If a list overflows or its bound was too high, for example with many equal scores, another kernel computes
    the scores of all of the query's keys again and selects; with 2^28 keys or more this kernel runs for all queries. H
    in {8, 16, 32, 64}, D in {32, 64, 128}, top_k up to 2048, fewer than 2^30 keys; rows of k 16-byte aligned. At most
    two CTAs process a block of queries, and with 64 heads a block has four queries. So only many queries use all SMs:
    for more than 8192 keys the op is faster than calling `fp8_mqa_logits` and `topk_indices` only if there are about a
    thousand queries or more. CUDA-graph safe with new ranges, no host synchronisation. Not differentiable.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), equation 1, and its top-k selection.
    """
    options = top_k, block_table, page_size, row_to_seq, return_values, accumulators
    indices, values = _indexer_select(
        q, *fp8_mqa_logits.pair(kv), weights, cu_seq_len_k_start, cu_seq_len_k_end, *options
    )
    return (indices, values) if return_values else indices


def _results(q: torch.Tensor, top_k: int, return_values: bool) -> tuple[torch.Tensor, torch.Tensor]:
    indices = torch.empty(len(q), top_k, dtype=torch.int32, device=q.device)
    shape = (len(q), top_k) if return_values else (0, 0)
    return indices, torch.empty(shape, dtype=torch.float32, device=q.device)


@op(
    arguments=INDEXER_SELECT,
    reference=reference.indices_and_values,
    results=_results,
    limits={"H": HEADS, "D": HEAD_DIMS, "Skv": at_most(MAX_COLS - 1), "top_k": at_most(MAX_SELECTED)},
)
def _indexer_select(
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
    accumulators: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    indices, values = _results(q, top_k, return_values)
    queries, keys, dim = len(q), len(k), q.shape[2]
    if queries == 0 or keys == 0:
        return indices.fill_(-1), values.fill_(-torch.inf)
    if keys == 1:  # the stride of a single row is arbitrary, and TMA needs a multiple of 16 bytes
        k = k.as_strided(k.shape, (dim, 1))
    ranges = cu_seq_len_k_start, cu_seq_len_k_end
    if keys <= TWO_OPS_KEYS:
        paging = block_table, page_size, row_to_seq
        _in_two(q, k, k_scale, weights, *ranges, *paging, return_values, accumulators, indices, values)
        return indices, values
    table = None if block_table is None else unit_inner(block_table)
    for begin in range(0, queries, MOST_QUERIES):
        part = slice(begin, begin + MOST_QUERIES)
        # Without row_to_seq query t uses row t of the table.
        own = table if table is None or row_to_seq is not None else table[part]
        of_part = (x if x is None else x[part] for x in (row_to_seq, indices, values if return_values else None))
        _select(
            *(q[part], k, k_scale, weights[part], cu_seq_len_k_start[part], cu_seq_len_k_end[part]),
            *(top_k, own, page_size, *of_part, accumulators == torch.float16),
        )
    return indices, values


def _select(
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
    indices: torch.Tensor,
    values: torch.Tensor | None,
    half: bool,
) -> None:
    from dsa.kernels.indexer import candidate_lists as plan
    from dsa.kernels.indexer import indexer_select_sm90 as exact
    from dsa.kernels.indexer.candidate_select_sm90 import compile_candidate_select

    (queries, heads, dim), keys = q.shape, len(k)
    ranges = cu_seq_len_k_start, cu_seq_len_k_end
    options = 0 if values is None else VALUES
    # Placeholders of the right dtype and rank, which the kernels do not read.
    table, sequences = indices, cu_seq_len_k_start
    if block_table is not None:
        table, options = block_table, options | PAGED
        if row_to_seq is not None:
            sequences, options = row_to_seq, options | ROW_TO_SEQ
    scored = q.view(queries * heads, dim), k, k_scale, weights
    results = table, sequences, indices, weights if values is None else values
    ends = cu_seq_len_k_end
    if keys < plan.MAX_KEYS:
        lists = _lists(q.device, queries, plan.CAPACITY)
        _list_candidates(scored, ranges, lists, heads, top_k, half)
        ends = torch.empty(queries, dtype=torch.int32, device=q.device)
        compile_candidate_select()(*ranges, *lists, ends, *results, keys, page_size or 1, options)
    else:  # candidate_select does not run here, and indexer_select_sm90 does not write the rows of queries without keys
        indices.fill_(-1)
        if values is not None:
            values.fill_(-torch.inf)
    ctas = min(-(-queries // exact.BLOCK_Q), backends.num_sms(q.device))
    of_rest = exact.compile_indexer_select(heads, dim, half, exact.CONFIG)
    of_rest(*scored, cu_seq_len_k_start, ends, *results, page_size or 1, options, ctas)


Lists = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _lists(device: torch.device, queries: int, capacity: int) -> Lists:
    entries = torch.empty(queries, capacity, dtype=torch.int64, device=device)
    counts = torch.empty(queries, 2, dtype=torch.int32, device=device)
    return entries, counts, torch.empty(queries, dtype=torch.float32, device=device)


def _list_candidates(
    scored: tuple[torch.Tensor, ...],
    ranges: tuple[torch.Tensor, torch.Tensor],
    lists: Lists,
    heads: int,
    top_k: int,
    half: bool,
) -> None:
    """Launch the passes over the keys (candidate_lists.py). After each pass but the last, a kernel computes the
    queries' bounds for the next pass."""
    from dsa.kernels.indexer import candidate_lists as plan
    from dsa.kernels.indexer import candidate_scores_sm90 as scores
    from dsa.kernels.indexer.candidate_bounds_sm90 import compile_candidate_bounds

    q, k, queries = scored[0], scored[1], len(lists[0])
    config = scores.choose_config(heads, q.shape[1], half)
    block_q = config.columns // heads
    ctas = plan.choose_ctas(queries, block_q, backends.num_sms(q.device))
    strides = plan.pass_strides(len(k))
    ranks = (*plan.bound_ranks(top_k, strides), 0)
    before = 0
    for i, (stride, rank) in enumerate(zip(strides, ranks)):
        first = i == 0
        log = stride.bit_length() - 1
        keep = scores.compile_candidate_scores(heads, q.shape[1], first, half, config)
        keep(*scored, *ranges, *lists, log, 0 if first else before - log, ctas)
        if rank:
            compile_candidate_bounds(first)(*ranges, *lists, len(k), block_q, log, rank)
        before = log


def _in_two(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    block_table: torch.Tensor | None,
    page_size: int | None,
    row_to_seq: torch.Tensor | None,
    return_values: bool,
    accumulators: torch.dtype,
    indices: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Launch the kernels of `fp8_mqa_logits` and `topk_indices`, for up to TWO_OPS_KEYS keys."""
    starts, ends = (x.clamp(0, len(k)) for x in (cu_seq_len_k_start, cu_seq_len_k_end))
    options = False, len(k), torch.float32, accumulators
    scores = fp8_mqa_logits._fp8_mqa_logits.launch_on(q.device, q, k, k_scale, weights, starts, ends, *options)
    given = None, ends - starts, block_table, page_size, row_to_seq, False, return_values
    topk_indices.select(scores, *given, indices, values)
    if return_values:
        values.add_(0.0)  # turns -0.0 into 0.0
