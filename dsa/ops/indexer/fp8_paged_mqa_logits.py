"""Scores of the lightning indexer over a paged key cache, and the plan that spreads them over the multiprocessors."""

import functools
from collections.abc import Callable

import torch

from dsa import backends
from dsa.kernels.indexer.limits import HEAD_DIMS, HEADS, NEXT_N, PAGE_SIZES
from dsa.ops._kernel_arguments import dtype_name
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
    reference.check_metadata(context_lens, block_kv, num_sms)
    if torch.compiler.is_compiling():
        return torch.ops.dsa.get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms)
    return _metadata(context_lens, block_kv, num_sms)


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
    reference.check_paged_mqa_logits(
        q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits, logits_dtype
    )
    arguments = (
        *(q, kv_cache, weights, context_lens, block_table, schedule_meta),
        *(max_context_len, clean_logits, logits_dtype),
    )
    if torch.compiler.is_compiling():
        return torch.ops.dsa.fp8_paged_mqa_logits(*arguments)
    return _logits(*arguments)


def _metadata(context_lens: torch.Tensor, block_kv: int, num_sms: int) -> torch.Tensor:
    if not backends.runs_kernel("get_paged_mqa_logits_metadata", context_lens):
        return reference.get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms)
    plan = torch.empty(num_sms + 1, 2, dtype=torch.int32, device=context_lens.device)
    with backends.on_device(context_lens):
        _metadata_kernel()(_matrix("context_lens", context_lens), plan)
    return plan


def _logits(
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
    if not backends.runs_kernel("fp8_paged_mqa_logits", q):
        return reference.fp8_paged_mqa_logits(
            *(q, kv_cache, weights, context_lens, block_table, schedule_meta),
            *(max_context_len, clean_logits, logits_dtype),
        )
    _check_kernel_takes(q, kv_cache, weights, context_lens, block_table, schedule_meta)
    batch, next_n, heads, dim = q.shape
    pages, page_size = kv_cache.shape[:2]
    out = _allocate(q, max_context_len, logits_dtype)
    if batch == 0 or pages == 0 or block_table.shape[1] == 0:
        return out.fill_(-torch.inf)
    weights = _matrix("weights", weights)
    if weights.data_ptr() % 16 or weights.stride(0) % 4:
        weights = weights.clone(memory_format=torch.contiguous_format)
    if schedule_meta is None:
        schedule_meta = _metadata(context_lens, page_size, backends.num_sms(q.device))
    launch = _kernel(heads, dim, next_n, page_size, logits_dtype)
    with backends.on_device(q):
        launch(
            q.view(-1, dim),
            kv_cache.as_strided(
                (pages, page_size * (dim + 4)), (kv_cache.stride(0) if pages > 1 else page_size * (dim + 4), 1)
            ),
            weights,
            _matrix("context_lens", context_lens),
            _matrix("block_table", block_table),
            schedule_meta,
            out,
            min(max_context_len, block_table.shape[1] * page_size),
            max_context_len if clean_logits else 0,
        )
    return out


@functools.cache
def _metadata_kernel() -> Callable[..., None]:
    from dsa.kernels.indexer.paged_mqa_logits_metadata_sm90 import compile_paged_mqa_logits_metadata

    return compile_paged_mqa_logits_metadata()


@functools.cache
def _kernel(heads: int, dim: int, next_n: int, page_size: int, dtype: torch.dtype) -> Callable[..., None]:
    from dsa.kernels.indexer import fp8_paged_mqa_logits_sm90 as kernels

    config = kernels.choose_config(heads, next_n)
    return kernels.compile_fp8_paged_mqa_logits(heads, dim, next_n, page_size, dtype_name(dtype), config)


def _matrix(name: str, x: torch.Tensor) -> torch.Tensor:
    """x as a matrix whose rows are contiguous (a vector is one column), or a ValueError."""
    columns = x.shape[1] if x.dim() == 2 else 1
    if columns == 1:  # the stride of a single column means nothing, and may be any number
        return x.as_strided((x.shape[0], 1), (x.stride(0), 1))
    if x.stride(1) != 1:
        raise ValueError(f"{name}: the last dimension must be contiguous, got strides {list(x.stride())}")
    return x


def _allocate(q: torch.Tensor, max_context_len: int, dtype: torch.dtype) -> torch.Tensor:
    needed = -(-max_context_len // reference.SPLIT_KV) * reference.SPLIT_KV
    buffer = torch.empty(q.shape[0] * q.shape[1], row_stride(needed, dtype), dtype=dtype, device=q.device)
    return buffer[:, :max_context_len]


def _check_kernel_takes(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
) -> None:
    _, next_n, heads, dim = q.shape
    page_size = kv_cache.shape[1]
    for name, what, value, accepted in (
        ("q", "heads", heads, HEADS),
        ("q", "head dimensions", dim, HEAD_DIMS),
        ("q", "queries a sequence (next_n)", next_n, NEXT_N),
        ("kv_cache", "page sizes", page_size, PAGE_SIZES),
    ):
        if value not in accepted:
            raise ValueError(f"{name}: the Hopper kernel takes {what} {accepted}, got {value}")
    if not q.is_contiguous() or q.data_ptr() % 16:
        raise ValueError(
            f"q: must be contiguous and start at a multiple of 16 bytes, got strides {list(q.stride())} and an address "
            f"{q.data_ptr() % 16} bytes past one"
        )
    stride = kv_cache.stride()
    if stride[1] != dim + 4 or stride[3] != 1 or (stride[0] % 16 and kv_cache.shape[0] > 1) or kv_cache.data_ptr() % 16:
        raise ValueError(
            f"kv_cache: every page must be contiguous and start at a multiple of 16 bytes, got strides {list(stride)} "
            f"and an address {kv_cache.data_ptr() % 16} bytes past one"
        )
    if schedule_meta is not None and not schedule_meta.is_contiguous():
        raise ValueError(f"schedule_meta: must be contiguous, got strides {list(schedule_meta.stride())}")


torch.library.custom_op("dsa::get_paged_mqa_logits_metadata", mutates_args=())(_metadata)
torch.library.custom_op("dsa::fp8_paged_mqa_logits", mutates_args=())(_logits)


@torch.library.register_fake("dsa::get_paged_mqa_logits_metadata")
def _(context_lens: torch.Tensor, block_kv: int, num_sms: int) -> torch.Tensor:
    return torch.empty(num_sms + 1, 2, dtype=torch.int32, device=context_lens.device)


@torch.library.register_fake("dsa::fp8_paged_mqa_logits")
def _(
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
    return _allocate(q, max_context_len, logits_dtype)
