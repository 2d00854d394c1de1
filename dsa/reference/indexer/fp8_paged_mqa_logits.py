"""Scores of the lightning indexer over a paged cache of keys, for decoding, and the plan by which the kernel divides
the keys among SMs."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.cache.indexer_cache import read_indexer_cache
from dsa.reference.indexer.fp8_mqa_logits import padded_logits
from dsa.reference.indexer.index_scores import index_scores

SPLIT_KV = 256
MOST_SPLITS = 2**31 - 1  # upper limit of the splits of all sequences together, because the plan is int32


def get_paged_mqa_logits_metadata(context_lens: torch.Tensor, block_kv: int, num_sms: int) -> torch.Tensor:
    """The plan of `fp8_paged_mqa_logits`: SM i computes the splits from row i of the plan up to row i + 1, exclusive.

    A split is 256 keys of one sequence; a sequence's last split can have fewer. Arguments and result as in
    `dsa.get_paged_mqa_logits_metadata`.
    Source: DeepGEMM's function of this name; for next_n <= 2 the plan equals DeepGEMM's.
    """
    lengths = context_lens.long().clamp_min(0)
    if lengths.dim() == 2:
        lengths = lengths.amax(1)
    splits = ((lengths + SPLIT_KV - 1) // SPLIT_KV).clamp_max(MOST_SPLITS // max(len(lengths), 1))
    ends = splits.cumsum(0)
    total = splits.sum()
    sm = torch.arange(num_sms + 1, device=context_lens.device)
    first = sm * (total // num_sms) + (sm - (num_sms - total % num_sms)).clamp_min(0)
    # right=True skips sequences without keys.
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
    accumulators: torch.dtype = torch.float32,
) -> torch.Tensor:
    """I[b * next_n + i, s] = k_scale[b, s] * sum_h weights[b * next_n + i, h] * relu(q[b, i, h] . k[b, s]).

    k[b, s] is key s of sequence b, in page block_table[b, s // P]. Returns [B * next_n, max_context_len], a view of a
    wider buffer whose rows start at multiples of 1024 bytes. `schedule_meta`, `clean_logits` and `accumulators` have no
    effect: the reference needs no plan, writes -inf past the keys that a query sees, computes in fp32, and rounds to
    `logits_dtype` once. A length of 0 or less gives a row of -inf. A key whose page is outside the table or the cache
    gives -inf. Unlike the kernel, the reference accepts any page size P. Arguments as in `dsa.fp8_paged_mqa_logits`.
    Source: DeepGEMM's function of this name.
    """
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
