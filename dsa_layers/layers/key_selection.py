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
    """Selects among keys that are packed in rows.

    q         [T, heads, dim], float or e4m3; weights fp32 [T, heads]: of the tokens
    keys      float [N, dim]; where q is e4m3, e4m3 [N, dim] and fp32 scales [N]
    starts    int32 [T]: the first row that each token sees; lengths int32 [T]: how many it sees
    paging    block_table, page_size and row_to_seq as `dsa.topk_indices` takes them: gives slots, not positions

    Returns int32 [T, top_k]: the selected positions, counted from `starts`, ascending, then -1.
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
    """Selects for one new token of each sequence among keys in pages of FP8 bytes, where they are.

    lengths int32 [B]: keys of the sequences; most: an upper bound of them; schedule: the plan of
    `dsa.fp8_paged_mqa_logits` for these lengths. With page_size, the keys of a page, the result has slots in the cache
    in place of positions. Returns as `select_packed`.
    """
    scores = dsa.fp8_paged_mqa_logits(q[:, None], pages, weights, lengths, block_table, schedule, most)
    paging = {} if page_size is None else {"block_table": block_table, "page_size": page_size}
    return dsa.topk_indices(scores, top_k, lengths=lengths, **paging)
