"""Exact, deterministic top-k selection."""

import functools

import torch

from dsa.kernels.indexer.limits import MAX_COLS, MAX_K
from dsa.reference.indexer import topk_indices as reference
from dsa.runtime import backends
from dsa.runtime.declare import (
    INNER,
    INT32,
    Arguments,
    Flag,
    Int,
    Tensor,
    at_most,
    check_apart,
    dtype_name,
    op,
    unit_inner,
)

__all__ = ["topk_indices"]


def check_paging(
    scores: torch.Tensor, block_table: torch.Tensor | None, page_size: int | None, row_to_seq: torch.Tensor | None
) -> None:
    """Raise ValueError for a wrong combination of block_table, page_size and row_to_seq. scores: any tensor with a row
    per selection."""
    rows = scores.shape[0]
    if block_table is None:
        for name, value in (("page_size", page_size), ("row_to_seq", row_to_seq)):
            if value is not None:
                raise ValueError(f"{name}: must be None without block_table, got {type(value).__name__}")
    elif page_size is None:
        raise ValueError("page_size: must be given with block_table, got None")
    elif row_to_seq is None and block_table.shape[0] < rows:
        raise ValueError(
            f"block_table: must have a row for each of the {rows} rows of scores unless row_to_seq is given, "
            f"got {list(block_table.shape)}"
        )


TOPK_INDICES = Arguments(
    rule=check_paging,
    scores=Tensor("rows cols", (torch.float32, torch.bfloat16), layout=INNER),
    k=Int(),
    starts=Tensor("rows", INT32, optional=True),
    lengths=Tensor("rows", INT32, optional=True),
    block_table=Tensor("B max_pages", INT32, optional=True, layout=INNER),
    page_size=Int(optional=True),
    row_to_seq=Tensor("rows", INT32, optional=True),
    sorted=Flag(),
    return_values=Flag(),
)
OUT = {"out": Tensor("rows k", INT32, layout=INNER)}


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
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Indices of the k largest of scores[r, starts[r] : starts[r] + lengths[r]] per row r; ties go to the lowest index.

    scores         [rows, cols] fp32 or bf16, any row stride
    k              how many to pick, at least 1, possibly more than cols
    starts         [rows] int32, the row's first column; 0 if None
    lengths        [rows] int32, the row's number of candidates; cols - starts if None. Columns outside [0, cols) are no
                   candidates
    block_table    [B, max_pages] int32, maps an index to a cache slot: block_table[b, index // page_size] * page_size +
                   index % page_size, b = row_to_seq[r]
    page_size      tokens per page, given with block_table
    row_to_seq     [rows] int32, the row's sequence; row r belongs to sequence r if None
    sorted         True: by value, largest first, ties by index. False: by index, smallest first
    return_values  True: also return the picked scores
    out            None, or a tensor [rows, k] int32 on the device of scores, any row stride: the op writes the indices
                   and the -1 of missing indices to it, and writes nothing between its rows. It must not begin at the
                   address of an input. If it overlaps an input elsewhere, the contents of the overlap are undefined

    Returns indices [rows, k] int32, which is out if that was given, and with return_values also values [rows, k] fp32.
    An index counts from the row's start, as in vLLM's and SGLang's prefill top-k: index 0 is column starts[r]. Rows
    with fewer than k candidates end in -1, and values are -inf where the index is -1. -0.0 equals 0.0. -inf is the
    lowest score and may be picked. NaN is never picked, so a row with NaN may have fewer than k indices. With
    block_table, an index becomes -1 if its page is negative or outside the table, if its slot is 2^31 or more, or if
    row_to_seq of the row is not a row of block_table. The slots have the order of their indices, and a -1 stays where
    its index was.
    In prefill, pass starts and lengths of each query's keys. In decoding, pass lengths. In speculative decoding with
    next_n rows per sequence, pass lengths per row and row_to_seq = r // next_n.

    Exact for any input: a row's result does not depend on other rows, on the machine or on the run.
    Raises TypeError or ValueError for other types, dtypes and shapes.
    On Hopper: one kernel that reads the scores once; k up to 4096, cols below 2^30, the last dimensions of scores,
    block_table and out contiguous. CUDA-graph safe with new lengths, no host synchronisation, no workspace.
    Source: the contract of vLLM's top_k_per_row_prefill / _decode and SGLang's fast_topk, with a defined order of ties.
    """
    arguments = (scores, k, starts, lengths, block_table, page_size, row_to_seq, sorted, return_values)
    if out is None:
        indices, values = _topk_indices(*arguments)
    else:
        inputs = {"scores": scores, "starts": starts, "lengths": lengths}
        check_apart("out", out, **inputs, block_table=block_table, row_to_seq=row_to_seq)
        indices, values = out, _topk_indices.into(*arguments, out)
    return (indices, values) if return_values else indices


def _results(scores: torch.Tensor, k: int, return_values: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return _indices(scores, k), _values(scores, k, return_values)


def _indices(scores: torch.Tensor, k: int) -> torch.Tensor:
    return torch.empty(scores.shape[0], k, dtype=torch.int32, device=scores.device)


def _values(scores: torch.Tensor, k: int, return_values: bool) -> torch.Tensor:
    shape = (scores.shape[0], k) if return_values else (0, 0)
    return torch.empty(shape, dtype=torch.float32, device=scores.device)


@op(
    arguments=TOPK_INDICES,
    reference=reference.indices_and_values,
    results=_results,
    limits={"k": at_most(MAX_K), "cols": at_most(MAX_COLS - 1)},
    out=OUT,
)
def _topk_indices(
    scores: torch.Tensor,
    k: int,
    starts: torch.Tensor | None,
    lengths: torch.Tensor | None,
    block_table: torch.Tensor | None,
    page_size: int | None,
    row_to_seq: torch.Tensor | None,
    sorted: bool,
    return_values: bool,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    indices = _indices(scores, k) if out is None else unit_inner(out)
    values = _values(scores, k, return_values)
    select(scores, starts, lengths, block_table, page_size, row_to_seq, sorted, return_values, indices, values)
    return indices, values


def select(
    scores: torch.Tensor,
    starts: torch.Tensor | None,
    lengths: torch.Tensor | None,
    block_table: torch.Tensor | None,
    page_size: int | None,
    row_to_seq: torch.Tensor | None,
    sorted: bool,
    return_values: bool,
    indices: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Launch the kernel for checked arguments. It writes the results to indices [rows, k] and, with return_values, to
    values [rows, k]."""
    from dsa.kernels.indexer.topk_config import choose_config
    from dsa.kernels.indexer.topk_indices_sm90 import compile_topk_indices

    (rows, cols), k = scores.shape, indices.shape[1]
    if cols == 0:
        indices.fill_(-1)
        values.fill_(-torch.inf)
    elif rows:
        no_integer, no_integers, no_values = _absent(scores.device)
        options = (
            (starts is not None)  # bits STARTS to VALUES of dsa.kernels.indexer.limits
            | (lengths is not None) << 1
            | (block_table is not None) << 2
            | (row_to_seq is not None) << 3
            | sorted << 4
            | return_values << 5
        )
        dtype, sms = scores.dtype, backends.num_sms(scores.device)
        config = choose_config(rows, _vectors(scores), k, 8 * dtype.itemsize, sms)
        compile_topk_indices(dtype_name(dtype), config)(
            unit_inner(scores),
            no_integer if starts is None else starts,
            no_integer if lengths is None else lengths,
            no_integers if block_table is None else unit_inner(block_table),
            no_integer if row_to_seq is None else row_to_seq,
            indices,
            values if return_values else no_values,
            page_size or 1,
            options,
        )


def _vectors(scores: torch.Tensor) -> int:
    """Return an upper bound of the number of aligned 16-byte vectors that a row overlaps."""
    size = scores.element_size()
    unaligned = scores.data_ptr() % 16 or (scores.stride(0) * size % 16 and scores.shape[0] > 1)
    return (scores.shape[1] * size + (15 + 16 if unaligned else 15)) // 16


@functools.cache
def _absent(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return placeholders (int32 [1], int32 [1, 1], fp32 [1, 1]) for optional tensors that are None. The kernel does
    not access them."""
    integers = torch.empty(1, 1, dtype=torch.int32, device=device)
    return integers[0], integers, torch.empty(1, 1, dtype=torch.float32, device=device)
