"""Scores of the lightning indexer for keys in one tensor, not in cache pages."""

import torch

from dsa.kernels.indexer.limits import HEAD_DIMS, HEADS, MAX_COLS
from dsa.reference.indexer import fp8_mqa_logits as reference
from dsa.runtime import backends
from dsa.runtime.declare import (
    ALIGNED,
    E4M3,
    F32,
    FLOATS,
    INNER,
    INT32,
    ROWS,
    Arguments,
    Dtype,
    Flag,
    Int,
    Tensor,
    at_most,
    check_memory,
    check_pair,
    dtype_name,
    op,
)

__all__ = ["fp8_mqa_logits", "mqa_logits"]

LOGITS_DTYPES = (torch.float32, torch.bfloat16)
ACCUMULATORS = (torch.float32, torch.float16)

_PER_QUERY = {
    "weights": Tensor("S H", F32, layout=INNER),
    "cu_seq_len_k_start": Tensor("S", INT32, layout=INNER),
    "cu_seq_len_k_end": Tensor("S", INT32, layout=INNER),
}
FP8_MQA_LOGITS = Arguments(
    q=Tensor("S H D", E4M3, layout=ALIGNED),
    k=Tensor("Skv D", E4M3, layout=ROWS, name="kv[0]"),
    k_scale=Tensor("Skv", F32, layout=INNER, name="kv[1]"),
    **_PER_QUERY,
    clean_logits=Flag(),
    max_seqlen_k=Int(least=0),
    logits_dtype=Dtype(LOGITS_DTYPES),
    accumulators=Dtype(ACCUMULATORS),
)
MQA_LOGITS = Arguments(q=Tensor("S H D", FLOATS), k=Tensor("Skv D", FLOATS), **_PER_QUERY)


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

    q                   [S, H, D] float8_e4m3fn, contiguous; the caller multiplies the scales of q into `weights`
    kv                  (k [Skv, D] float8_e4m3fn, k_scale [Skv] fp32)
    weights             [S, H] fp32, any row stride, may be negative
    cu_seq_len_k_start  [S] int32, ks: the first key that query t sees
    cu_seq_len_k_end    [S] int32, ke: one past the last key. If ke <= ks, query t sees no key. Both are clipped to
                        [0, Skv]. The ranges of queries may overlap and may be in any order
    clean_logits        True: positions outside [ks, ke) are -inf. False: they are unspecified
    max_seqlen_k        0: the result is [S, Skv]. Above 0: it is [S, max_seqlen_k], column j is key ks[t] + j, and keys
                        that do not fit are left out
    logits_dtype        torch.float32 or torch.bfloat16: the sum is fp32, rounded once
    accumulators        torch.float32, or torch.float16 for speed on Hopper: then the products q . k and sums over 8
                        heads are fp16, scaled so that none overflows if |weights| < 2^113. The error of a score is
                        about 5e-4 of the root mean square of the scores. If the products q . k of a key are below 0 for
                        all heads, by more than their rounding error, the score is exactly 0

    Returns a view of a buffer whose rows start at multiples of 1024 bytes. NaN in a key reaches only the scores of that
    key. Without queries the result is empty. Without keys it is empty if max_seqlen_k is 0, and otherwise -inf. Raises
    TypeError or ValueError for other types, dtypes and shapes.
    On Hopper: H in {8, 16, 32, 64}, D in {32, 64, 128}; rows of k 16-byte aligned; fewer than 2^30 keys and columns.
    Deterministic, CUDA-graph safe with new ranges, no host synchronisation. Not differentiable.
    Source: DeepGEMM's function of this name; DeepSeek-V3.2 (arXiv 2512.02556), equation 1.
    """
    ranges = (cu_seq_len_k_start, cu_seq_len_k_end)
    options = clean_logits, max_seqlen_k, logits_dtype, accumulators
    return _fp8_mqa_logits(q, *pair(kv), weights, *ranges, *options)


def pair(kv: object) -> tuple:
    return check_pair("kv", kv, "(e4m3 keys, fp32 scales)")


def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
) -> torch.Tensor:
    """I[t, s] = sum_h weights[t, h] * relu(q[t, h] . k[s]) for ks[t] <= s < ke[t], -inf elsewhere.

    `fp8_mqa_logits` without quantisation, for parity and research. It runs in PyTorch on every device.

    q                   [S, H, D] fp32, bf16 or fp16
    k                   [Skv, D] fp32, bf16 or fp16
    weights             [S, H] fp32, may be negative
    cu_seq_len_k_start  [S] int32, ks: the first key that query t sees
    cu_seq_len_k_end    [S] int32, ke: one past the last key. If ke <= ks, query t sees no key. Both are clipped to
                        [0, Skv]

    Returns [S, Skv] fp32, differentiable in q, k and weights. Raises TypeError or ValueError for other types, dtypes
    and shapes. Source: DeepSeek-V3.2 (arXiv 2512.02556), equation 1.
    """
    MQA_LOGITS.check(q, k, weights, cu_seq_len_k_start, cu_seq_len_k_end)
    check_memory("q", q)
    return reference.mqa_logits(q, k, weights, cu_seq_len_k_start, cu_seq_len_k_end)


def _results(q: torch.Tensor, k: torch.Tensor, max_seqlen_k: int, logits_dtype: torch.dtype) -> torch.Tensor:
    columns, needed = reference.logits_columns(k.shape[0], max_seqlen_k)
    buffer = torch.empty(q.shape[0], reference.row_stride(needed, logits_dtype), dtype=logits_dtype, device=q.device)
    return buffer[:, :columns]


@op(
    arguments=FP8_MQA_LOGITS,
    reference=reference.fp8_mqa_logits,
    results=_results,
    limits={"H": HEADS, "D": HEAD_DIMS, "Skv": at_most(MAX_COLS - 1), "max_seqlen_k": at_most(MAX_COLS - 1)},
)
def _fp8_mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool,
    max_seqlen_k: int,
    logits_dtype: torch.dtype,
    accumulators: torch.dtype,
) -> torch.Tensor:
    from dsa.kernels.indexer import fp8_mqa_logits_sm90 as kernel

    out = _results(q, k, max_seqlen_k, logits_dtype)
    queries, heads, dim = q.shape
    keys = k.shape[0]
    if queries == 0 or keys == 0:
        return out.fill_(-torch.inf)
    if keys == 1:  # the stride of a single row is arbitrary, and TMA needs a multiple of 16 bytes
        k = k.as_strided(k.shape, (dim, 1))
    sms = backends.num_sms(q.device)
    half = accumulators == torch.float16
    config = kernel.choose_config(heads, dim, half)
    chunk, work_tiles = kernel.choose_chunk(queries, keys, config.columns // heads, sms)
    # Without max_seqlen_k the last tile of 64 keys may extend into the buffer's padding.
    columns = max_seqlen_k or -(-keys // 64) * 64
    whole = out.as_strided((queries, columns), out.stride())
    flat = q.view(queries * heads, dim)
    launch = kernel.compile_fp8_mqa_logits(
        heads, dim, dtype_name(logits_dtype), clean_logits, max_seqlen_k > 0, half, config
    )
    ranges = cu_seq_len_k_start, cu_seq_len_k_end
    launch(flat, k, k_scale, weights, *ranges, whole, columns, chunk, min(work_tiles, sms))
    return out
