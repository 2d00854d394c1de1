"""One new token of each of several sequences, whose lengths only the device knows."""

from dataclasses import dataclass
from functools import cached_property

import torch

from dsa_layers.batch.token_batch import TokenBatch


@dataclass(frozen=True)
class DecodeBatch(TokenBatch):
    """One new token of each of B sequences, whose earlier tokens are all in a cache.

    block_table      int32 [B, max_pages]: physical pages of each sequence, -1 beyond its end
    page_size        tokens a page
    key_lens_tensor  int32 [B]: tokens of each sequence after this pass, the new one included
    max_key_len      an upper bound of these lengths
    state_slots      int32 [B]: each sequence's row of the tensors that a cache keeps by sequence and not by page; None
                     where the cache keeps nothing so

    What a layer computes from a batch depends on the host's numbers B, max_pages and max_key_len alone. A CUDA graph
    that has captured a pass, the making of its batch included, therefore holds for any lengths up to max_key_len that
    are written into the same tensors.
    """

    block_table: torch.Tensor
    page_size: int
    key_lens_tensor: torch.Tensor
    max_key_len: int
    state_slots: torch.Tensor | None = None

    is_decode = True
    least_visible = 1

    @property
    def query_lens(self) -> tuple[int, ...]:
        return (1,) * len(self.key_lens_tensor)

    @property
    def key_lens(self) -> tuple[int, ...]:
        return (self.max_key_len,) * len(self.key_lens_tensor)

    @property
    def device(self) -> torch.device:
        return self.key_lens_tensor.device

    @property
    def state_slots_tensor(self) -> torch.Tensor:
        if self.state_slots is None:
            raise ValueError("state_slots: must be one a sequence for this model's cache, got None")
        return self.state_slots

    @property
    def visible_keys(self) -> torch.Tensor:
        return self.key_lens_tensor

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
