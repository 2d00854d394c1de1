"""Scores of the lightning indexer over a paged key cache, and the plan that divides this work among SMs."""

import torch

from dsa.kernels.indexer.limits import HEAD_DIMS, HEADS, MAX_COLS, NEXT_N, PAGE_SIZES, SCHEDULE_SPLIT
from dsa.ops.cache._specs import BYTES, check_index_cache, pages_as_rows, slots_and_page_bytes
from dsa.ops.indexer.fp8_mqa_logits import ACCUMULATORS, LOGITS_DTYPES
from dsa.reference.indexer import fp8_paged_mqa_logits as reference
from dsa.reference.indexer.fp8_mqa_logits import row_stride
from dsa.runtime import backends
from dsa.runtime.declare import (
    ALIGNED,
    ANY,
    CONTIGUOUS,
    E4M3,
    F32,
    INNER,
    INT32,
    PAGES,
    Arguments,
    Dtype,
    Flag,
    Int,
    Tensor,
    at_most,
    dtype_name,
    op,
)

__all__ = ["fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata"]


def _check_page_divides_split(block_kv: int) -> None:
    if SCHEDULE_SPLIT % block_kv:
        raise ValueError(f"block_kv: must be a divisor of {SCHEDULE_SPLIT}, got {block_kv}")


def _check_plan(name: str, plan: torch.Tensor) -> None:
    if plan.shape[0] < 2:
        raise ValueError(f"{name}: must have at least 2 rows, got shape {list(plan.shape)}")


def _lengths_layout(context_lens: torch.Tensor) -> str:
    return INNER if context_lens.dim() == 2 else ANY


def _check_lengths(name: str, context_lens: torch.Tensor) -> None:
    if context_lens.dim() == 2 and not context_lens.shape[1]:
        raise ValueError(f"{name}: next_n must be at least 1, got shape {list(context_lens.shape)}")


LENGTHS = Tensor("B | B next_n", INT32, layout=_lengths_layout, rule=_check_lengths)
GET_PAGED_MQA_LOGITS_METADATA = Arguments(
    rule=_check_page_divides_split, context_lens=LENGTHS, block_kv=Int(), num_sms=Int()
)
FP8_PAGED_MQA_LOGITS = Arguments(
    q=Tensor("B next_n H D", E4M3, layout=ALIGNED),
    kv_cache=Tensor("pages P 1 D+4", BYTES, rule=check_index_cache, layout=PAGES),
    weights=Tensor("B*next_n H", F32, layout=INNER),
    context_lens=LENGTHS,
    block_table=Tensor("B max_pages", INT32, layout=INNER),
    schedule_meta=Tensor("SMs+1 2", INT32, optional=True, layout=CONTIGUOUS, rule=_check_plan),
    max_context_len=Int(),
    clean_logits=Flag(),
    logits_dtype=Dtype(LOGITS_DTYPES),
    accumulators=Dtype(ACCUMULATORS),
)
LIMITS = {"H": HEADS, "D": HEAD_DIMS, "next_n": NEXT_N, "P": PAGE_SIZES, **slots_and_page_bytes("(D+4)")}


def get_paged_mqa_logits_metadata(context_lens: torch.Tensor, block_kv: int, num_sms: int) -> torch.Tensor:
    """Return the plan of `fp8_paged_mqa_logits`: SM i computes the work from row i of the plan up to row i + 1,
    exclusive.

    context_lens  [B] or [B, next_n] int32, keys per sequence or per query. In the second case the length of a sequence
                  is the largest of its next_n numbers
    block_kv      page size, a divisor of 256
    num_sms       how many SMs share the work; `dsa.num_sms(device)` returns the number of SMs of the GPU

    Returns [num_sms + 1, 2] int32. The work is divided into splits of 256 keys: the splits of sequence 0 come first,
    then the splits of sequence 1, and so on. A sequence has ceil(length / 256) splits. A split covers all queries of
    the sequence. Row i is (sequence, split), the first split of SM i. If all sequences together have S splits, every SM
    gets S // num_sms splits, and the last S % num_sms SMs get one more. The last row is (B, 0); without work all rows
    are (B, 0). A sequence counts for at most (2^31 - 1) // B splits, so that S fits in int32.
    Raises TypeError or ValueError for other types, dtypes and shapes.
    On Hopper: one kernel, no host synchronisation. Captured in a CUDA graph together with the scores, it makes a new
    plan at every replay.
    Source: DeepGEMM's function of this name; for next_n <= 2 the plan is the same as DeepGEMM's.
    """
    return _get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms)


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    accumulators: torch.dtype = torch.float32,
) -> torch.Tensor:
    """I[b * next_n + i, s] = k_scale[b, s] * sum_h weights[b * next_n + i, h] * relu(q[b, i, h] . k[b, s]).

    q                [B, next_n, H, D] float8_e4m3fn, contiguous; the caller multiplies the scales of q into `weights`
    kv_cache         [pages, P, 1, D + 4] uint8: P x D e4m3 and then P fp32 scales per page (`write_indexer_cache`);
                     the page stride is any multiple of 16 bytes. The cache may exceed 2^31 bytes
    weights          [B * next_n, H] fp32, any row stride, may be negative
    context_lens     [B] int32: query i sees the first context_lens[b] - next_n + i + 1 keys, so the last query sees all
                     of them; or [B, next_n] int32: query i sees the first context_lens[b, i] keys. A length may be 0
    block_table      [B, max_pages] int32: key s is at offset s % P of page block_table[b, s // P]. Entries past the
                     sequence's keys are ignored; a page outside the cache is not read
    schedule_meta    [SMs + 1, 2] int32, contiguous, from `get_paged_mqa_logits_metadata` for these lengths; or None:
                     the op makes this plan in every call. The scores do not depend on the number of SMs. With a plan
                     for other lengths or with arbitrary numbers, some scores may not be written, but the op writes
                     nothing outside the result
    max_context_len  columns of the result; later keys are left out
    clean_logits     True: columns past the keys that a query sees are -inf. False: they are unspecified
    logits_dtype     torch.float32 or torch.bfloat16: the sum is fp32, rounded once
    accumulators     torch.float32, or torch.float16 for speed on Hopper if next_n * H > 128: then the products q . k
                     and sums over 8 heads are fp16, scaled so that none overflows if |weights| < 2^113. The error of a
                     score is about 5e-4 of the root mean square of the scores. If the products q . k of a key are below
                     0 for all heads, by more than their rounding error, the score is exactly 0. With next_n * H <= 128,
                     torch.float16 gives the scores of torch.float32, because fp16 would not be faster

    Returns [B * next_n, max_context_len], a view of a buffer whose rows start at multiples of 1024 bytes. A query sees
    at most the max_pages * P keys of its block table. A key whose page is outside the cache has the score -inf. NaN in
    a key reaches only the scores of that key.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: H in {8, 16, 32, 64}, D in {32, 64, 128}, next_n in {1, 2, 3, 4}, P in {32, 64}, fewer than 2^30 columns.
    Deterministic; a sequence's scores do not depend on the batch. CUDA-graph safe with new lengths if the plan is made
    in the graph, no host synchronisation. Not differentiable.
    Source: DeepGEMM's function of this name.
    """
    return _fp8_paged_mqa_logits(
        *(q, kv_cache, weights, context_lens, block_table, schedule_meta),
        *(max_context_len, clean_logits, logits_dtype, accumulators),
    )


def _plan_results(context_lens: torch.Tensor, num_sms: int) -> torch.Tensor:
    return torch.empty(num_sms + 1, 2, dtype=torch.int32, device=context_lens.device)


@op(
    arguments=GET_PAGED_MQA_LOGITS_METADATA,
    reference=reference.get_paged_mqa_logits_metadata,
    results=_plan_results,
)
def _get_paged_mqa_logits_metadata(context_lens: torch.Tensor, block_kv: int, num_sms: int) -> torch.Tensor:
    from dsa.kernels.indexer.paged_mqa_logits_metadata_sm90 import compile_paged_mqa_logits_metadata

    plan = _plan_results(context_lens, num_sms)
    compile_paged_mqa_logits_metadata()(_matrix(context_lens), plan)
    return plan


def _results(q: torch.Tensor, max_context_len: int, logits_dtype: torch.dtype) -> torch.Tensor:
    needed = -(-max_context_len // SCHEDULE_SPLIT) * SCHEDULE_SPLIT
    rows, stride = q.shape[0] * q.shape[1], row_stride(needed, logits_dtype)
    return torch.empty(rows, stride, dtype=logits_dtype, device=q.device)[:, :max_context_len]


@op(
    arguments=FP8_PAGED_MQA_LOGITS,
    reference=reference.fp8_paged_mqa_logits,
    results=_results,
    limits=LIMITS | {"max_context_len": at_most(MAX_COLS - 1)},
)
def _fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool,
    logits_dtype: torch.dtype,
    accumulators: torch.dtype,
) -> torch.Tensor:
    from dsa.kernels.indexer import fp8_paged_mqa_logits_sm90 as kernel

    batch, next_n, heads, dim = q.shape
    page_size = kv_cache.shape[1]
    out = _results(q, max_context_len, logits_dtype)
    if batch == 0 or kv_cache.shape[0] == 0 or block_table.shape[1] == 0:
        return out.fill_(-torch.inf)
    lengths, weights = _matrix(context_lens), _aligned_rows(weights)
    if schedule_meta is None:
        sms = backends.num_sms(q.device)
        schedule_meta = _get_paged_mqa_logits_metadata.launch_on(q.device, lengths, page_size, sms)
    half = accumulators == torch.float16 and kernel.bound_by_arithmetic(heads, next_n)
    launch = kernel.compile_fp8_paged_mqa_logits(
        *(heads, dim, next_n, page_size, dtype_name(logits_dtype), half),
        kernel.choose_config(heads, next_n, half),
    )
    launch(
        *(q.view(-1, dim), pages_as_rows(kv_cache), weights, lengths, _matrix(block_table), schedule_meta, out),
        min(max_context_len, block_table.shape[1] * page_size),
        max_context_len if clean_logits else 0,
    )
    return out


def _aligned_rows(weights: torch.Tensor) -> torch.Tensor:
    """Return `weights`, or a copy if its rows do not start at multiples of 16 bytes, as bulk copies require."""
    weights = _matrix(weights)
    if weights.data_ptr() % 16 or weights.stride(0) % 4:
        weights = weights.clone(memory_format=torch.contiguous_format)
    return weights


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """Return x [rows, columns] with a stride of 1 between columns. A vector becomes a matrix of one column."""
    if x.dim() == 2 and x.shape[1] != 1:
        return x
    return x.as_strided((x.shape[0], 1), (x.stride(0), 1))  # the stride of a single column is arbitrary
