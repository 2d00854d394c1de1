"""Index tensors of attention: lists of keys, block tables, lengths, plans and packed sequences."""

from collections.abc import Callable
from functools import partial

import torch

import dsa
from tests.hostile import IndexArgument, Prepared, Results
from tests.hostile import packed as training
from tests.hostile.packed import BF16, packed_places, starts
from tests.hostile.places import int32, own_row, rows_but
from tests.hostile.unconcerned import everything, nothing, others, rows

SCALE = 0.05


def numbers(device: str, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def ints(device: str, *values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def first_of(given: dict[str, torch.Tensor], name: str, count: int, *dims: int) -> dict:
    """Places in an argument whose rows are queries or sequences, `count` of them: at the ends of the first and of the
    last row. What the row does not concern: all other rows of the results, along `dims`."""
    argument, places = given[name], {}
    for row in (0, count - 1):
        rest = rows(*((dim, others(count, row)) for dim in dims))
        last = (row, *(n - 1 for n in argument.shape[1:]))
        first = (row, *(0 for _ in argument.shape[1:]))
        places |= {f"{first}": (first, rest), f"{last}": (last, rest)}
    return places


# Prefill.


def prefill(device: str, name: str, dim: int, heads: int) -> Prepared:
    tokens, keys, top_k = 3, 100, 70
    q, kv = numbers(device, tokens, heads, dim), numbers(device, keys, 1, dim)
    given = {
        "indices": torch.randint(0, keys, (tokens, 1, top_k), dtype=torch.int32).to(device),
        "topk_length": ints(device, 66, 1, 70),
    }

    def run(argument: torch.Tensor) -> Results:
        own = given | {name: argument}
        sink = torch.zeros(heads, device=device)
        return dsa.flash_mla_sparse_fwd(q, kv, own["indices"], SCALE, 512, sink, own["topk_length"])

    return Prepared(run, given[name], first_of(given, name, tokens, 0, 0, 0))


def window(device: str, name: str, selected: bool, cast: bool = False) -> Prepared:
    """cast: with the results in FP8, of one group of heads."""
    tq, tk, heads, width, entries, dim = sum(training.QUERIES), sum(training.KEYS), 2, 8, 20, 512 if cast else 576
    q, kv, compressed = numbers(device, tq, heads, dim), numbers(device, tk, 1, dim), numbers(device, entries, 1, dim)
    angles = torch.rand(tq, 32).to(device)
    bounds = [ints(device, *starts(x)) for x in (training.QUERIES, training.KEYS)]
    given = {
        "cu_seqlens_q": bounds[0],
        "cu_seqlens_k": bounds[1],
        "indices": torch.randint(0, entries, (tq, 5), dtype=torch.int32).to(device),
        "topk_length": torch.randint(0, 6, (tq,), dtype=torch.int32).to(device),
    }
    near = dsa.window_indices(*bounds, tq, width)
    own_list = "window_indices" if selected else "indices"
    if name == own_list:
        given[own_list] = near

    def run(argument: torch.Tensor) -> Results:
        own = given | {name: argument}
        packed = q, kv, own["cu_seqlens_q"], own["cu_seqlens_k"], width
        listed = {own_list: argument} if name == own_list else {}
        if not selected:
            return dsa.sliding_window_attention(*packed, SCALE, **listed)
        if cast:
            rest = (angles.cos(), angles.sin(), 1, SCALE, None, own["topk_length"])
            bytes_of, scale = dsa.window_attention_cast_to_fp8(*packed, compressed, own["indices"], *rest, **listed)
            return bytes_of.view(torch.uint8), scale
        return dsa.window_sparse_attention(
            *packed, compressed, own["indices"], SCALE, topk_length=own["topk_length"], **listed
        )

    if name in training.BOUNDS:
        return Prepared(run, given[name], packed_places([0, 0], [None, None]))
    return Prepared(run, given[name], first_of(given, name, tq, 0, 0))


# Decoding.

PAGE, PAGES, LENGTHS = 16, 30, (300, 5, 70)
# A plan of other lengths cuts every sequence elsewhere, so that its softmax weights round otherwise, those of a page
# that the block table names three times all alike: by up to 1.2e-3 in bf16, 0.13e-3 in fp16. A lost key is 9e-3, or
# more.
REPLANNED = torch.float16


def dense(device: str, name: str, heads: int, causal: bool, invariant: bool, planned: bool) -> Prepared:
    """planned: with a plan that the caller has, by its tensors; else it is made by the call and follows the lengths."""
    batch, s_q = len(LENGTHS), 2
    replanned = name == "cache_seqlens" and not (invariant or planned)
    dtype = REPLANNED if replanned else BF16
    q, cache = (numbers(device, *x, 576, dtype=dtype) for x in ((batch, s_q, heads), (PAGES, PAGE, 1)))
    lengths = ints(device, *LENGTHS)
    plan = dsa.get_mla_metadata(lengths, s_q * heads, 1)
    given = {
        "block_table": torch.randint(0, PAGES, (batch, 19), dtype=torch.int32).to(device),
        "cache_seqlens": lengths,
        "tile_scheduler_metadata": plan[0],
        "num_splits": plan[1],
    }

    def run(argument: torch.Tensor) -> Results:
        own = given | {name: argument}
        own_plan = (own["tile_scheduler_metadata"], own["num_splits"]) if planned else (None, None)
        return dsa.flash_mla_with_kvcache(
            *(q, cache, own["block_table"], own["cache_seqlens"], 512, *own_plan, SCALE, causal),
            enable_batch_invariant=invariant,
        )

    if name in ("block_table", "cache_seqlens"):
        return Prepared(run, given[name], first_of(given, name, batch, 0, 0), exact=not replanned)
    # A wrong plan may leave out any sequence.
    flat = [(0, column) for column in range(6)] if given[name].dim() == 2 else list(range(batch + 1))
    return Prepared(run, given[name], {f"{place}": (place, nothing) for place in flat})


def metadata(device: str) -> Prepared:
    """A plan of any lengths gives the right results for others."""
    batch, heads = len(LENGTHS), 8
    q, cache = (numbers(device, *x, 576, dtype=REPLANNED) for x in ((batch, 1, heads), (PAGES, PAGE, 1)))
    table = torch.randint(0, PAGES, (batch, 19), dtype=torch.int32).to(device)
    lengths = ints(device, *LENGTHS)

    def run(argument: torch.Tensor) -> Results:
        plan = dsa.get_mla_metadata(argument, heads, 1)
        return dsa.flash_mla_with_kvcache(q, cache, table, lengths, 512, *plan, SCALE)

    return Prepared(run, lengths, {f"sequence {b}": (b, everything) for b in range(batch)}, exact=False)


def byte_cache(device: str, dim: int) -> torch.Tensor:
    width = 656 if dim == 576 else 584
    cache = torch.zeros(PAGES, PAGE, 1, width, dtype=torch.uint8, device=device)
    slots = torch.arange(PAGES * PAGE, device=device)
    dsa.write_kv_cache(numbers(device, PAGES * PAGE, dim), cache, slots)
    return cache


def sparse(device: str, name: str, dim: int, heads: int, fp8: bool, top_k: int, extra: bool) -> Prepared:
    """top_k: of more than a few tiles the kernels share a query's keys."""
    batch, s_q = 2, 2
    q = numbers(device, batch, s_q, heads, dim)
    caches = [byte_cache(device, dim) if fp8 else numbers(device, PAGES, PAGE, 1, dim) for _ in range(2)]
    given = {
        "indices": torch.randint(0, PAGES * PAGE, (batch, s_q, top_k), dtype=torch.int32).to(device),
        "topk_length": ints(device, top_k - 3, top_k),
        "extra_indices_in_kvcache": torch.randint(0, PAGES * PAGE, (batch, s_q, 5), dtype=torch.int32).to(device),
        "extra_topk_length": ints(device, 1, 5),
    }

    def run(argument: torch.Tensor) -> Results:
        own = given | {name: argument}
        second = {k: own[k] for k in ("extra_indices_in_kvcache", "extra_topk_length")}
        second["extra_k_cache"] = caches[1]
        return dsa.flash_mla_with_kvcache(
            *(q, caches[0], None, None, 512, None, None, SCALE, False, fp8),
            indices=own["indices"],
            topk_length=own["topk_length"],
            **(second if extra else {}),
        )

    return Prepared(run, given[name], first_of(given, name, batch, 0, 0))


def window_decode(device: str, name: str, ring: bool, fp8: bool) -> Prepared:
    batch, s_q, heads, width = 3, 2, 2, 8
    q = numbers(device, batch, s_q, heads, 576)
    cache = byte_cache(device, 576) if fp8 else numbers(device, PAGES, PAGE, 1, 576)
    given = {
        "block_table": torch.randint(0, PAGES, (batch, 4), dtype=torch.int32).to(device),
        "cache_seqlens": ints(device, 40, 1, 64),
    }

    def run(argument: torch.Tensor) -> Results:
        own = given | {name: argument}
        table = None if ring else own["block_table"]
        return dsa.sliding_window_decode(q, cache, table, own["cache_seqlens"], width, SCALE, is_fp8_kvcache=fp8)

    return Prepared(run, given[name], first_of(given, name, batch, 0, 0))


def window_keys(device: str, argument: str) -> Prepared:
    bounds = [0, 3, 3, 9, 17, 30]
    named = {"cu_seqlens_q": int32(bounds, device), "cu_seqlens_k": int32([2 * x for x in bounds], device)}

    def run(given: torch.Tensor) -> Results:
        return [dsa.window_indices(**(named | {argument: given}), total_q=30, window=40)]

    def rest(i: int) -> Callable[[Results], Results]:
        return rows_but(range(bounds[max(i - 1, 0)], bounds[min(i + 1, len(bounds) - 1)]))

    where = {f"boundary {i}": (i, rest(i)) for i in range(len(bounds))}
    return Prepared(run, named[argument], where)


RING_PAGE = 64


def multi_head(device: str, name: str) -> Prepared:
    tq, tk = sum(training.QUERIES), sum(training.KEYS)
    q, k, v = numbers(device, tq, 4, 192), numbers(device, tk, 2, 128), numbers(device, tk, 2, 128)
    k_rope, blocks = numbers(device, tk, 64), -(-max(training.KEYS) // 128)
    bounds = (ints(device, *starts(x)) for x in (training.QUERIES, training.KEYS))
    given = dict(zip(training.BOUNDS, bounds))
    given["selected"] = torch.randint(-(2**31), 2**31 - 1, (tq, 4 * blocks), dtype=torch.int32).to(device)

    def run(argument: torch.Tensor) -> Results:
        own = given | {name: argument}
        packed = own["cu_seqlens_q"], own["cu_seqlens_k"], max(training.KEYS)
        out, lse = dsa.mha_varlen_fwd(q, k, v, *packed, SCALE, k_rope=k_rope, selected=own["selected"])
        return out, lse.T

    if name in training.BOUNDS:
        return Prepared(run, given[name], packed_places([0, 0], [None, None]))
    return Prepared(run, given[name], first_of(given, name, tq, 0, 0))


def bits(device: str, name: str) -> Prepared:
    given = {"indices": torch.randint(0, 300, (6, 5), dtype=torch.int32).to(device)}
    given["starts"] = torch.randint(0, 50, (6,), dtype=torch.int32).to(device)

    def run(argument: torch.Tensor) -> Results:
        return [dsa.selection_bits(**(given | {name: argument}), max_keys=200)]

    return Prepared(run, given[name], first_of(given, name, 6, 0))


def window_places(device: str, argument: str) -> Prepared:
    table = torch.randint(0, 1000, (5, 4), dtype=torch.int32).to(device)
    named = {"block_table": table, "cache_seqlens": int32([3, 0, 64, 129, 250], device)}

    def run(given: torch.Tensor) -> Results:
        own = named | {argument: given}
        found = [dsa.window_slots(**own, s_q=2, page_size=RING_PAGE, window=40)]
        if argument == "cache_seqlens":
            found.append(dsa.window_slots(None, given, 2, RING_PAGE, 40))
        return found

    return Prepared(run, named[argument], own_row(5, 1 if argument == "block_table" else None))


def _of(op: str, argument: str, variant: str, prepare, *rest) -> IndexArgument:
    return IndexArgument(op, f"{argument} {variant}".strip(), lambda device: prepare(device, *rest))


DENSE = {
    "planned here": (8, True, False, False),
    "with a plan": (8, False, False, True),
    "two row tiles": (64, True, False, True),
    "batch invariant": (8, True, True, False),
}
SPARSE = {
    "16 bits": (576, 8, False, 70, True),
    "16 bits, many heads": (512, 65, False, 640, True),
    "bytes": (576, 8, True, 640, True),
    "bytes, many heads": (512, 64, True, 70, True),
}
LISTS = ("indices", "topk_length", "extra_indices_in_kvcache", "extra_topk_length")
DECODE, SPARSE_FWD = "flash_mla_with_kvcache", "flash_mla_sparse_fwd"

ARGUMENTS: list[IndexArgument] = [
    *(
        _of(SPARSE_FWD, name, f"{dim}, {heads} heads", prefill, name, dim, heads)
        for dim, heads in ((576, 64), (512, 16), (576, 20))
        for name in ("indices", "topk_length")
    ),
    *(
        _of(DECODE, name, f"dense, {variant}", dense, name, *options)
        for variant, options in DENSE.items()
        for name in ("block_table", "cache_seqlens")
    ),
    *(
        _of(DECODE, name, variant, dense, name, *DENSE[variant])
        for variant in ("with a plan", "two row tiles")
        for name in ("tile_scheduler_metadata", "num_splits")
    ),
    _of("get_mla_metadata", "cache_seqlens", "", metadata),
    *(_of(DECODE, name, variant, sparse, name, *options) for variant, options in SPARSE.items() for name in LISTS),
    *(_of("sliding_window_attention", name, "", window, name, False) for name in (*training.BOUNDS, "indices")),
    *(
        _of("window_sparse_attention", name, "", window, name, True)
        for name in (*training.BOUNDS, "indices", "topk_length", "window_indices")
    ),
    *(
        _of("window_attention_cast_to_fp8", name, "", window, name, True, True)
        for name in (*training.BOUNDS, "indices", "topk_length", "window_indices")
    ),
    *(
        _of("sliding_window_decode", name, "", window_decode, name, False, False)
        for name in ("block_table", "cache_seqlens")
    ),
    _of("sliding_window_decode", "cache_seqlens", "ring", window_decode, "cache_seqlens", True, False),
    _of("sliding_window_decode", "block_table", "bytes", window_decode, "block_table", False, True),
    *(_of("mha_varlen_fwd", name, "", multi_head, name) for name in (*training.BOUNDS, "selected")),
    *(_of("selection_bits", name, "", bits, name) for name in ("indices", "starts")),
    *(IndexArgument("window_indices", x, partial(window_keys, argument=x)) for x in ("cu_seqlens_q", "cu_seqlens_k")),
    *(IndexArgument("window_slots", x, partial(window_places, argument=x)) for x in ("block_table", "cache_seqlens")),
]
