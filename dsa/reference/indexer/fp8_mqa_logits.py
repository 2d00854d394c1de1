"""Scores of the lightning indexer for keys in one tensor (not in cache pages): multi-query attention logits, passed
through ReLU and summed over heads with weights."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.indexer.index_scores import index_scores

# Elements of a [queries, H, keys] tensor of scores: 128 MiB in fp32. ReLU makes a second tensor of this size.
_CHUNK = 2**25
_SPLIT_KV = 256
_ROW_ALIGNMENT = 1024


@without_autocast
def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
    accumulators: torch.dtype = torch.float32,
) -> torch.Tensor:
    """I[t, s] = k_scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s]) for ks[t] <= s < ke[t].

    ks and ke are cu_seq_len_k_start and cu_seq_len_k_end. Column s of the result is key s, or with max_seqlen_k column
    j is key ks[t] + j. `clean_logits` and `accumulators` have no effect: the reference writes -inf for all other keys,
    computes in fp32, and rounds to `logits_dtype` once. The result is a view of a wider buffer whose rows start at
    multiples of 1024 bytes. NaN in a key reaches only that key's scores. Arguments as in `dsa.fp8_mqa_logits`.
    Source: DeepGEMM's `fp8_mqa_logits`; DeepSeek-V3.2 (arXiv 2512.02556), equation 1.
    """
    k, k_scale = kv
    columns, needed = logits_columns(k.shape[0], max_seqlen_k)
    logits = padded_logits(q.shape[0], columns, needed, logits_dtype, q.device)
    _fill(logits, q, k, k_scale, weights, cu_seq_len_k_start, cu_seq_len_k_end, compressed=max_seqlen_k > 0)
    return logits


def logits_columns(keys: int, max_seqlen_k: int) -> tuple[int, int]:
    """Return (columns of the result, columns of the result's buffer before `row_stride` rounds them up).

    Without max_seqlen_k the kernel writes whole tiles of keys, so the buffer has columns after the last key.
    """
    if max_seqlen_k:
        return max_seqlen_k, -(-max_seqlen_k // _SPLIT_KV) * _SPLIT_KV
    return keys, keys + _SPLIT_KV


@without_autocast
def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
) -> torch.Tensor:
    """I[t, s] = sum_h weights[t, h] * relu(q[t, h] . k[s]) for ks[t] <= s < ke[t], -inf elsewhere.

    `fp8_mqa_logits` without quantisation: q and k are floats, and there are no scales of keys. The result is contiguous
    and fp32. Differentiable in q, k and weights. Arguments as in `dsa.mqa_logits`.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), equation 1.
    """
    if torch.compiler.is_compiling():  # `_fill` chooses by what the tensors hold, which cannot be traced
        key, starts, ends = torch.arange(k.shape[0], device=k.device), cu_seq_len_k_start, cu_seq_len_k_end
        outside = (key < starts[:, None]) | (key >= ends[:, None])
        return index_scores(q, k, weights).masked_fill(outside, -torch.inf)
    logits = torch.full((q.shape[0], k.shape[0]), -torch.inf, dtype=torch.float32, device=q.device)
    _fill(logits, q, k, None, weights, cu_seq_len_k_start, cu_seq_len_k_end, compressed=False)
    return logits


def padded_logits(rows: int, columns: int, needed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    buffer = torch.full((rows, row_stride(needed, dtype)), -torch.inf, dtype=dtype, device=device)
    return buffer[:, :columns]


def row_stride(needed: int, dtype: torch.dtype) -> int:
    """Return the elements of a row, rounded up to a multiple of 1024 bytes."""
    alignment = _ROW_ALIGNMENT // dtype.itemsize
    return -(-needed // alignment) * alignment


def _fill(
    logits: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    compressed: bool,
) -> None:
    """Write the scores of visible keys to `logits`, which contains -inf.

    k_scale: None stands for scales of 1. compressed: True: column j of row t is key starts[t] + j. False: column s is
    key s.
    """
    keys = k.shape[0]
    starts, ends = starts.long().clamp(0, keys), ends.long().clamp_max(keys)
    if not (starts < ends).any():
        return
    chunk = max(1, _CHUNK // max(1, q.shape[1] * keys))
    for first in range(0, q.shape[0], chunk):
        rows = slice(first, first + chunk)
        ks, ke = starts[rows, None], ends[rows, None]
        filled = ks < ke
        if not filled.any():
            continue
        low, high = int(ks[filled].min()), int(ke[filled].max())
        scores = index_scores(q[rows], k[low:high], weights[rows])
        if k_scale is not None:
            scores = scores * k_scale[low:high]
        if compressed:
            key = ks + torch.arange(logits.shape[1], device=k.device)
            scores = scores.gather(1, (key - low).clamp(0, high - low - 1))
            columns = slice(None)
        else:
            key = torch.arange(low, high, device=k.device)
            columns = slice(low, high)
        logits[rows, columns] = scores.masked_fill((key < ks) | (key >= ke), -torch.inf).to(logits.dtype)
