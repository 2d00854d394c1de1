"""Convert the positions of selected keys to slots in pages with one Triton kernel, as engines do with a library's
top-k indices."""

import torch


def to_slots(
    topk_indices: torch.Tensor,
    block_table: torch.Tensor | None = None,
    page_size: int | None = None,
    row_to_seq: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convert positions to slots, page * page_size + offset.

    topk_indices: int32 [T, k], contiguous: positions in the row's sequence, or -1, which remains -1. block_table: int32
    [B, pages]; if None, the positions are returned. row_to_seq: int32 [T]; None if row t belongs to sequence t.
    """
    if block_table is None:
        return topk_indices
    if topk_indices.is_cuda:
        # Only PyTorch's builds for a GPU include Triton.
        from dsa_bench.e2e.peer_slots_kernel import launch

        return launch(topk_indices, block_table, page_size, row_to_seq)
    table = block_table if row_to_seq is None else block_table[row_to_seq.long()]
    pages = table.gather(1, (topk_indices // page_size).clamp(0).long())
    return torch.where(topk_indices < 0, topk_indices, pages * page_size + topk_indices % page_size)
