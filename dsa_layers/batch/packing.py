"""Index computations for packed sequences. Lengths are Python integers, a few per sequence, which are copied to the
device. The device computes the tensors that have one value per row."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

Numbers = Sequence[int] | Sequence[Sequence[int]]


def starts(lens: Sequence[int]) -> list[int]:
    """Return the row at which each sequence begins."""
    return [0, *accumulate(lens)][: len(lens)]


def to_device(values: Numbers, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the numbers as a tensor on `device`. The copy to a GPU is asynchronous."""
    return on_host(values, dtype, device).to(device, non_blocking=device.type == "cuda")


def write(target: torch.Tensor, values: Numbers) -> None:
    """Write the numbers to the tensor `target`. The copy to a GPU is asynchronous."""
    target.copy_(on_host(values, target.dtype, target.device), non_blocking=target.device.type == "cuda")


def on_host(values: Numbers, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a host tensor of the numbers. For a CUDA device the tensor is in pinned memory, because a copy from
    pageable memory can make the host wait for earlier work. Raise RuntimeError during CUDA graph capture: a replay
    would read this memory again, after its contents have changed."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a pass that reads lengths from the host cannot be captured as a CUDA graph")
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


def offsets(lens: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return int32 [B + 1]: the first row of each of B sequences, then the total number of rows."""
    if len(set(lens)) == 1 and lens[0]:
        return torch.arange(0, sum(lens) + 1, lens[0], dtype=torch.int32, device=device)
    return to_device([0, *accumulate(lens)], torch.int32, device)


def repeated(values: Sequence[int], counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return int32 [sum(counts)]: values[i], repeated counts[i] times, for each i, concatenated."""
    if len(counts) == 1:
        return torch.full((counts[0],), values[0], dtype=torch.int32, device=device)
    of_sequences = to_device(values, torch.int32, device), to_device(counts, torch.int64, device)
    # Without output_size, PyTorch would read the size from the device, which synchronises.
    return torch.repeat_interleave(*of_sequences, output_size=sum(counts))


def ranges(begins: Sequence[int], ends: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return int64 [sum(ends - begins)]: the integers from begins[i] to ends[i] - 1 for each i, concatenated."""
    if len(begins) == 1:
        return torch.arange(begins[0], ends[0], device=device)
    lens = [end - begin for begin, end in zip(begins, ends)]
    before_first = [begin - start for begin, start in zip(begins, starts(lens))]
    return torch.arange(sum(lens), device=device) + repeated(before_first, lens, device)


def packed_rows(indices: torch.Tensor, starts: torch.Tensor, sequences: int) -> torch.Tensor:
    """Convert positions in a sequence to rows among all packed sequences. Return int32 [T, K]: `indices` [T, K] plus
    `starts` [T], the first row of each token's sequence; -1 stays -1. sequences: the number of sequences."""
    if sequences == 1:
        return indices
    return torch.where(indices < 0, indices, indices + starts[:, None])


def positions_of_rows(rows: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return int32 [T, K]: the inverse of `packed_rows`, positions in each token's sequence; -1 stays -1."""
    return torch.where(rows < 0, rows, rows - starts[:, None])


def page_rows(pages: Sequence[Sequence[int]], width: int) -> list[list[int]]:
    """Return [B, width]: the first `width` pages of each sequence, padded with -1."""
    return [[*own[:width], *[-1] * (width - len(own))] for own in pages]


def paged_slots(
    block_table: torch.Tensor, page_size: int, sequences: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Return int64: the cache slot of each position in `positions`, page * page_size + offset, or -1 if the block table
    has -1 for the page or no column for it. sequences: the sequence of each position; broadcasts with `positions`."""
    columns = block_table.shape[1]
    page = torch.div(positions, page_size, rounding_mode="floor")
    found = block_table[sequences.long(), page.clamp(max=columns - 1)].long()
    return torch.where((found < 0) | (page >= columns), -1, found * page_size + positions % page_size)


def selected_slots(
    block_table: torch.Tensor, page_size: int, sequences: torch.Tensor, indices: torch.Tensor
) -> torch.Tensor:
    """Return int32 [T, K]: the slots of the positions `indices` [T, K] in `sequences` [T]; -1 stays -1."""
    slots = paged_slots(block_table, page_size, sequences[:, None], indices.clamp(min=0))
    return torch.where(indices < 0, -1, slots).to(torch.int32)


def positions_of_slots(
    block_table: torch.Tensor, page_size: int, sequences: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Return int32 [T, K]: the positions of `slots` [T, K] in the sequences `sequences` [T]; -1 stays -1. This is the
    inverse of `selected_slots`. Each slot must be in a page of its sequence."""
    pages, order = (x[sequences.long()] for x in block_table.sort(1))
    found = torch.searchsorted(pages, slots.clamp(min=0) // page_size)
    positions = order.gather(1, found) * page_size + slots % page_size
    return torch.where(slots < 0, -1, positions).to(torch.int32)


class GroupRows(NamedTuple):
    """Permutations between two orders of T * G rows, one row per token and group of channels. Token t and group g have
    row t * G + g in token-major order and row g * T + t in group-major order.

    to_groups  int32 [T * G, 1]: for each row in token-major order, its row in group-major order
    to_tokens  int32 [G * T, 1]: for each row in group-major order, its row in token-major order
    ends       int32 [G]: for each group, the row after its last row in group-major order
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
