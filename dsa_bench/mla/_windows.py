"""A prompt for V4's attention: one sequence, whose tokens attend to windows and, in some cases, also to selected
compressed entries."""

from typing import NamedTuple

import torch

import dsa
from dsa_bench.harness.case import bf16, selected_keys

D, WINDOW = 512, 128
SCALE = D**-0.5


class Prompt(NamedTuple):
    """A prompt's arguments for our ops and for FlashMLA.

    packed      (q, kv, cu_q, cu_k, window), the arguments that our ops share
    near        the indices of each token's window, int32 [tokens, WINDOW]
    compressed  the compressed entries; None without selection
    indices     the entries that each token selects; None without selection
    listed      (q, keys, lists, scale), arguments of the same attention for FlashMLA
    pairs       number of (query, key) pairs per head, from which the FLOP follow
    """

    packed: tuple
    near: torch.Tensor
    compressed: torch.Tensor | None
    indices: torch.Tensor | None
    listed: tuple
    pairs: int

    @classmethod
    def of(cls, tokens: int, heads: int, selected: int) -> "Prompt":
        """Make a prompt. Each token attends to its window and to `selected` of the tokens / 4 compressed entries."""
        q, kv, ends = bf16(tokens, heads, D) / 10, bf16(tokens, 1, D) / 10, torch.tensor([0, tokens]).int().cuda()
        near = dsa.window_indices(ends, ends, tokens, WINDOW)
        packed, pairs = (q, kv, ends, ends, WINDOW), tokens * WINDOW - WINDOW * (WINDOW - 1) // 2 + tokens * selected
        if not selected:
            return cls(packed, near, None, None, (q, kv, near[:, None], SCALE), pairs)
        compressed, indices = bf16(tokens // 4, 1, D) / 10, selected_keys(tokens, tokens // 4, selected)
        lists = torch.cat((near, indices + tokens), 1)
        return cls(packed, near, compressed, indices, (q, torch.cat((kv, compressed)), lists[:, None], SCALE), pairs)
