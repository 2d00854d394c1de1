"""Scores of the lightning indexer over a paged key cache, and the plan that spreads them over the multiprocessors."""

import functools
from collections.abc import Callable
from types import ModuleType

import torch

from dsa import backends
from dsa.kernels.indexer.limits import HEAD_DIMS, HEADS, NEXT_N, PAGE_SIZES, SCHEDULE_SPLIT
from dsa.ops._kernel_arguments import check_pages, dtype_name, pages_as_rows
from dsa.ops.declaration import op
from dsa.reference.arguments import INNER, check_layout
from dsa.reference.indexer import fp8_paged_mqa_logits as reference
from dsa.reference.indexer.fp8_mqa_logits import row_stride

__all__ = ["fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata"]


def get_paged_mqa_logits_metadata(context_lens: torch.Tensor, block_kv: int, num_sms: int) -> torch.Tensor:
    """The plan of `fp8_paged_mqa_logits`: SM i works from boundary i up to, not including, boundary i + 1.

    context_lens  [B] or [B, next_n] int32, keys per sequence or per query; a sequence is as long as its longest query
    block_kv      page size, a divisor of 256
    num_sms       SMs that share the work; `dsa.num_sms(device)` has them all

    Returns [num_sms + 1, 2] int32. Row i is (sequence, split): the work is the splits of 256 keys of sequence 0, then
    of sequence 1 and so on, ceil(length / 256) each and none for an empty sequence, and row i is the first split of
    SM i. Every SM gets total // num_sms splits, the last total % num_sms of them one more. The last row is (B, 0), as
    is the row of every SM when there is no work. All the queries of a sequence share its splits. A sequence counts for
    at most (2^31 - 1) // B splits, so that their total is an int32.
    One kernel, no host synchronisation: captured in a CUDA graph with the scores, it plans anew at every replay.
    Raises TypeError or ValueError for other types, dtypes and shapes.
    Source: DeepGEMM's function of this name, whose plan for next_n <= 2 this is.
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
) -> torch.Tensor:
    """I[b * next_n + i, s] = k_scale[b, s] * sum_h weights[b * next_n + i, h] * relu(q[b, i, h] . k[b, s]).

    q                [B, next_n, H, D] float8_e4m3fn, contiguous; its scale belongs in `weights`
    kv_cache         [pages, P, 1, D + 4] uint8: P x D e4m3 and then P fp32 scales per page (`write_indexer_cache`);
                     pages may lie any multiple of 16 bytes apart, and the cache may exceed 2^31 bytes
    weights          [B * next_n, H] fp32, any row stride, may be negative
    context_lens     [B] int32: row i sees the first context_lens[b] - next_n + i + 1 keys, so that the last row sees
                     all of them; or [B, next_n] int32: row i sees the first context_lens[b, i] keys. 0 is a length
    block_table      [B, max_pages] int32: key s is at offset s % P of page block_table[b, s // P]. Entries past a
                     row's keys mean nothing; a page outside the cache is not read
    schedule_meta    [SMs + 1, 2] int32, contiguous, from `get_paged_mqa_logits_metadata` for these lengths; or None:
                     planned here. The scores do not depend on the number of SMs. A plan for other lengths, or none at
                     all, leaves scores unwritten, and does no other harm
    max_context_len  columns of the result; keys beyond them are left out
    clean_logits     True: columns past a row's keys are -inf. False: they are unspecified
    logits_dtype     torch.float32 or torch.bfloat16: the sum is fp32, rounded once

    Returns [B * next_n, max_context_len], a view of a buffer whose rows start at multiples of 1024 bytes. A key whose
    page is not in the table or not in the cache gives -inf. NaN in a key reaches only that key's column.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: H in {8, 16, 32, 64}, D in {32, 64, 128}, next_n in {1, 2, 3, 4}, P in {32, 64}. Deterministic, and a
    sequence's scores do not depend on its batch. CUDA-graph safe with new lengths if the plan is made in the graph,
    no host synchronisation. Not differentiable.
    Source: DeepGEMM's function of this name.
    """
    return _fp8_paged_mqa_logits(
        *(q, kv_cache, weights, context_lens, block_table, schedule_meta),
        *(max_context_len, clean_logits, logits_dtype),
    )


def _plan_results(context_lens: torch.Tensor, block_kv: int, num_sms: int) -> torch.Tensor:
    return torch.empty(num_sms + 1, 2, dtype=torch.int32, device=context_lens.device)


@op(
    arguments=reference.GET_PAGED_MQA_LOGITS_METADATA,
    reference=reference.get_paged_mqa_logits_metadata,
    results=_plan_results,
    kernels={"sm_90": "dsa.kernels.indexer.paged_mqa_logits_metadata_sm90"},
    limits=lambda context_lens, *_: _check_columns("context_lens", context_lens),
)
def _get_paged_mqa_logits_metadata(
    kernels: ModuleType, context_lens: torch.Tensor, block_kv: int, num_sms: int
) -> torch.Tensor:
    plan = _plan_results(context_lens, block_kv, num_sms)
    _metadata_kernel(kernels)(_matrix(context_lens), plan)
    return plan


def _results(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool,
    logits_dtype: torch.dtype,
) -> torch.Tensor:
    needed = -(-max_context_len // SCHEDULE_SPLIT) * SCHEDULE_SPLIT
    rows, stride = q.shape[0] * q.shape[1], row_stride(needed, logits_dtype)
    return torch.empty(rows, stride, dtype=logits_dtype, device=q.device)[:, :max_context_len]


def _check_limits(
    q: torch.Tensor, kv_cache: torch.Tensor, weights: torch.Tensor, context_lens: torch.Tensor, *_: object
) -> None:
    _, next_n, heads, dim = q.shape
    for name, what, value, accepted in (
        ("q", "heads", heads, HEADS),
        ("q", "head dimensions", dim, HEAD_DIMS),
        ("q", "queries a sequence (next_n)", next_n, NEXT_N),
        ("kv_cache", "page sizes", kv_cache.shape[1], PAGE_SIZES),
    ):
        if value not in accepted:
            raise ValueError(f"{name}: the Hopper kernel takes {what} {accepted}, got {value}")
    check_pages("kv_cache", kv_cache)
    _check_columns("context_lens", context_lens)


@op(
    arguments=reference.FP8_PAGED_MQA_LOGITS,
    reference=reference.fp8_paged_mqa_logits,
    results=_results,
    kernels={
        "sm_90": (
            "dsa.kernels.indexer.fp8_paged_mqa_logits_sm90",
            "dsa.kernels.indexer.paged_mqa_logits_metadata_sm90",
        )
    },
    limits=_check_limits,
)
def _fp8_paged_mqa_logits(
    kernels: tuple[ModuleType, ModuleType],
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool,
    logits_dtype: torch.dtype,
) -> torch.Tensor:
    scores, planner = kernels
    batch, next_n, heads, dim = q.shape
    page_size = kv_cache.shape[1]
    arguments = (q, kv_cache, weights, context_lens, block_table, schedule_meta)
    out = _results(*arguments, max_context_len, clean_logits, logits_dtype)
    if batch == 0 or kv_cache.shape[0] == 0 or block_table.shape[1] == 0:
        return out.fill_(-torch.inf)
    lengths, weights = _matrix(context_lens), _matrix(weights)
    if weights.data_ptr() % 16 or weights.stride(0) % 4:
        weights = weights.clone(memory_format=torch.contiguous_format)
    if schedule_meta is None:
        schedule_meta = _plan_results(context_lens, page_size, backends.num_sms(q.device))
        _metadata_kernel(planner)(lengths, schedule_meta)
    launch = _kernel(scores, heads, dim, next_n, page_size, logits_dtype)
    launch(
        *(q.view(-1, dim), pages_as_rows(kv_cache), weights, lengths, _matrix(block_table), schedule_meta, out),
        min(max_context_len, block_table.shape[1] * page_size),
        max_context_len if clean_logits else 0,
    )
    return out


@functools.cache
def _metadata_kernel(kernels: ModuleType) -> Callable[..., None]:
    return kernels.compile_paged_mqa_logits_metadata()


@functools.cache
def _kernel(
    kernels: ModuleType, heads: int, dim: int, next_n: int, page_size: int, dtype: torch.dtype
) -> Callable[..., None]:
    config = kernels.choose_config(heads, next_n)
    return kernels.compile_fp8_paged_mqa_logits(heads, dim, next_n, page_size, dtype_name(dtype), config)


def _check_columns(name: str, x: torch.Tensor) -> None:
    """x is a vector, of any stride, or a matrix whose rows are contiguous."""
    if x.dim() == 2:
        check_layout(name, x, INNER)


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """x as a matrix whose rows are contiguous; a vector is one column."""
    if x.dim() == 2 and x.shape[1] != 1:
        return x
    return x.as_strided((x.shape[0], 1), (x.stride(0), 1))  # a single column's stride may be any number
