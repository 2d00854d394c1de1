"""Tensors as TMA can read them."""

import torch

from dsa.ops._aligned import rows_at_16_bytes


def tma_rows(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it with rows at multiples of 16 bytes. A row may be in several places (a stride of 0)."""
    same = rows_at_16_bytes(x)
    return x.clone(memory_format=torch.contiguous_format) if same is None else same
