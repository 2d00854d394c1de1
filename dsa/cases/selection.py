"""Cases of exact top-k selection: topk_indices for given scores, and the ops that compute the lightning indexer's
scores and select in one call."""

from functools import partial
from typing import Any

import torch

from dsa.cases.case import BF16, F32, INT32, Case, Given, Maker, Results
from dsa.cases.indexer import (
    F16,
    FEW,
    INF,
    LENGTHS,
    RANGES,
    WIDE,
    check_logits,
    check_paged,
    clipped,
    contiguous,
    of_pages,
    paged,
    per_row,
    require_same,
    visible,
)
from dsa.kernels.indexer.limits import TWO_OPS_KEYS
from dsa.ops.indexer.fp8_mqa_logits import fp8_mqa_logits
from dsa.ops.indexer.fp8_paged_mqa_logits import fp8_paged_mqa_logits

# topk_indices


def candidates(
    new: Maker,
    rows: int = 0,
    cols: int = 20,
    k: int = 4,
    dtype: torch.dtype = F32,
    starts: bool = True,
    page_size: int | None = None,
    into: bool = False,
    **options: Any,
) -> Given:
    first, lengths = new.ints([0, 5, 2]), new.ints([20, 3, 9])
    paging = table_of(new, rows, cols, page_size)
    if rows:
        first, lengths = new.below(cols // 2, rows), new.below(cols + 5, rows) - 2
    elif page_size:
        paging |= {"block_table": new.ints([[2, 0, 1], [3, -1, 5]]), "row_to_seq": new.ints([1, 0, 0])}
    out = torch.full((rows or 3, k), 9, dtype=INT32, device=new.device) if into else None
    options = {"sorted": False, "return_values": True} | options
    numbers = new.f32(rows or 3, cols).round(decimals=1).to(dtype)
    return {
        "scores": numbers,
        "k": k,
        "starts": first if starts else None,
        "lengths": lengths,
        **paging,
        **options,
        "out": out,
    }


def table_of(new: Maker, rows: int, cols: int, page_size: int | None) -> Given:
    """Return block_table, page_size and row_to_seq for a call with two sequences; all are None without page_size. rows
    = 0: fixed numbers."""
    if page_size is None:
        return {"block_table": None, "page_size": None, "row_to_seq": None}
    table, row_to_seq = new.ints([[2, 0], [1, -1]]), new.ints([0, 1, 1])
    if rows:
        table, row_to_seq = new.below(1000, 2, -(-cols // page_size)), new.below(2, rows)
        table[1, 0] = -1
    return {"block_table": table, "page_size": page_size, "row_to_seq": row_to_seq}


def selected(
    scores: torch.Tensor,
    k: int,
    starts: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    page_size: int | None = None,
    row_to_seq: torch.Tensor | None = None,
    sorted: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (indices, values) of `topk_indices`, by a stable sort in float64. NaN and columns outside the range
    are never selected. A score of -inf is selected only after all higher scores. Of equal scores the lowest columns are
    selected."""
    (rows, cols), column = scores.shape, torch.arange(scores.shape[1], device=scores.device)
    first = column.new_zeros(rows, 1) if starts is None else starts.long()[:, None]
    count = cols - first if lengths is None else lengths.long()[:, None]
    there = (column >= first) & (column < first + count) & ~scores.isnan()
    key = (scores.double() + 0.0).clamp(min=-1e300).masked_fill(~there, -INF)
    key, order = (x[:, :k] for x in key.sort(dim=1, descending=True, stable=True))
    order = order.where(key > -INF, cols)
    order = order if sorted else order.sort(dim=1).values
    values = torch.nn.functional.pad(scores.float(), (0, 1), value=-INF).gather(1, order)
    more = 0, k - order.shape[1]
    indices = torch.nn.functional.pad((order - first).where(order < cols, -1), more, value=-1)
    values = torch.nn.functional.pad(values, more, value=-INF)
    if block_table is not None:
        indices = slots_of(indices, block_table, page_size, row_to_seq)
        values = values.where(indices >= 0, -INF)
    return indices.int(), values


def slots_of(
    indices: torch.Tensor, table: torch.Tensor, page_size: int, row_to_seq: torch.Tensor | None
) -> torch.Tensor:
    """Return the slots of indices [rows, k]. A slot is -1 for an index of -1, a missing page or a missing sequence, and
    if it would be 2^31 or more."""
    (sequences, pages), page = table.shape, indices.clamp(min=0) // page_size
    own = torch.arange(len(indices), device=table.device) if row_to_seq is None else row_to_seq.long()
    known = (indices >= 0) & (page < pages) & ((own >= 0) & (own < sequences))[:, None]
    physical = table[own.clamp(0, sequences - 1)[:, None], page.clamp(max=pages - 1)].long()
    slots = physical * page_size + indices % page_size
    return slots.where(known & (physical >= 0) & (slots < 2**31), -1)


def check_topk(a: Given, found: Results) -> float:
    indices, values = selected(**{name: x for name, x in a.items() if name not in ("return_values", "out")})
    require_same("indices", found[0], indices)
    if a["return_values"]:
        require_same("values", found[1], values)
    if a["out"] is not None:
        require_same("out", found[-1], indices)
    return 0.0


# indexer_select, paged_indexer_select


def selecting(
    new: Maker,
    queries: int = 0,
    keys: int = 7,
    top_k: int = 4,
    page_size: int | None = None,
    return_values: bool = True,
    **sizes: Any,
) -> Given:
    given = contiguous(new, queries, keys, **{"accumulators": F32} | sizes)
    for name in ("clean_logits", "max_seqlen_k", "logits_dtype"):
        del given[name]
    return {**given, "top_k": top_k, **table_of(new, queries, keys, page_size), "return_values": return_values}


def of_scores(a: Given) -> Given:
    """Return the arguments of the call of `fp8_mqa_logits` whose scores `indexer_select` selects from. Ranges are
    clipped to the keys."""
    scored = {name: a[name] for name in ("q", "kv", "weights", "accumulators")}
    options = {"clean_logits": True, "max_seqlen_k": 0, "logits_dtype": F32}
    return {**scored, **dict(zip(RANGES, (x.int() for x in clipped(a, len(a["kv"][0]))))), **options}


def require_selected(a: Given, found: Results, **given: Any) -> None:
    """Require the indices of `selected` and the bits of the values, but with 0.0 for -0.0. given: the scores and
    options for `selected`."""
    indices, values = selected(k=a["top_k"], **given)
    require_same("indices", found[0], indices)
    if a["return_values"]:
        require_same("values", found[1].view(INT32), (values + 0.0).view(INT32))


def require_two_ops(a: Given, found: Results) -> None:
    """Require the same bits as `fp8_mqa_logits` followed by `selected`, because these two steps define
    `indexer_select`."""
    scored = of_scores(a)
    first, last = (scored[name] for name in RANGES)
    table = {name: a[name] for name in ("block_table", "page_size", "row_to_seq")}
    require_selected(a, found, scores=fp8_mqa_logits(**scored), starts=first, lengths=last - first, **table)


def check_select(a: Given, found: Results) -> float:
    require_two_ops(a, found)
    return check_logits(scored := of_scores(a), [fp8_mqa_logits(**scored)])


def selecting_of_pages(
    new: Maker, top_k: int = 4, slots: bool = False, return_values: bool = True, **sizes: Any
) -> Given:
    given = paged(new, **sizes)
    for name in ("schedule_meta", "clean_logits", "logits_dtype"):
        del given[name]
    return {**given, "top_k": top_k, "slots": slots, "return_values": return_values}


def of_paged_scores(a: Given) -> Given:
    """Return the arguments of the call of `fp8_paged_mqa_logits` whose scores `paged_indexer_select` selects from. The
    columns are limited to the keys that fit in the pages of a row of the block table."""
    columns = min(a["max_context_len"], a["block_table"].shape[1] * a["kv_cache"].shape[1])
    names = "q", "kv_cache", "weights", "context_lens", "block_table", "accumulators"
    options = {"schedule_meta": None, "max_context_len": columns, "clean_logits": True, "logits_dtype": F32}
    return {**{name: a[name] for name in names}, **options}


def require_two_paged_ops(a: Given, found: Results) -> None:
    """Require the same bits as `fp8_paged_mqa_logits` followed by `selected`, because these two steps define
    `paged_indexer_select`."""
    batch, next_n = a["q"].shape[:2]
    table = {}
    if a["slots"]:
        sequences = torch.arange(batch, dtype=INT32, device=a["q"].device).repeat_interleave(next_n)
        table = {"block_table": a["block_table"], "page_size": a["kv_cache"].shape[1], "row_to_seq": sequences}
    scores = fp8_paged_mqa_logits(**of_paged_scores(a))
    require_selected(a, found, scores=scores, lengths=visible(a).flatten(), **table)


def check_select_of_pages(a: Given, found: Results) -> float:
    require_two_paged_ops(a, found)
    return check_paged(scored := of_paged_scores(a), [fp8_paged_mqa_logits(**scored)])


_MANY = FEW | {"keys": TWO_OPS_KEYS + 200, "window": TWO_OPS_KEYS + 100}
_TABLE = ("block_table", "row_to_seq")
_PART = ("starts", "lengths")
_ROWS = {"rows": 5, "cols": 300, "k": 33}
CASES = [
    Case(
        "indexer_select",
        selecting,
        check_select,
        {"queries": 37, "keys": 333, "top_k": 50, "exact": True, **WIDE},
        hostile=per_row(RANGES, **FEW, top_k=33),
    ),
    Case(
        "indexer_select paged",
        partial(selecting, page_size=4, return_values=False, accumulators=F16),
        check_select,
        {"queries": 37, "keys": 333, "top_k": 50, "page_size": 16, **WIDE},
        hostile=per_row((*RANGES, *_TABLE), **FEW, top_k=33, page_size=64, accumulators=F32, return_values=True),
    ),
    Case(
        "indexer_select of many keys",
        partial(selecting, keys=TWO_OPS_KEYS + 9, page_size=4, accumulators=F16),
        check_select,
        {"queries": 9, "keys": TWO_OPS_KEYS + 309, "top_k": 300, "page_size": 64, "exact": True},
        hostile={
            **per_row(RANGES, **_MANY, top_k=33, page_size=None, accumulators=F32),
            **per_row((*RANGES, *_TABLE), "paged in fp16", **_MANY, top_k=33, page_size=64),
        },
    ),
    Case(
        "paged_indexer_select",
        selecting_of_pages,
        check_select_of_pages,
        {**LENGTHS, "next_n": 4, "top_k": 100},
        ({"per_query": True},),
        hostile=of_pages(top_k=33, slots=True, accumulators=F32),
    ),
    Case(
        "paged_indexer_select of slots",
        partial(selecting_of_pages, per_query=False, top_k=9, slots=True, return_values=False, accumulators=F32),
        check_select_of_pages,
        {**LENGTHS, "next_n": 2, "top_k": 100, "exact": True, "return_values": True},
    ),
    Case(
        "topk_indices",
        partial(candidates, dtype=BF16, sorted=True),
        check_topk,
        {"rows": 33, "cols": 5001, "k": 512},
        hostile={
            **per_row(_PART, **_ROWS, dtype=F32, sorted=False),
            **per_row(_PART, "of long rows", **_ROWS | {"cols": 20000}, dtype=F32),
        },
    ),
    Case(
        "topk_indices paged",
        partial(candidates, starts=False, page_size=8, return_values=False),
        check_topk,
        {"rows": 33, "cols": 5001, "k": 512, "page_size": 64, "return_values": True},
        hostile=per_row((*_PART, *_TABLE), **_ROWS, starts=True, page_size=64, return_values=True),
    ),
    Case(
        "topk_indices into out",
        partial(candidates, sorted=True, into=True),
        check_topk,
        {"rows": 33, "cols": 5001, "k": 512},
        written=("out",),
    ),
]
