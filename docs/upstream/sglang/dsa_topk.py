"""Addition to sglang/srt/layers/attention/dsa/dsa_topk_backend.py: `DSATopKBackend.DSA`."""

from typing import Any

import torch


def topk_func(
    score: torch.Tensor, lengths: torch.Tensor, topk: int, row_starts: torch.Tensor | None = None
) -> torch.Tensor:
    """Positions in the sequence, int32 [rows, topk], -1 for no key; equal in every run and on every rank."""
    import dsa

    return dsa.topk_indices(score, topk, starts=row_starts, lengths=lengths)


def topk_transform_paged(
    score: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    attn_metadata: Any,
    row_starts: torch.Tensor | None = None,
    batch_idx_list: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cache slots, selected and looked up in one kernel."""
    import dsa

    return dsa.topk_indices(
        score,
        topk,
        starts=row_starts,
        lengths=lengths,
        block_table=attn_metadata.real_page_table,
        page_size=attn_metadata.page_size,
        row_to_seq=attn_metadata.token_to_batch_idx if batch_idx_list is None else batch_idx_list,
    )
