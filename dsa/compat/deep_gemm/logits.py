"""DeepGEMM's functions for scores of the lightning indexer, for `dsa.compat.deep_gemm`. They call `dsa.fp8_mqa_logits`,
`dsa.fp8_paged_mqa_logits` and `dsa.get_paged_mqa_logits_metadata`, whose docstrings say what they compute.

The names with fp8_fp4 are those of DeepGEMM since 2.8. Their queries are (values, scales). By default their results are
not cleaned, which means that values outside each row's range of keys are unspecified; only `fp8_fp4_mqa_logits` with
max_seqlen_k = 0 writes -inf there. `fp8_mqa_logits` and `fp8_paged_mqa_logits` are the names of earlier builds. In the
functions with fp8_fp4, an argument whose position differs from earlier builds is keyword-only.
"""

import torch

from dsa.ops.indexer.fp8_mqa_logits import fp8_mqa_logits as contiguous
from dsa.ops.indexer.fp8_paged_mqa_logits import fp8_paged_mqa_logits as paged
from dsa.ops.indexer.fp8_paged_mqa_logits import get_paged_mqa_logits_metadata as plan
from dsa.runtime import backends
from dsa.runtime.checks import INT32, check_pair, check_same_device, check_tensor, shape_of

Queries = tuple[torch.Tensor, torch.Tensor | None]


def get_num_sms() -> int:
    """Return the number of SMs of the current GPU, or 132 without a GPU. The number for which a plan is made does not
    affect the scores."""
    return backends.num_sms("cuda" if torch.cuda.is_available() else "cpu")


def fp8_fp4_mqa_logits(
    q: Queries,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    max_seqlen_k: int = 0,
    schedule_meta: None = None,
    *,
    clean_logits: bool | None = None,
    logits_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`dsa.fp8_mqa_logits` with compressed rows, by default not cleaned: the result is [S, max_seqlen_k]. Column j of
    row t is the score of key cu_seq_len_k_start[t] + j. Values after the row's keys are unspecified. With max_seqlen_k
    = 0, the result is [S, Skv] and by default cleaned, as in 2.8.0 and earlier builds.

    q              ([S, H, D] float8_e4m3fn, None); scales of FP4 queries are refused
    schedule_meta  must be None: the op plans itself
    clean_logits   None: True if max_seqlen_k is 0, else False
    """
    keys = (kv, weights, cu_seq_len_k_start, cu_seq_len_k_end)
    if schedule_meta is not None:
        raise ValueError(f"schedule_meta: must be None on Hopper, got {type(schedule_meta).__name__}")
    if clean_logits is None:
        clean_logits = isinstance(max_seqlen_k, int) and max_seqlen_k == 0
    return contiguous(_values_of(q), *keys, clean_logits, max_seqlen_k, logits_dtype)


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> torch.Tensor:
    """`dsa.fp8_mqa_logits` with fp32 results."""
    return contiguous(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k)


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_kv: int, num_sms: int, indices: torch.Tensor | None = None
) -> torch.Tensor:
    """`dsa.get_paged_mqa_logits_metadata`.

    indices  None, or [B] int32, with context_lens [B] or [B, 1]: the sequence of each row. In DeepGEMM, rows of one
             sequence can then share loads. Here the plan and the scores are the same with and without indices
    """
    if indices is not None:
        shape = shape_of(context_lens)
        if len(shape) == 2:
            _check_one_query("context_lens", context_lens)
        _check_indices(indices, context_lens, "context_lens", shape[:1] or ("B",))
    return plan(context_lens, block_kv, num_sms)


def fp8_fp4_paged_mqa_logits(
    q: Queries,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    indices: torch.Tensor | None = None,
    *,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`dsa.fp8_paged_mqa_logits`, by default not cleaned: the result is [B * next_n, max_context_len]. Values after a
    row's keys are then unspecified.

    q        ([B, next_n, H, D] float8_e4m3fn, None); scales of FP4 queries are refused
    indices  as for `get_paged_mqa_logits_metadata`; must be None if next_n > 1. They are checked and do not affect the
             scores: row b of the block table has the pages of q[b], with and without indices
    """
    values = _values_of(q)
    _check_paged_indices(indices, values)
    keys = (kv_cache, weights, context_lens, block_table, schedule_meta)
    return paged(values, *keys, max_context_len, clean_logits, logits_dtype)


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """`dsa.fp8_paged_mqa_logits` with fp32 results. indices: as for `fp8_fp4_paged_mqa_logits`."""
    _check_paged_indices(indices, q)
    return paged(q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits)


def _values_of(q: Queries) -> torch.Tensor:
    values, scales = check_pair("q", q, "(e4m3 values, None)")
    if scales is not None:
        raise ValueError(f"q[1]: must be None on Hopper, which has no FP4 queries, got {type(scales).__name__}")
    return values


def _check_paged_indices(indices: torch.Tensor | None, q: torch.Tensor) -> None:
    if indices is not None:
        _check_one_query("q", q)
        _check_indices(indices, q, "q", shape_of(q)[:1] or ("B",))


def _check_one_query(name: str, x: torch.Tensor) -> None:
    shape = shape_of(x)
    if len(shape) > 1 and shape[1] != 1:
        raise ValueError(f"indices: must be None with more than one query a row of {name}, got shape {list(shape)}")


def _check_indices(indices: torch.Tensor, x: torch.Tensor, name: str, shape: tuple[int | str, ...]) -> None:
    """Check that DeepGEMM would accept these indices; their values have no effect here."""
    check_tensor("indices", indices, INT32, shape, name)
    if isinstance(x, torch.Tensor):
        check_same_device((name, x), indices=indices)
