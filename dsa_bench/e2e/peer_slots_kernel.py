"""The Triton kernel of `peer_slots.to_slots`."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _kernel(
    indices, table, row_to_seq, out, k, table_stride, PAGE: tl.constexpr, BY_ROW: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + row * k + column, mask=column < k, other=-1)
    sequence = row
    if BY_ROW:
        sequence = tl.load(row_to_seq + row).to(tl.int64)
    page = tl.load(table + sequence * table_stride + index // PAGE, mask=index >= 0, other=0)
    slot = tl.where(index < 0, index, page * PAGE + index % PAGE)
    tl.store(out + row * k + column, slot, mask=column < k)


def launch(
    topk_indices: torch.Tensor, block_table: torch.Tensor, page_size: int, row_to_seq: torch.Tensor | None
) -> torch.Tensor:
    (rows, k), out = topk_indices.shape, torch.empty_like(topk_indices)
    by_row = row_to_seq is not None
    sequences = row_to_seq if by_row else topk_indices  # not read without row_to_seq
    grid = rows, triton.cdiv(k, _BLOCK)
    _kernel[grid](topk_indices, block_table, sequences, out, k, block_table.stride(0), page_size, by_row, _BLOCK)
    return out
