"""Index tensors of the indexer: ranges of keys, block tables, lengths and plans.

Sizes that real kernels fix are theirs (channels, page sizes, heads); all others are as small as they can be.
"""

from functools import partial

import torch

import dsa
from dsa.kernels.indexer.select_limits import TWO_OPS_KEYS
from tests.hostile import IndexArgument, Prepared, Results
from tests.hostile.places import int32, own_row, places, randn, rows_but
from tests.hostile.unconcerned import everything, nothing

E4M3 = torch.float8_e4m3fn
PAGE = 64


def mqa_ranges(device: str, argument: str, unquantised: bool = False, columns: int = 0) -> Prepared:
    queries, keys = 9, 200
    q, k = randn(queries, 64, 128, device=device), randn(keys, 128, device=device)
    weights, scale = randn(queries, 64, device=device), torch.rand(keys).to(device)
    ranges = {
        "cu_seq_len_k_start": int32(range(0, 9 * 7, 7), device),
        "cu_seq_len_k_end": int32(range(100, 100 + 9 * 12, 12), device),
    }

    def run(given: torch.Tensor) -> Results:
        named = ranges | {argument: given}
        if unquantised:
            return [dsa.mqa_logits(q, k, weights, **named)]
        return [dsa.fp8_mqa_logits(q.to(E4M3), (k.to(E4M3), scale), weights, **named, max_seqlen_k=columns)]

    # In PyTorch all ranges together say which keys are multiplied at a time, and so how sums are rounded.
    return Prepared(run, ranges[argument], own_row(queries), exact=device == "cuda" and not unquantised)


def paged_scores(device: str, argument: str, next_n: int = 1, a_query: bool = False) -> Prepared:
    lengths = [130, 70, 5, 190]
    batch, max_pages = len(lengths), 3
    q, weights = randn(batch, next_n, 64, 128, device=device), randn(batch * next_n, 64, device=device)
    cache = torch.randint(0, 0x70, (7, PAGE, 1, 132), dtype=torch.uint8).to(device)
    table = int32([[5, 0, 2], [1, 6, 4], [3, 2, 5], [6, 1, 0]], device)
    context_lens = int32(lengths, device)
    if a_query:
        context_lens = context_lens[:, None].repeat(1, next_n)
    named = {
        "context_lens": context_lens,
        "block_table": table,
        "schedule_meta": dsa.get_paged_mqa_logits_metadata(context_lens, PAGE, 7),
    }

    def run(given: torch.Tensor) -> Results:
        own = named | {argument: given}
        if argument != "schedule_meta":
            own["schedule_meta"] = dsa.get_paged_mqa_logits_metadata(own["context_lens"], PAGE, 7)
        scores = dsa.fp8_paged_mqa_logits(
            *(q.to(E4M3), cache, weights),
            **own,
            max_context_len=max_pages * PAGE,
            clean_logits=True,
        )
        return [scores.unflatten(0, (batch, next_n))]

    if argument == "schedule_meta":
        # Any of its numbers may leave out any scores.
        rows = len(named[argument])
        where = {f"{row}, {column}": ((row, column), nothing) for row in (0, 3, rows - 1) for column in (0, 1)}
    else:
        where = own_row(batch, None if named[argument].dim() == 1 else 0)
    return Prepared(run, named[argument], where)


def plan(device: str, next_n: int | None) -> Prepared:
    shape = (300,) if next_n is None else (300, next_n)
    lengths = torch.randint(0, 5000, shape, dtype=torch.int32).to(device)

    def run(given: torch.Tensor) -> Results:
        found = dsa.get_paged_mqa_logits_metadata(given, PAGE, 132).long()
        sequences, splits = found.unbind(1)
        # A plan in order: sequences that there are, and none of their splits before the first.
        order = (sequences[1:] > sequences[:-1]) | (sequences[1:] == sequences[:-1]) & (splits[1:] >= splits[:-1])
        inside = (sequences >= 0) & (sequences <= len(given)) & (splits >= 0) & (splits < 2**23)
        return [torch.stack((order.all(), inside.all(), sequences[-1] == len(given)))]

    return Prepared(run, lengths, places(300, lambda i: everything, None if next_n is None else 0))


# Selection


def topk(device: str, argument: str, cols: int = 300, paged: bool = False, by_value: bool = False) -> Prepared:
    rows, k = 5, 33
    scores = randn(rows, cols, device=device)
    named = {
        "starts": int32([0, 3, 50, 99, 1], device),
        "lengths": int32([cols, 100, 20, 150, 299], device),
    }
    if paged:
        named["block_table"] = torch.randint(0, 1000, (2, -(-cols // PAGE)), dtype=torch.int32).to(device)
        named["row_to_seq"] = int32([0, 1, 0, 0, 1], device)

    def run(given: torch.Tensor) -> Results:
        own = named | {argument: given}
        return dsa.topk_indices(
            scores, k, **own, page_size=PAGE if paged else None, sorted=by_value, return_values=True
        )

    if argument == "block_table":
        where = {
            "a page of the first": ((0, 1), rows_but([0, 2, 3])),
            "the last page of the second": ((1, named[argument].shape[1] - 1), rows_but([1, 4])),
        }
    else:
        where = own_row(rows)
    return Prepared(run, named[argument], where)


def select(device: str, argument: str, paged: bool = False, keys: int = 200, half: bool = False) -> Prepared:
    """keys: few are scored and then selected; many are selected as they are scored."""
    queries, k, accumulators = 9, 33, torch.float16 if half else torch.float32
    q, of_keys = randn(queries, 64, 128, device=device), randn(keys, 128, device=device)
    weights, scale = randn(queries, 64, device=device), torch.rand(keys).to(device)
    named = {
        "cu_seq_len_k_start": int32(range(0, 9 * 7, 7), device),
        "cu_seq_len_k_end": int32(range(keys - 100, keys - 100 + 9 * 12, 12), device),
    }
    if paged:
        named["block_table"] = torch.randint(0, 1000, (2, -(-keys // PAGE)), dtype=torch.int32).to(device)
        named["row_to_seq"] = int32([0, 1, 0, 0, 1, 1, 0, 1, 0], device)

    def run(given: torch.Tensor) -> Results:
        own, page_size = named | {argument: given}, PAGE if paged else None
        scored = q.to(E4M3), (of_keys.to(E4M3), scale), weights
        options = {"top_k": k, "page_size": page_size, "return_values": True, "accumulators": accumulators}
        return dsa.indexer_select(*scored, **own, **options)

    if argument == "block_table":
        where = {
            "a page of the first": ((0, 1), rows_but([0, 2, 3, 6, 8])),
            "the last page of the second": ((1, named[argument].shape[1] - 1), rows_but([1, 4, 5, 7])),
        }
    else:
        where = own_row(queries)
    return Prepared(run, named[argument], where, exact=device == "cuda")


def select_of_pages(device: str, argument: str, next_n: int = 1, a_query: bool = False, slots: bool = True) -> Prepared:
    lengths = [130, 70, 5, 190]
    batch, max_pages, k = len(lengths), 3, 33
    q, weights = randn(batch, next_n, 64, 128, device=device), randn(batch * next_n, 64, device=device)
    cache = torch.randint(0, 0x70, (7, PAGE, 1, 132), dtype=torch.uint8).to(device)
    context_lens = int32(lengths, device)
    if a_query:
        context_lens = context_lens[:, None].repeat(1, next_n)
    table = int32([[5, 0, 2], [1, 6, 4], [3, 2, 5], [6, 1, 0]], device)
    named = {"context_lens": context_lens, "block_table": table}

    def run(given: torch.Tensor) -> Results:
        own = named | {argument: given}
        options = {"slots": slots, "return_values": True}
        indices, values = dsa.paged_indexer_select(
            *(q.to(E4M3), cache, weights), **own, max_context_len=max_pages * PAGE, top_k=k, **options
        )
        return [indices.unflatten(0, (batch, next_n)), values.unflatten(0, (batch, next_n))]

    return Prepared(run, named[argument], own_row(batch, None if named[argument].dim() == 1 else 0))


RANGES = ("cu_seq_len_k_start", "cu_seq_len_k_end")

ARGUMENTS: list[IndexArgument] = [
    *(IndexArgument("fp8_mqa_logits", x, partial(mqa_ranges, argument=x)) for x in RANGES),
    *(IndexArgument("fp8_mqa_logits", f"{x} compressed", partial(mqa_ranges, argument=x, columns=60)) for x in RANGES),
    *(IndexArgument("mqa_logits", x, partial(mqa_ranges, argument=x, unquantised=True)) for x in RANGES),
    *(
        IndexArgument("fp8_paged_mqa_logits", f"{x} of {n}", partial(paged_scores, argument=x, next_n=n))
        for x in ("context_lens", "block_table", "schedule_meta")
        for n in (1, 4)
    ),
    IndexArgument(
        "fp8_paged_mqa_logits",
        "context_lens a query",
        partial(paged_scores, argument="context_lens", next_n=2, a_query=True),
    ),
    IndexArgument("get_paged_mqa_logits_metadata", "context_lens", partial(plan, next_n=None)),
    IndexArgument("get_paged_mqa_logits_metadata", "context_lens a query", partial(plan, next_n=2)),
    *(IndexArgument("indexer_select", x, partial(select, argument=x)) for x in RANGES),
    *(
        IndexArgument("indexer_select", f"{x} paged", partial(select, argument=x, paged=True))
        for x in (*RANGES, "block_table", "row_to_seq")
    ),
    *(
        IndexArgument(
            "indexer_select",
            f"{x} of many keys{' in fp16' * half}{' paged' * paged}",
            partial(select, argument=x, paged=paged, keys=TWO_OPS_KEYS + 200, half=half),
        )
        for paged, half in ((False, False), (True, True))
        for x in (RANGES if not paged else (*RANGES, "block_table", "row_to_seq"))
    ),
    *(
        IndexArgument("paged_indexer_select", f"{x} of {n}", partial(select_of_pages, argument=x, next_n=n))
        for x in ("context_lens", "block_table")
        for n in (1, 4)
    ),
    IndexArgument(
        "paged_indexer_select",
        "context_lens a query",
        partial(select_of_pages, argument="context_lens", next_n=2, a_query=True, slots=False),
    ),
    *(IndexArgument("topk_indices", x, partial(topk, argument=x)) for x in ("starts", "lengths")),
    *(
        IndexArgument("topk_indices", f"{x} of long rows", partial(topk, argument=x, cols=20000, by_value=True))
        for x in ("starts", "lengths")
    ),
    *(
        IndexArgument("topk_indices", f"{x} paged", partial(topk, argument=x, paged=True))
        for x in ("starts", "lengths", "block_table", "row_to_seq")
    ),
]
