"""Scores of the lightning indexer over a paged key cache, for decoding, and the plan that spreads them over SMs."""

import torch

from dsa.ops.cache._specs import BYTES, check_index_cache
from dsa.reference.autocast import without_autocast
from dsa.reference.cache.indexer_cache import read_indexer_cache
from dsa.reference.indexer.fp8_mqa_logits import ACCUMULATORS, LOGITS_DTYPES, padded_logits
from dsa.reference.indexer.index_scores import index_scores
from dsa.runtime.arguments import ALIGNED, CONTIGUOUS, F32, INNER, PAGES, Arguments, Dtype, Flag, Int, Tensor
from dsa.runtime.checks import E4M3, INT32, check_memory

SPLIT_KV = 256
MOST_SPLITS = 2**31 - 1  # of all sequences


def _check_page_size(block_kv: int) -> None:
    if SPLIT_KV % block_kv:
        raise ValueError(f"block_kv: must be a divisor of {SPLIT_KV}, got {block_kv}")


def _check_plan(name: str, plan: torch.Tensor) -> None:
    if plan.shape[0] < 2:
        raise ValueError(f"{name}: must have at least 2 rows, got shape {list(plan.shape)}")


GET_PAGED_MQA_LOGITS_METADATA = Arguments(
    rule=_check_page_size, context_lens=Tensor("B | B next_n", INT32), block_kv=Int(), num_sms=Int()
)
FP8_PAGED_MQA_LOGITS = Arguments(
    q=Tensor("B next_n H D", E4M3, layout=ALIGNED),
    kv_cache=Tensor("pages P 1 D+4", BYTES, rule=check_index_cache, layout=PAGES),
    weights=Tensor("B*next_n H", F32, layout=INNER),
    context_lens=Tensor("B | B next_n", INT32),
    block_table=Tensor("B max_pages", INT32, layout=INNER),
    schedule_meta=Tensor("SMs+1 2", INT32, optional=True, layout=CONTIGUOUS, rule=_check_plan),
    max_context_len=Int(),
    clean_logits=Flag(),
    logits_dtype=Dtype(LOGITS_DTYPES),
    accumulators=Dtype(ACCUMULATORS),
)


def get_paged_mqa_logits_metadata(context_lens: torch.Tensor, block_kv: int, num_sms: int) -> torch.Tensor:
    """The plan of `fp8_paged_mqa_logits`: SM i works from boundary i up to, not including, boundary i + 1.

    Arguments and result as of `dsa.get_paged_mqa_logits_metadata`.
    Source: DeepGEMM's function of this name, whose plan for next_n <= 2 this is.
    """
    GET_PAGED_MQA_LOGITS_METADATA.check(context_lens, block_kv, num_sms)
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
    accumulators: torch.dtype = torch.float32,
) -> torch.Tensor:
    """I[b * next_n + i, s] = k_scale[b, s] * sum_h weights[b * next_n + i, h] * relu(q[b, i, h] . k[b, s]).

    Returns [B * next_n, max_context_len], a view of a wider buffer whose rows start at multiples of 1024 bytes. The
    reference writes -inf in either case of clean_logits; a length of 0 or less gives a row of -inf, and a key whose
    page is not in the table or not in the cache gives -inf. Everything is fp32 whatever the accumulators, rounded to
    logits_dtype once. Any page size. Arguments as of `dsa.fp8_paged_mqa_logits`.
    Source: DeepGEMM's function of this name.
    """
    options = max_context_len, clean_logits, logits_dtype, accumulators
    FP8_PAGED_MQA_LOGITS.check(q, kv_cache, weights, context_lens, block_table, schedule_meta, *options)
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
