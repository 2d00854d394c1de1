"""Scores of the lightning indexer over a contiguous key sequence: multi-query attention logits summed over heads."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.indexer.index_scores import index_scores
from dsa.runtime.arguments import ALIGNED, F32, INNER, ROWS, Arguments, Dtype, Flag, Int, Tensor
from dsa.runtime.checks import E4M3, FLOATS, INT32, check_memory, check_pair

# Numbers in the largest [queries, H, keys] tensor: 128 MiB of fp32, and ReLU makes a second one.
_CHUNK = 2**25
_SPLIT_KV = 256
_ROW_ALIGNMENT = 1024
LOGITS_DTYPES = (torch.float32, torch.bfloat16)
ACCUMULATORS = (torch.float32, torch.float16)

_OF_A_QUERY = {
    "weights": Tensor("S H", F32, layout=INNER),
    "cu_seq_len_k_start": Tensor("S", INT32, layout=INNER),
    "cu_seq_len_k_end": Tensor("S", INT32, layout=INNER),
}
FP8_MQA_LOGITS = Arguments(
    q=Tensor("S H D", E4M3, layout=ALIGNED),
    k=Tensor("Skv D", E4M3, layout=ROWS, name="kv[0]"),
    k_scale=Tensor("Skv", F32, layout=INNER, name="kv[1]"),
    **_OF_A_QUERY,
    clean_logits=Flag(),
    max_seqlen_k=Int(least=0),
    logits_dtype=Dtype(LOGITS_DTYPES),
    accumulators=Dtype(ACCUMULATORS),
)
MQA_LOGITS = Arguments(q=Tensor("S H D", FLOATS), k=Tensor("Skv D", FLOATS), **_OF_A_QUERY)


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

    The reference writes -inf in either case of clean_logits. The result is a view of a wider buffer whose rows start at
    multiples of 1024 bytes. Everything is fp32 whatever the accumulators, rounded to logits_dtype once. NaN in a key
    reaches only that key's column. Arguments as of `dsa.fp8_mqa_logits`.
    Source: DeepGEMM's `fp8_mqa_logits`; DeepSeek-V3.2 (arXiv 2512.02556), equation 1.
    """
    k, k_scale = pair(kv)
    ranges = (cu_seq_len_k_start, cu_seq_len_k_end)
    FP8_MQA_LOGITS.check(q, k, k_scale, weights, *ranges, clean_logits, max_seqlen_k, logits_dtype, accumulators)
    check_memory("q", q)
    columns, needed = logits_columns(k.shape[0], max_seqlen_k)
    logits = padded_logits(q.shape[0], columns, needed, logits_dtype, q.device)
    _fill(logits, q, k, k_scale, weights, cu_seq_len_k_start, cu_seq_len_k_end, compressed=max_seqlen_k > 0)
    return logits


def pair(kv: object) -> tuple:
    """The keys and their scales."""
    return check_pair("kv", kv, "(e4m3 keys, fp32 scales)")


def logits_columns(keys: int, max_seqlen_k: int) -> tuple[int, int]:
    """Columns of the result, and columns that its buffer has room for."""
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

    `fp8_mqa_logits` without quantisation, for parity and research; it runs in PyTorch on every device.

    q                   [S, H, D] fp32, bf16 or fp16
    k                   [Skv, D] fp32, bf16 or fp16
    weights             [S, H] fp32, may be negative
    cu_seq_len_k_start  [S] int32, ks: the first key that query t sees
    cu_seq_len_k_end    [S] int32, ke: one past the last. With ke <= ks query t sees no key; both are clipped to
                        [0, Skv]

    Returns [S, Skv] fp32, differentiable in q, k and weights. Raises TypeError or ValueError for other types, dtypes
    and shapes. Source: DeepSeek-V3.2 (arXiv 2512.02556), equation 1.
    """
    MQA_LOGITS.check(q, k, weights, cu_seq_len_k_start, cu_seq_len_k_end)
    check_memory("q", q)
    logits = torch.full((q.shape[0], k.shape[0]), -torch.inf, dtype=torch.float32, device=q.device)
    _fill(logits, q, k, None, weights, cu_seq_len_k_start, cu_seq_len_k_end, compressed=False)
    return logits


def padded_logits(rows: int, columns: int, needed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[rows, columns] of -inf, a view of a buffer whose row stride is `needed` rounded up to 1024 bytes."""
    buffer = torch.full((rows, row_stride(needed, dtype)), -torch.inf, dtype=dtype, device=device)
    return buffer[:, :columns]


def row_stride(needed: int, dtype: torch.dtype) -> int:
    """`needed` elements, rounded up to 1024 bytes."""
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
    """Writes the scores into `logits`, which holds -inf, some queries at a time so that memory stays bounded."""
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
        # Score only the keys that some query of the chunk sees.
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
