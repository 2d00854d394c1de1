"""Rows of several sequences packed one after the other: at which row a sequence begins, which sequence a row belongs
to, and where in a cache a row is.

Lengths are numbers on the host. Tensors that follow from them are made on the host and copied to the device whole, so
that nothing waits for the device.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch


def starts(lens: Sequence[int]) -> list[int]:
    """The row at which each sequence begins."""
    return [0, *accumulate(lens)][: len(lens)]


def offsets(lens: Sequence[int], device: torch.device) -> torch.Tensor:
    """int32 [B + 1]: the row at which each sequence begins, and the number of all rows."""
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int64, device="cpu").to(device, torch.int32)


def owners(lens: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 [sum(lens)]: the sequence of each row."""
    return torch.repeat_interleave(torch.tensor(lens, dtype=torch.int64, device="cpu")).to(device)


def repeated(values: Sequence[int], counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """int32 [sum(counts)]: each sequence's value, once for each of its rows."""
    of_sequences = (torch.tensor(numbers, dtype=torch.int64, device="cpu") for numbers in (values, counts))
    return torch.repeat_interleave(*of_sequences).to(device, torch.int32)


def ranges(begins: Sequence[int], ends: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 [sum(ends - begins)]: begins[0] to ends[0] - 1, begins[1] to ends[1] - 1, and so on."""
    spans = [torch.arange(begin, end, device="cpu") for begin, end in zip(begins, ends)]
    return (torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64, device="cpu")).to(device)


def page_table(pages: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    """int32 [B, width] on the host: the first `width` pages of each sequence, -1 beyond its last."""
    rows = [[*own[:width], *[-1] * (width - len(own))] for own in pages]
    return torch.tensor(rows, dtype=torch.int32, device="cpu").reshape(len(rows), width)


def paged_slots(
    block_table: torch.Tensor, page_size: int, sequences: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """int64: page * page_size + offset of rows in a cache, by sequence and position; -1 where there is no page."""
    page = torch.div(positions, page_size, rounding_mode="floor")
    page = block_table[sequences.long(), page].long()
    return torch.where(page < 0, -1, page * page_size + positions % page_size)
