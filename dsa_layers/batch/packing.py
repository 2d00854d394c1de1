"""Rows of several sequences that are packed one after the other: the row at which a sequence begins, the sequence of a
row, and its place in a cache.

Lengths are numbers on the host, a few per sequence. They are copied to the device without waiting for it, and tensors
with a value per row are made from them there.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

Numbers = Sequence[int] | Sequence[Sequence[int]]


def starts(lens: Sequence[int]) -> list[int]:
    """Return the row at which each sequence begins."""
    return [0, *accumulate(lens)][: len(lens)]


def to_device(values: Numbers, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the numbers as a tensor."""
    return on_host(values, dtype, device).to(device, non_blocking=device.type == "cuda")


def write(target: torch.Tensor, values: Numbers) -> None:
    """Write the numbers to a tensor."""
    target.copy_(on_host(values, target.dtype, target.device), non_blocking=target.device.type == "cuda")


def on_host(values: Numbers, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor to copy to the device. It is in pinned memory, so that neither side waits: a copy from other
    memory returns only after everything that was launched before it. Raises RuntimeError while a CUDA graph is
    captured: its replays would read this memory again, when it has other contents."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a pass that reads lengths from the host cannot be captured as a CUDA graph")
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


def offsets(lens: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return int32 [B + 1]: the row at which each sequence begins, and the number of all rows. Nothing is copied if all
    lengths are equal."""
    if len(set(lens)) == 1 and lens[0]:
        return torch.arange(0, sum(lens) + 1, lens[0], dtype=torch.int32, device=device)
    return to_device([0, *accumulate(lens)], torch.int32, device)


def owners(lens: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return int32 [sum(lens)]: the sequence of each row."""
    return repeated(list(range(len(lens))), lens, device)


def repeated(values: Sequence[int], counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return int32 [sum(counts)]: each sequence's value, once per row."""
    if len(counts) == 1:
        return torch.full((counts[0],), values[0], dtype=torch.int32, device=device)
    of_sequences = to_device(values, torch.int32, device), to_device(counts, torch.int64, device)
    # Without the size PyTorch would ask the device for it.
    return torch.repeat_interleave(*of_sequences, output_size=sum(counts))


def ranges(begins: Sequence[int], ends: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return int64 [sum(ends - begins)]: begins[0] to ends[0] - 1, begins[1] to ends[1] - 1, and so on."""
    if len(begins) == 1:
        return torch.arange(begins[0], ends[0], device=device)
    lens = [end - begin for begin, end in zip(begins, ends)]
    before_first = [begin - start for begin, start in zip(begins, starts(lens))]
    return torch.arange(sum(lens), device=device) + repeated(before_first, lens, device)


def packed_rows(indices: torch.Tensor, starts: torch.Tensor, sequences: int) -> torch.Tensor:
    """Return int32 [T, K]: indices [T, K] in each token's sequence, which begins at row `starts` [T], as rows among
    those of all sequences; -1 stays. A single sequence begins at row 0."""
    if sequences == 1:
        return indices
    return torch.where(indices < 0, indices, indices + starts[:, None])


def positions_of_rows(rows: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return int32 [T, K]: the inverse of `packed_rows`; -1 stays."""
    return torch.where(rows < 0, rows, rows - starts[:, None])


def page_rows(pages: Sequence[Sequence[int]], width: int) -> list[list[int]]:
    """Return [B, width]: the first `width` pages of each sequence, -1 after its last page."""
    return [[*own[:width], *[-1] * (width - len(own))] for own in pages]


def paged_slots(
    block_table: torch.Tensor, page_size: int, sequences: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Return int64: page * page_size + offset of these positions of sequences; -1 where there is no page."""
    page = torch.div(positions, page_size, rounding_mode="floor")
    page = block_table[sequences.long(), page].long()
    return torch.where(page < 0, -1, page * page_size + positions % page_size)


def selected_slots(
    block_table: torch.Tensor, page_size: int, sequences: torch.Tensor, indices: torch.Tensor
) -> torch.Tensor:
    """Return int32 [T, K]: the slots of the positions `indices` [T, K] of the sequences [T]; -1 stays."""
    slots = paged_slots(block_table, page_size, sequences[:, None], indices.clamp(min=0))
    return torch.where(indices < 0, -1, slots).to(torch.int32)


def positions_of_slots(
    block_table: torch.Tensor, page_size: int, sequences: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Return int32 [T, K]: the inverse of `selected_slots`, for slots [T, K] in pages of their sequences [T]."""
    pages, order = (x[sequences.long()] for x in block_table.sort(1))
    found = torch.searchsorted(pages, slots.clamp(min=0) // page_size)
    positions = order.gather(1, found) * page_size + slots % page_size
    return torch.where(slots < 0, -1, positions).to(torch.int32)


class GroupRows(NamedTuple):
    """The rows of T tokens with a row for each of G groups of channels.

    to_groups  int32 [T * G, 1]: where row t * G + g, of token t and group g, is if the rows of each group are together:
               g * T + t
    to_tokens  int32 [G * T, 1]: the inverse
    ends       int32 [G]: where the groups end
    """

    to_groups: torch.Tensor
    to_tokens: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, tokens: int, groups: int, device: torch.device) -> "GroupRows":
        rows = torch.arange(tokens * groups, dtype=torch.int32, device=device)
        to_groups = rows.view(groups, tokens).T.reshape(-1, 1)
        to_tokens = rows.view(tokens, groups).T.reshape(-1, 1)
        return cls(to_groups, to_tokens, torch.arange(1, groups + 1, dtype=torch.int32, device=device) * tokens)
