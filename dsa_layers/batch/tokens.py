"""What views of a pass's tokens ask of the batch that they are of."""

from typing import Protocol

import torch


class Tokens(Protocol):
    """T new tokens of B sequences, and where their keys are.

    device               where the tensors live
    block_table          int32 [B, max_pages]: physical pages of each sequence, -1 beyond its end; None without a cache
    page_size            tokens a page; 0 without a cache
    query_lens           new tokens of each sequence
    key_lens             rows that each sequence's tokens take where keys are packed, cached ones and new ones: as many
                         as there are after this pass, or more. These lengths are host numbers, as shapes must be
    max_key_len          the most of these
    is_decode            whether every sequence has one new token
    positions            int64 [T]: each new token's position in its sequence
    sequences            int32 [T]: the sequence of each new token
    key_lens_tensor      int32 [B]: tokens of each sequence after this pass
    earlier_lens_tensor  int32 [B]: tokens of each sequence before the new ones
    cu_query_lens        int32 [B + 1]: where the sequences' new tokens begin among the T
    last_tokens          int64 [B]: the row of each sequence's last token among the T
    state_slots_tensor   int32 [B]: the number of each sequence's part of what a cache keeps by sequence, not by page
    """

    device: torch.device
    block_table: torch.Tensor | None
    page_size: int
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    max_key_len: int
    is_decode: bool
    positions: torch.Tensor
    sequences: torch.Tensor
    key_lens_tensor: torch.Tensor
    earlier_lens_tensor: torch.Tensor
    cu_query_lens: torch.Tensor
    last_tokens: torch.Tensor
    state_slots_tensor: torch.Tensor
