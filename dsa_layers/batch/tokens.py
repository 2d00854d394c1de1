"""The tensors and numbers that every batch has, from which `EntryView` and `WindowView` derive their own."""

from typing import Protocol

import torch


class Tokens(Protocol):
    """T new tokens of B sequences, and where their keys are.

    device               where the tensors live
    block_table          int32 [B, max_pages]: physical pages of each sequence, -1 beyond its end; None without a cache
    page_size            tokens a page; 0 without a cache
    query_lens           new tokens of each sequence
    key_lens             rows that each sequence takes where keys are packed: at least its tokens after this pass,
                         cached and new ones. These are numbers on the host, since shapes depend on them
    max_key_len          the largest of key_lens
    least_visible        no new token sees fewer keys, itself included, as far as the host knows
    is_decode            whether every sequence has `next_n` new tokens, one or a few
    next_n               that number; 1 for a batch that is none of decoding
    positions            int64 [T]: each new token's position in its sequence
    sequences            int32 [T]: the sequence of each new token
    visible_keys         int32 [T]: how many keys of its sequence each new token may see, itself included
    key_lens_tensor      int32 [B]: tokens of each sequence after this pass
    earlier_lens_tensor  int32 [B]: tokens of each sequence before the new ones
    cu_query_lens        int32 [B + 1]: where the sequences' new tokens begin among the T
    last_tokens          int64 [B]: the row of each sequence's last token among the T
    state_slots_tensor   int32 [B]: each sequence's row of the tensors that a cache keeps by sequence and not by page
    """

    device: torch.device
    block_table: torch.Tensor | None
    page_size: int
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    max_key_len: int
    least_visible: int
    is_decode: bool
    next_n: int
    positions: torch.Tensor
    sequences: torch.Tensor
    visible_keys: torch.Tensor
    key_lens_tensor: torch.Tensor
    earlier_lens_tensor: torch.Tensor
    cu_query_lens: torch.Tensor
    last_tokens: torch.Tensor
    state_slots_tensor: torch.Tensor
