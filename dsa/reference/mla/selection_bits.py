"""Lists of selected keys as masks with one bit per key, for multi-head attention over selected keys."""

import torch

KEYS, WORDS = 128, 4  # keys per block, and words of 32 bits per block


def selection_bits(indices: torch.Tensor, starts: torch.Tensor | None, max_keys: int) -> torch.Tensor:
    """Bit 2 i + j of bits[t, 4 b + c]: whether query t's list contains the key starts[t] + 128 b + 8 i + 2 c + j.

    0 <= i < 16, 0 <= c < 4 and 0 <= j < 2; starts None stands for zeros. Arguments as in `dsa.selection_bits`.
    """
    blocks = -(-max_keys // KEYS)
    key = indices.long() if starts is None else indices.long() - starts.long()[:, None]
    there = (indices >= 0) & (key >= 0) & (key < max_keys)
    # Invalid indices set an extra column, which is dropped.
    selected = torch.zeros(len(indices), blocks * KEYS + 1, dtype=torch.int64, device=indices.device)
    selected.scatter_(1, key.where(there, blocks * KEYS), 1)
    by_word = (
        selected[:, :-1]
        .reshape(len(indices), blocks, 16, WORDS, 2)
        .transpose(2, 3)
        .reshape(len(indices), blocks * WORDS, 32)
    )
    words = (by_word << torch.arange(32, device=indices.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def selected_keys(bits: torch.Tensor, keys: int) -> torch.Tensor:
    """Invert `selection_bits`: bool [T, keys]. Keys after the last bit are not selected."""
    by_word = bits[..., None].long() >> torch.arange(32, device=bits.device) & 1
    blocks = bits.shape[1] // WORDS
    flags = by_word.view(len(bits), blocks, WORDS, 16, 2).transpose(2, 3).reshape(len(bits), blocks * KEYS) > 0
    return torch.nn.functional.pad(flags, (0, max(keys - flags.shape[1], 0)))[:, :keys]
