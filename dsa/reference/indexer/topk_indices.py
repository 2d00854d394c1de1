"""Exact selection of the k largest scores of each row. Of equal scores the lowest index is picked, so the result does
not depend on the machine or on other rows."""

import torch

from dsa.reference.autocast import without_autocast

# Scores per sort. The sort's int64 indices need 8 bytes per score.
_CHUNK = 2**24
_MOST_SLOTS = 2**31  # slots that an int32 can index
_NEVER = torch.iinfo(torch.int32).min


def topk_indices(
    scores: torch.Tensor,
    k: int,
    *,
    starts: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    page_size: int | None = None,
    row_to_seq: torch.Tensor | None = None,
    sorted: bool = False,
    return_values: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The k largest of scores[r, starts[r] : starts[r] + lengths[r]] for every row r, as indices that count from
    starts[r] or, with block_table, as cache slots.

    Of equal scores the lowest index is picked; -0.0 equals 0.0. -inf is the lowest score and can be picked; NaN is
    never picked. Arguments and results as in `dsa.topk_indices`; the reference has no `out`.
    """
    options = starts, lengths, block_table, page_size, row_to_seq, sorted, return_values
    indices, values = indices_and_values(scores, k, *options)
    return (indices, values) if return_values else indices


@without_autocast
def indices_and_values(
    scores: torch.Tensor,
    k: int,
    starts: torch.Tensor | None,
    lengths: torch.Tensor | None,
    block_table: torch.Tensor | None,
    page_size: int | None,
    row_to_seq: torch.Tensor | None,
    sorted: bool,
    return_values: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (indices, values) of `topk_indices`; without return_values, values has shape [0, 0]."""
    (rows, cols), device = scores.shape, scores.device
    first = torch.zeros(rows, dtype=torch.long, device=device) if starts is None else starts.long()
    count = cols - first if lengths is None else lengths.long()
    indices = torch.full((rows, k), -1, dtype=torch.long, device=device)
    values = torch.full((rows, k), -torch.inf, dtype=torch.float32, device=device)
    chunk = max(1, _CHUNK // max(1, cols))
    for begin in range(0, rows, chunk):
        part = slice(begin, begin + chunk)
        picked, value = _select(scores[part], k, first[part, None], count[part, None], sorted)
        indices[part, : picked.shape[1]], values[part, : picked.shape[1]] = picked, value
    if block_table is not None:
        indices = _to_slots(indices, block_table, page_size, row_to_seq)
        values = values.masked_fill(indices < 0, -torch.inf)
    return indices.int(), values if return_values else values.new_empty(0, 0)


def _select(
    scores: torch.Tensor, k: int, first: torch.Tensor, count: torch.Tensor, by_value: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (indices, values) [rows, min(k, cols)], where indices count from `first`. They are ordered by falling
    value if by_value is set, else by rising index. In rows with fewer candidates, -1 and -inf follow.

    first, count: [rows, 1], the first candidate column and the number of candidates of each row.
    """
    scores = scores.float()
    column = torch.arange(scores.shape[1], device=scores.device)
    exists = (column >= first) & (column < first + count) & ~scores.isnan()
    # The int32 numbers `key` have the order of the scores. Columns that are no candidates get the lowest int32, below
    # that of -inf. Adding 0.0 turns -0.0 into 0.0.
    bits = (scores + 0.0).view(torch.int32)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).masked_fill(~exists, _NEVER)
    key, order = key.sort(dim=1, descending=True, stable=True)
    key, order = key[:, :k], order[:, :k]
    if not by_value:
        end = scores.shape[1]
        order = order.masked_fill(key == _NEVER, end)
        order, position = order.sort(dim=1)
        key = key.gather(1, position)
    picked = key != _NEVER
    value = scores.gather(1, order.masked_fill(~picked, 0)).masked_fill(~picked, -torch.inf)
    return (order - first).masked_fill(~picked, -1), value


def _to_slots(
    indices: torch.Tensor, block_table: torch.Tensor, page_size: int, row_to_seq: torch.Tensor | None
) -> torch.Tensor:
    sequences, max_pages = block_table.shape
    rows = torch.arange(indices.shape[0], device=indices.device) if row_to_seq is None else row_to_seq.long()
    sequence, page = rows[:, None].expand_as(indices), indices.clamp_min(0) // page_size
    known = (indices >= 0) & (sequence >= 0) & (sequence < sequences) & (page < max_pages)
    slots = torch.full_like(indices, -1)
    physical = block_table[sequence[known], page[known]].long()
    slot = physical * page_size + indices[known] % page_size
    slots[known] = torch.where((physical >= 0) & (slot < _MOST_SLOTS), slot, -1)
    return slots
