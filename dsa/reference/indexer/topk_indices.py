"""Exact top-k selection of index scores, with a tie order that never depends on the machine or the batch."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.checks import INT32, check_flag, check_memory, check_positive, check_same_device, check_tensor

# Scores sorted at a time: the sort's int64 indices take 8 bytes each.
_CHUNK = 2**24
_NEVER = torch.iinfo(torch.int32).min
# The first slot that int32 cannot hold.
_SLOT_LIMIT = 2**31


@without_autocast
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
    """The k largest of scores[r, starts[r] : starts[r] + lengths[r]] for every row r.

    scores         [rows, cols] fp32 or bf16
    k              how many to pick, at least 1, possibly above cols
    starts         [rows] int32, the row's first column; 0 if None
    lengths        [rows] int32, candidates of the row; cols - starts if None. Columns outside [0, cols) do not exist
    block_table    [B, max_pages] int32, turns an index into a cache slot: block_table[b, index // page_size] *
                   page_size + index % page_size, b = row_to_seq[r]
    page_size      tokens per page, given with block_table
    row_to_seq     [rows] int32, the row's sequence; row r belongs to sequence r if None
    sorted         True: by value, largest first, ties by index. False: by index, smallest first
    return_values  True: also return the picked scores

    Returns indices [rows, k] int32, and values [rows, k] fp32 if asked. An index is relative to the row's start: 0 is
    column starts[r]. That is what vLLM's and SGLang's prefill top-k give for ragged rows; add starts[r] for the column.
    Rows with fewer than k candidates end in -1, and values are -inf where the index is -1. Of equal scores the lowest
    index is picked; -0.0 equals 0.0; -inf is a score like any other, the lowest; NaN is never picked, so a row may
    have less than k indices on its account. With block_table, an index whose page is negative or outside the
    table, whose slot is 2^31 or more, or whose row_to_seq names no sequence, becomes -1 in its place: the order is
    still that of the indices.
    Raises TypeError or ValueError for other types, dtypes and shapes.
    """
    check_topk(scores, k, starts, lengths, block_table, page_size, row_to_seq, sorted, return_values)
    check_memory("scores", scores)
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
    return (indices.int(), values) if return_values else indices.int()


def check_topk(
    scores: torch.Tensor,
    k: int,
    starts: torch.Tensor | None,
    lengths: torch.Tensor | None,
    block_table: torch.Tensor | None,
    page_size: int | None,
    row_to_seq: torch.Tensor | None,
    by_value: bool,
    return_values: bool,
) -> None:
    """Raises what `topk_indices` raises."""
    check_tensor("scores", scores, (torch.float32, torch.bfloat16), ("rows", "cols"))
    check_positive("k", k)
    rows = scores.shape[0]
    if starts is not None:
        check_tensor("starts", starts, INT32, (rows,), "scores")
    if lengths is not None:
        check_tensor("lengths", lengths, INT32, (rows,), "scores")
    check_flag("sorted", by_value)
    check_flag("return_values", return_values)
    _check_paging(rows, block_table, page_size, row_to_seq)
    others = {"starts": starts, "lengths": lengths, "block_table": block_table, "row_to_seq": row_to_seq}
    check_same_device(("scores", scores), **others)


def _select(
    scores: torch.Tensor, k: int, first: torch.Tensor, count: torch.Tensor, by_value: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices, values) [rows, min(k, cols)], -1 and -inf where a row has no more candidates."""
    scores = scores.float()
    column = torch.arange(scores.shape[1], device=scores.device)
    exists = (column >= first) & (column < first + count) & ~scores.isnan()
    # Integers in the order of the floats leave room for "no candidate" below -inf. Adding 0.0 turns -0.0 into 0.0.
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
    slots[known] = torch.where((physical >= 0) & (slot < _SLOT_LIMIT), slot, -1)
    return slots


def _check_paging(
    rows: int, block_table: torch.Tensor | None, page_size: int | None, row_to_seq: torch.Tensor | None
) -> None:
    if block_table is None:
        for name, value in (("page_size", page_size), ("row_to_seq", row_to_seq)):
            if value is not None:
                raise ValueError(f"{name}: must be None without block_table, got {type(value).__name__}")
        return
    check_tensor("block_table", block_table, INT32, ("B", "max_pages"))
    if page_size is None:
        raise ValueError("page_size: must be given with block_table, got None")
    check_positive("page_size", page_size)
    if row_to_seq is not None:
        check_tensor("row_to_seq", row_to_seq, INT32, (rows,), "scores")
    elif block_table.shape[0] < rows:
        raise ValueError(
            f"block_table: must have a row for each of the {rows} rows of scores unless row_to_seq is given, "
            f"got {list(block_table.shape)}"
        )
