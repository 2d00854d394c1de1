"""Scores of the lightning indexer over a paged key cache, for decoding, and the plan that spreads them over SMs."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.cache.indexer_cache import check_cache, read_indexer_cache
from dsa.reference.checks import (
    INT32,
    check_dtype,
    check_flag,
    check_memory,
    check_positive,
    check_same_device,
    check_tensor,
)
from dsa.reference.indexer.fp8_mqa_logits import LOGITS_DTYPES, padded_logits
from dsa.reference.indexer.index_scores import index_scores

SPLIT_KV = 256
MOST_SPLITS = 2**31 - 1  # of all sequences


def get_paged_mqa_logits_metadata(context_lens: torch.Tensor, block_kv: int, num_sms: int) -> torch.Tensor:
    """The plan of `fp8_paged_mqa_logits`: SM i works from boundary i up to, not including, boundary i + 1.

    context_lens  [B] or [B, next_n] int32, keys per sequence or per query; a sequence is as long as its longest query
    block_kv      page size, a divisor of 256
    num_sms       SMs that share the work

    Returns [num_sms + 1, 2] int32. Row i is (sequence, split): the work is the splits of 256 keys of sequence 0, then
    of sequence 1 and so on, ceil(length / 256) each and none for an empty sequence, and row i is the first split of
    SM i. Every SM gets total // num_sms splits, the last total % num_sms of them one more. The last row is (B, 0), as
    is the row of every SM when there is no work. All the queries of a sequence share its splits. A sequence counts for
    at most (2^31 - 1) // B splits, so that their total is an int32.
    Raises TypeError or ValueError for other types, dtypes and shapes.
    Source: DeepGEMM's function of this name, whose plan for next_n <= 2 this is.
    """
    check_metadata(context_lens, block_kv, num_sms)
    check_memory("context_lens", context_lens)
    lengths = context_lens.long().clamp_min(0)
    if lengths.dim() == 2:
        lengths = lengths.amax(1)
    splits = ((lengths + SPLIT_KV - 1) // SPLIT_KV).clamp_max(MOST_SPLITS // max(len(lengths), 1))
    ends = splits.cumsum(0)
    total = splits.sum()
    sm = torch.arange(num_sms + 1, device=context_lens.device)
    first = sm * (total // num_sms) + (sm - (num_sms - total % num_sms)).clamp_min(0)
    # right=True skips the sequences without work: it finds the first one that ends beyond the boundary.
    sequence = torch.searchsorted(ends, first, right=True)
    before = torch.cat((ends - splits, total[None]))[sequence]
    return torch.stack((sequence, first - before), dim=1).int()


@without_autocast
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

    q                [B, next_n, H, D] e4m3; its scale belongs in `weights`
    kv_cache         [pages, P, 1, D + 4] uint8, any P: P x D e4m3 and then P fp32 scales per page (`indexer_cache`)
    weights          [B * next_n, H] fp32, may be negative
    context_lens     [B] int32: row i sees the first context_lens[b] - next_n + i + 1 keys, so that the last row sees
                     all of them; or [B, next_n] int32: row i sees the first context_lens[b, i] keys
    block_table      [B, max_pages] int32: key s is at offset s % P of page block_table[b, s // P]. Entries past a
                     row's keys are never looked at
    schedule_meta    [SMs + 1, 2] int32 from `get_paged_mqa_logits_metadata`, or None; the result does not depend on it
    max_context_len  columns of the result; keys beyond them are left out
    clean_logits     True: columns past a row's keys are -inf. False: they are unspecified
    logits_dtype     float32 or bfloat16

    Returns [B * next_n, max_context_len], a view of a wider buffer whose rows start at multiples of 1024 bytes. The
    reference writes -inf in either case of clean_logits; a length of 0 or less gives a row of -inf, and a key whose
    page is not in the table or not in the cache gives -inf. Everything is fp32, rounded to logits_dtype once.
    Raises TypeError or ValueError for other types, dtypes, shapes and strides.
    Source: DeepGEMM's function of this name.
    """
    check_paged_mqa_logits(
        q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits, logits_dtype
    )
    check_memory("q", q)
    batch, next_n = q.shape[:2]
    lengths = context_lens.long()
    if lengths.dim() == 1:
        lengths = lengths[:, None] - next_n + 1 + torch.arange(next_n, device=q.device)
    pages, page_size = kv_cache.shape[:2]
    capacity = min(max_context_len, block_table.shape[1] * page_size)
    lengths = lengths.clamp(0, capacity)
    needed = -(-max_context_len // SPLIT_KV) * SPLIT_KV
    logits = padded_logits(batch * next_n, max_context_len, needed, logits_dtype, q.device)
    for b in range(batch):
        rows = slice(b * next_n, (b + 1) * next_n)
        position = torch.arange(int(lengths[b].max()) if next_n else 0, device=q.device)
        page = block_table[b, position // page_size].long()
        slots = torch.where((page >= 0) & (page < pages), page * page_size + position % page_size, -1)
        k, k_scale = read_indexer_cache(kv_cache, slots)
        scores = index_scores(q[b], k, weights[rows]) * k_scale
        hidden = (position >= lengths[b, :, None]) | (slots < 0)
        logits[rows, : len(position)] = scores.masked_fill(hidden, -torch.inf).to(logits_dtype)
    return logits


def check_metadata(context_lens: torch.Tensor, block_kv: int, num_sms: int) -> None:
    """The checks of `get_paged_mqa_logits_metadata`."""
    _check_context_lens(context_lens)
    check_positive("block_kv", block_kv)
    check_positive("num_sms", num_sms)
    if SPLIT_KV % block_kv:
        raise ValueError(f"block_kv: must be a divisor of {SPLIT_KV}, got {block_kv}")


def check_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool,
    logits_dtype: torch.dtype,
) -> None:
    """The checks of `fp8_paged_mqa_logits`."""
    check_tensor("q", q, (torch.float8_e4m3fn,), ("B", "next_n", "H", "D"))
    batch, next_n, heads, dim = q.shape
    check_cache("kv_cache", kv_cache, dim, "q")
    check_tensor("weights", weights, (torch.float32,), (batch * next_n, heads), "q")
    _check_context_lens(context_lens)
    if tuple(context_lens.shape) not in ((batch,), (batch, next_n)):
        raise ValueError(
            f"context_lens: shape must be [{batch}] or [{batch}, {next_n}], got {list(context_lens.shape)} (sizes as "
            "of q)"
        )
    check_tensor("block_table", block_table, INT32, (batch, "max_pages"), "q")
    if schedule_meta is not None:
        check_tensor("schedule_meta", schedule_meta, INT32, ("SMs + 1", 2))
        if schedule_meta.shape[0] < 2:
            raise ValueError(f"schedule_meta: must have at least 2 rows, got shape {list(schedule_meta.shape)}")
    check_positive("max_context_len", max_context_len)
    check_flag("clean_logits", clean_logits)
    check_dtype("logits_dtype", logits_dtype, LOGITS_DTYPES)
    others = {"weights": weights, "context_lens": context_lens, "block_table": block_table}
    check_same_device(("q", q), kv_cache=kv_cache, schedule_meta=schedule_meta, **others)


def _check_context_lens(context_lens: torch.Tensor) -> None:
    shape = ("B", "next_n") if isinstance(context_lens, torch.Tensor) and context_lens.dim() == 2 else ("B",)
    check_tensor("context_lens", context_lens, INT32, shape)
