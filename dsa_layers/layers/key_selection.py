"""Index scores, and the keys that each token selects by them: for keys packed in a row, and for keys in FP8 pages.

The keys are tokens, or in DeepSeek-V4 compressed entries. I[t, s] = sum_h weights[t, h] relu(q[t, h] . k[s]).
"""

import torch

import dsa

Keys = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def select_packed(
    q: torch.Tensor,
    keys: Keys,
    weights: torch.Tensor,
    top_k: int,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    **paging: torch.Tensor | int,
) -> torch.Tensor:
    """int32 [T, top_k]: which of the `lengths` keys from `starts` on each token selects, ascending, then -1.

    q, weights: of the tokens. keys: float [N, dim], or e4m3 [N, dim] and fp32 scales [N] where q is e4m3. paging: as
    `dsa.topk_indices` takes it, for slots in a cache in place of positions.
    """
    if isinstance(keys, tuple):
        scores = dsa.fp8_mqa_logits(q, keys, weights, starts, starts + lengths, clean_logits=False)
    else:
        scores = dsa.mqa_logits(q.float(), keys.float(), weights, starts, starts + lengths)
    return dsa.topk_indices(scores, top_k, starts=starts, lengths=lengths, **paging)


def select_paged(
    q: torch.Tensor,
    pages: torch.Tensor,
    weights: torch.Tensor,
    top_k: int,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    schedule: torch.Tensor,
    most: int,
    page_size: int | None = None,
) -> torch.Tensor:
    """The same for one new token of each sequence, whose keys stay in pages of FP8 bytes. lengths: of the sequences;
    most: none is longer; schedule: the plan of `dsa.fp8_paged_mqa_logits` for these lengths. With a page_size, in keys,
    slots in place of positions."""
    scores = dsa.fp8_paged_mqa_logits(q[:, None], pages, weights, lengths, block_table, schedule, most)
    paging = {} if page_size is None else {"block_table": block_table, "page_size": page_size}
    return dsa.topk_indices(scores, top_k, lengths=lengths, **paging)
