"""A selection's places in pages, as engines turn a library's indices into slots: one kernel, in Triton as theirs."""

import torch


def to_slots(
    topk_indices: torch.Tensor,
    block_table: torch.Tensor | None = None,
    page_size: int | None = None,
    row_to_seq: torch.Tensor | None = None,
) -> torch.Tensor:
    """topk_indices int32 [T, k], contiguous, positions in a row's sequence or -1 -> slots, page * page_size + offset.
    block_table: int32 [B, pages], without which they stay as they are. row_to_seq: int32 [T]; None where row t is
    sequence t's."""
    if block_table is None:
        return topk_indices
    if topk_indices.is_cuda:
        # Triton comes with PyTorch's builds for a GPU alone.
        from dsa_bench.e2e.peer_slots_kernel import launch

        return launch(topk_indices, block_table, page_size, row_to_seq)
    table = block_table if row_to_seq is None else block_table[row_to_seq.long()]
    pages = table.gather(1, (topk_indices // page_size).clamp(0).long())
    return torch.where(topk_indices < 0, topk_indices, pages * page_size + topk_indices % page_size)
