"""Rows of several sequences packed one after the other: at which row a sequence begins, which sequence a row belongs
to, and where in a cache a row is.

Lengths are numbers on the host, a few of each sequence. They are copied to the device without waiting for it, and
tensors of a row each are made of them there.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

Numbers = Sequence[int] | Sequence[Sequence[int]]


def starts(lens: Sequence[int]) -> list[int]:
    """The row at which each sequence begins."""
    return [0, *accumulate(lens)][: len(lens)]


def to_device(values: Numbers, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The numbers as a tensor."""
    return on_host(values, dtype, device).to(device, non_blocking=device.type == "cuda")


def write(target: torch.Tensor, values: Numbers) -> None:
    """The numbers into a tensor."""
    target.copy_(on_host(values, target.dtype, target.device), non_blocking=target.device.type == "cuda")


def on_host(values: Numbers, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """For a copy to the device: from pinned memory, so that neither side waits. A copy from other memory would end only
    when everything that was launched before it has. RuntimeError while a CUDA graph is captured, which would read the
    memory again when others have it."""
    _check_no_capture(device)
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


def _check_no_capture(device: torch.device) -> None:
    """RuntimeError while a CUDA graph is captured, whose replays would have the lengths of today."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a pass that reads lengths from the host cannot be captured as a CUDA graph")


def lengths(lens: Sequence[int], device: torch.device) -> torch.Tensor:
    """int32 [B]: the sequences' lengths. If these are all the same nothing is copied."""
    _check_no_capture(device)
    if len(set(lens)) == 1:
        return torch.full((len(lens),), lens[0], dtype=torch.int32, device=device)
    return to_device(lens, torch.int32, device)


def offsets(lens: Sequence[int], device: torch.device) -> torch.Tensor:
    """int32 [B + 1]: the row at which each sequence begins, and the number of all rows. Of lengths that are all the
    same nothing is copied."""
    if len(set(lens)) == 1 and lens[0]:
        return torch.arange(0, sum(lens) + 1, lens[0], dtype=torch.int32, device=device)
    return to_device([0, *accumulate(lens)], torch.int32, device)


def owners(lens: Sequence[int], device: torch.device) -> torch.Tensor:
    """int32 [sum(lens)]: the sequence of each row."""
    if len(lens) == 1:
        return torch.zeros(lens[0], dtype=torch.int32, device=device)
    # Without the size PyTorch would ask the device for it.
    return torch.repeat_interleave(to_device(lens, torch.int32, device), output_size=sum(lens))


def repeated(values: Sequence[int], counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """int32 [sum(counts)]: each sequence's value, once for each of its rows."""
    if len(counts) == 1:
        return torch.full((counts[0],), values[0], dtype=torch.int32, device=device)
    of_sequences = to_device(values, torch.int32, device), to_device(counts, torch.int64, device)
    return torch.repeat_interleave(*of_sequences, output_size=sum(counts))


def ranges(begins: Sequence[int], ends: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 [sum(ends - begins)]: begins[0] to ends[0] - 1, begins[1] to ends[1] - 1, and so on."""
    if len(begins) == 1:
        return torch.arange(begins[0], ends[0], device=device)
    lens = [end - begin for begin, end in zip(begins, ends)]
    before_first = [begin - start for begin, start in zip(begins, starts(lens))]
    return torch.arange(sum(lens), device=device) + repeated(before_first, lens, device)


def packed_rows(indices: torch.Tensor, starts: torch.Tensor, sequences: int) -> torch.Tensor:
    """int32 [T, K]: indices [T, K], counted from the row `starts` [T] at which each token's sequence begins, as rows
    among those of all sequences; -1 stays. The only sequence begins in row 0."""
    if sequences == 1:
        return indices
    return torch.where(indices < 0, indices, indices + starts[:, None])


def positions_of_rows(rows: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """int32 [T, K]: the inverse of `packed_rows`; -1 stays."""
    return torch.where(rows < 0, rows, rows - starts[:, None])


def page_rows(pages: Sequence[Sequence[int]], width: int) -> list[list[int]]:
    """[B, width]: the first `width` pages of each sequence, -1 beyond its last."""
    return [[*own[:width], *[-1] * (width - len(own))] for own in pages]


def paged_slots(
    block_table: torch.Tensor, page_size: int, sequences: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """int64: page * page_size + offset of rows in a cache, by sequence and position; -1 where there is no page."""
    page = torch.div(positions, page_size, rounding_mode="floor")
    page = block_table[sequences.long(), page].long()
    return torch.where(page < 0, -1, page * page_size + positions % page_size)


def selected_slots(
    block_table: torch.Tensor, page_size: int, sequences: torch.Tensor, indices: torch.Tensor
) -> torch.Tensor:
    """int32 [T, K]: the slots of the positions `indices` [T, K] of the sequences [T]; -1 stays."""
    slots = paged_slots(block_table, page_size, sequences[:, None], indices.clamp(min=0))
    return torch.where(indices < 0, -1, slots).to(torch.int32)


def positions_of_slots(
    block_table: torch.Tensor, page_size: int, sequences: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """int32 [T, K]: the inverse of `selected_slots`, for slots [T, K] in pages of their sequences [T]; -1 stays."""
    pages, order = (x[sequences.long()] for x in block_table.sort(1))
    found = torch.searchsorted(pages, slots.clamp(min=0) // page_size)
    positions = order.gather(1, found) * page_size + slots % page_size
    return torch.where(slots < 0, -1, positions).to(torch.int32)
