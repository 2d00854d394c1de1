"""One new token of each of several sequences, whose lengths only the device knows."""

from dataclasses import dataclass
from functools import cached_property

import torch

from dsa_layers.batch.token_batch import TokenBatch


@dataclass(frozen=True)
class DecodeBatch(TokenBatch):
    """The last tokens of B sequences, of which all earlier ones are in a cache.

    block_table         int32 [B, max_pages]: physical pages of each sequence, -1 beyond its end
    page_size           tokens a page
    key_lens_tensor     int32 [B]: tokens of each sequence after this pass
    state_slots_tensor  int32 [B]: the number of each sequence's part of what a cache keeps by sequence, not by page
    max_key_len         no sequence has more tokens than that

    Nothing a layer computes from it depends on host numbers but B, max_pages and max_key_len: a pass that a CUDA graph
    has captured holds for any lengths up to it, written into the same tensors.
    """

    block_table: torch.Tensor
    page_size: int
    key_lens_tensor: torch.Tensor
    state_slots_tensor: torch.Tensor
    max_key_len: int

    is_decode = True

    @property
    def query_lens(self) -> tuple[int, ...]:
        return (1,) * len(self.key_lens_tensor)

    @property
    def key_lens(self) -> tuple[int, ...]:
        return (self.max_key_len,) * len(self.key_lens_tensor)

    @property
    def device(self) -> torch.device:
        return self.key_lens_tensor.device

    @cached_property
    def positions(self) -> torch.Tensor:
        return self.key_lens_tensor.long() - 1

    @cached_property
    def earlier_lens_tensor(self) -> torch.Tensor:
        return self.key_lens_tensor - 1

    @cached_property
    def sequences(self) -> torch.Tensor:
        return torch.arange(len(self.key_lens_tensor), dtype=torch.int32, device=self.device)

    @cached_property
    def cu_query_lens(self) -> torch.Tensor:
        return torch.arange(len(self.key_lens_tensor) + 1, dtype=torch.int32, device=self.device)

    @cached_property
    def last_tokens(self) -> torch.Tensor:
        return self.sequences.long()
