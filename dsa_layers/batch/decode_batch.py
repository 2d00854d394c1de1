"""A few new tokens of each of several sequences, whose lengths only the device knows."""

from dataclasses import dataclass
from functools import cached_property

import torch

from dsa.runtime.checks import INT32, INT_MAX, check_tensor
from dsa_layers.arguments import integer
from dsa_layers.batch.checks import check_of_sequences
from dsa_layers.batch.decode_layout import DecodeLayout
from dsa_layers.batch.group_rows import GroupRows
from dsa_layers.batch.token_batch import TokenBatch


@dataclass(frozen=True)
class DecodeBatch(TokenBatch):
    """The last `next_n` tokens of each of B sequences, whose earlier tokens are all in a cache: of these next_n the
    first was chosen, and drafts are behind it.

    block_table      int32 [B, max_pages]: physical pages of each sequence, -1 beyond its end
    page_size        tokens a page
    key_lens_tensor  int32 [B]: tokens of each sequence after this pass, the new ones included, at least next_n. A row
                     that pads the batch has 0, and -1 in all columns of block_table: not where a cache keeps anything
                     by sequence, since such a row would write to its state slot
    max_key_len      an upper bound of these lengths
    state_slots      int32 [B]: each sequence's row of the tensors that a cache keeps by sequence and not by page; None
                     where the cache keeps nothing so
    next_n           tokens of each sequence. A cache that keeps windows by sequence has room for at most
                     dsa_layers.cache.drafts.DRAFTS + 1, and its layers raise ValueError for more
    layout           what follows from B and next_n alone, where the caller keeps it from pass to pass; else None

    What a layer computes from a batch depends on the host's numbers B, next_n, max_pages and max_key_len alone. A CUDA
    graph that has captured a pass, the making of its batch included, therefore holds for any lengths up to max_key_len
    that are written into the same tensors.
    Raises TypeError or ValueError that names the argument. What the tensors hold is not looked at.
    """

    block_table: torch.Tensor
    page_size: int
    key_lens_tensor: torch.Tensor
    max_key_len: int
    state_slots: torch.Tensor | None = None
    next_n: int = 1
    layout: DecodeLayout | None = None

    is_decode = True
    least_visible = 1

    def __post_init__(self) -> None:
        lens = self.key_lens_tensor
        check_tensor("key_lens_tensor", lens, INT32, ("B",))
        count, source = len(lens), "key_lens_tensor"
        check_of_sequences("block_table", self.block_table, count, lens.device, source, "max_pages")
        if self.state_slots is not None:
            check_of_sequences("state_slots", self.state_slots, count, lens.device, source)
        integer("page_size", self.page_size, at_least=1)
        next_n = integer("next_n", self.next_n, at_least=1)
        integer("max_key_len", self.max_key_len, at_least=next_n, at_most=INT_MAX)
        layout = self.layout
        if layout is not None and (layout.count, layout.next_n) != (count, next_n):
            raise ValueError(
                f"layout: must be of {count} sequences with next_n={next_n}, as the batch is, got {layout.count} with "
                f"{layout.next_n}"
            )

    @property
    def query_lens(self) -> tuple[int, ...]:
        return (self.next_n,) * len(self.key_lens_tensor)

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

    @cached_property
    def visible_keys(self) -> torch.Tensor:
        if self.next_n == 1:
            return self.key_lens_tensor
        behind = torch.arange(1 - self.next_n, 1, dtype=torch.int32, device=self.device)
        return (self.key_lens_tensor[:, None] + behind).flatten()

    @cached_property
    def positions(self) -> torch.Tensor:
        positions = torch.empty(len(self.visible_keys), dtype=torch.int64, device=self.device)
        return torch.sub(self.visible_keys, 1, out=positions)  # one kernel, where .long() - 1 is two

    @cached_property
    def earlier_lens_tensor(self) -> torch.Tensor:
        return self.key_lens_tensor - self.next_n

    @property
    def sequences(self) -> torch.Tensor:
        return self._layout.sequences

    @property
    def cu_query_lens(self) -> torch.Tensor:
        return self._layout.cu_query_lens

    @property
    def last_tokens(self) -> torch.Tensor:
        return self._layout.last_tokens

    def group_rows(self, groups: int, tokens: int) -> GroupRows:
        return self._layout.group_rows(groups, tokens)

    @cached_property
    def _layout(self) -> DecodeLayout:
        if self.layout is not None:
            return self.layout
        return DecodeLayout(len(self.key_lens_tensor), self.next_n, self.device)
