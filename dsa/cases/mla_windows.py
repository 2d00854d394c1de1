"""Cases of attention over sliding windows (packed and decoding, with and without selected compressed keys), and of the
ops that list a window's keys or slots."""

from collections.abc import Sequence
from typing import Any

import torch

import dsa
from dsa.cases.attention import (
    BOUNDS,
    D_V,
    FEW_SEQUENCES,
    IN_ROWS,
    LAYOUTS,
    PREFILL_TOLERANCES,
    SEQUENCES,
    SPARSE_TOLERANCES,
    Attended,
    all_rows,
    attend_lists,
    bounds,
    by_sequence,
    check_attended,
    empty_cache,
    small,
    some_rows,
    valid,
    with_sizes,
)
from dsa.cases.case import BF16, F32, PER_ROW, Case, Given, Hostile, Maker, Results, ends
from dsa.cases.elementwise import rotated
from dsa.cases.mla import MORE_HEADS, check_scales, check_unbiased, equal, sized

# Windows


def small_windows(new: Maker) -> Given:
    numbers = {"cu_seqlens_q": new.ints([0, 2, 4]), "cu_seqlens_k": new.ints([0, 3, 5])}
    return {"q": new.bf16(4, 2, 512), "kv": new.bf16(5, 1, 512), **numbers, "window": 2}


def small_near(new: Maker) -> torch.Tensor:
    return new.ints([[0, 1], [1, 2], [3, -1], [3, 4]])


def small_softmax(new: Maker) -> Given:
    return {"softmax_scale": 0.05, "d_v": D_V, "attn_sink": new.f32(2)}


def small_sliding(new: Maker) -> Given:
    return {**small_windows(new), **small_softmax(new), "indices": None}


def small_joined(new: Maker) -> Given:
    topk_indices = {
        "indices": new.ints([[0, 2, -1], [1, 1, 3], [2, 0, 1], [-1, -1, -1]]),
        "topk_length": new.ints([3, 2, 0, 3]),
    }
    packed = {**small_windows(new), "compressed": new.bf16(3, 1, 512)}
    return {**packed, **topk_indices, **small_softmax(new), "window_indices": None}


def small_joined_listed(new: Maker) -> Given:
    lists = {"indices": new.ints([[0, 2], [1, -1], [2, 0], [1, 1]]), "topk_length": None}
    packed = {**small_windows(new), "compressed": new.bf16(3, 1, 512)}
    return {**packed, **lists, **small_softmax(new), "window_indices": small_near(new)}


def small_cast(new: Maker) -> Given:
    packed = {**small_windows(new), "compressed": new.bf16(3, 1, 512), **new.angles(4)}
    packed["indices"] = new.ints([[0, 2, -1], [1, 1, 3], [2, 0, 1], [-1, -1, -1]])
    rest = {"groups": 2, "softmax_scale": 0.05, "attn_sink": new.f32(2), "topk_length": new.ints([3, 2, 0, 3])}
    return {**packed, **rest, "window_indices": None, "use_ue8m0": True}


def small_cast_listed(new: Maker) -> Given:
    none = dict.fromkeys(("compressed", "indices", "attn_sink", "topk_length"))
    packed = {**small_windows(new), **new.angles(4), **none, "groups": 1, "softmax_scale": 0.05}
    return {**packed, "window_indices": small_near(new), "use_ue8m0": False}


def windows(
    new: Maker,
    sequences: Sequence[tuple[int, int]] = SEQUENCES,
    heads: int = 16,
    d: int = 512,
    dtype: torch.dtype = BF16,
    window: int = 128,
    sink: bool = True,
    scale: float | None = None,
) -> Given:
    """Make packed sequences. The last two queries and the last two keys belong to no sequence."""
    queries, keys = (sum(x) + 2 for x in zip(*sequences))
    tensors = {"q": new.f32(queries, heads, d).to(dtype), "kv": small(new, keys, 1, d, dtype=dtype)}
    rest = {"softmax_scale": d**-0.5 if scale is None else scale, "attn_sink": new.f32(heads) if sink else None}
    return {**tensors, **bounds(new, sequences), "window": window, **rest}


def window_list(a: Given) -> torch.Tensor:
    return dsa.window_indices(a["cu_seqlens_q"], a["cu_seqlens_k"], len(a["q"]), a["window"])


def selected(new: Maker, a: Given, entries: int, top_k: int, invalid: float, counted: bool) -> Given:
    queries, d = len(a["q"]), a["q"].shape[2]
    indices = some_rows(new, queries, entries, top_k, invalid)
    keys = {"compressed": small(new, entries, 1, d, dtype=a["q"].dtype), "indices": indices}
    return {**keys, "topk_length": new.below(top_k + 4, queries) - 2 if counted else None}


def sliding(new: Maker, d_v: int = D_V, listed: bool = False, **sizes: Any) -> Given:
    given = {**windows(new, **sizes), "d_v": d_v}
    return {**given, "indices": window_list(given) if listed else None}


def joined(
    new: Maker,
    entries: int = 700,
    top_k: int = 100,
    d_v: int = D_V,
    invalid: float = 0.1,
    counted: bool = True,
    listed: bool = False,
    **sizes: Any,
) -> Given:
    """Make arguments of `window_sparse_attention`. Each query selects `top_k` of the `entries` rows of `compressed`."""
    given = {**windows(new, **sizes), "d_v": d_v}
    given |= selected(new, given, entries, top_k, invalid, counted)
    return {**given, "window_indices": window_list(given) if listed else None}


def with_cast(
    new: Maker,
    entries: int = 700,
    top_k: int = 100,
    groups: int = 8,
    invalid: float = 0.1,
    counted: bool = True,
    listed: bool = False,
    use_ue8m0: bool = True,
    **sizes: Any,
) -> Given:
    """Make arguments of `window_attention_cast_to_fp8`. Each query selects `top_k` of the `entries` rows of
    `compressed`. entries = 0: no compressed keys."""
    given = windows(new, **{"heads": 64, **sizes})
    none = dict.fromkeys(("compressed", "indices", "topk_length"))
    given |= selected(new, given, entries, top_k, invalid, counted) if entries else none
    rest = {"groups": groups, "window_indices": window_list(given) if listed else None, "use_ue8m0": use_ue8m0}
    return {**given, **new.angles(len(given["q"])), **rest}


def window_keys(a: Given, queries: int) -> torch.Tensor:
    """Return int64 [queries, window]: for each query, the rows of the keys in the query's window, followed by -1. The
    bounds cu_seqlens_q and cu_seqlens_k must not decrease."""
    cu_q, cu_k, window = a["cu_seqlens_q"].long(), a["cu_seqlens_k"].long(), a["window"]
    lists = torch.full((queries, window), -1, device=cu_q.device)
    sequence = torch.arange(len(cu_q) - 1, device=cu_q.device).repeat_interleave(cu_q.diff())
    t = int(cu_q[0]) + torch.arange(len(sequence), device=cu_q.device)
    position = cu_k.diff()[sequence] - (cu_q[sequence + 1] - t)
    first = (position - window + 1).clamp(min=0)[:, None]
    key = first + torch.arange(window, device=cu_q.device)
    lists[t] = (cu_k[sequence][:, None] + key).where(key <= position[:, None], -1)
    return lists


def attend_windows(a: Given, near: torch.Tensor | None, d_v: int) -> Attended:
    """Compute attention to each query's window and, if there are compressed keys, to the compressed keys that the query
    selects.

    near  the windows' index lists, or None to compute them from cu_seqlens_q, cu_seqlens_k and `window`
    d_v   channels of the values
    """
    q, keys, window = a["q"], a["kv"][:, 0], a["window"]
    if near is None:
        near = window_keys(a | {"window": min(window, max(len(keys), 1))}, len(q))
    lists = valid(near, len(keys))
    if a.get("compressed") is not None:
        more = valid(a["indices"], len(a["compressed"]), a["topk_length"])
        lists = torch.cat((lists, (more + len(keys)).where(more >= 0, -1)), 1)
        keys = torch.cat((keys, a["compressed"][:, 0]))
    return attend_lists(q, keys, lists, a["softmax_scale"], d_v, a["attn_sink"])


def check_sliding(a: Given, found: Results) -> float:
    return check_attended(found, attend_windows(a, a["indices"], a["d_v"])[:2], PREFILL_TOLERANCES)


def check_joined(a: Given, found: Results) -> float:
    return check_attended(found, attend_windows(a, a["window_indices"], a["d_v"])[:2], PREFILL_TOLERANCES)


def check_cast(a: Given, found: Results) -> float:
    """Compare scales and values with float64.

    Attention rounds its softmax weights and its result to 16 bits, and the rotation rounds the rotated channels again.
    For these roundings, the check allows 1/64 of the largest `size` (see `Attended`) in a block of 128 channels. For
    the rounding to e4m3, it allows 1/16 of a value's magnitude plus 1/512 of the scale.
    """
    attended = attend_windows(a, a["window_indices"], a["q"].shape[2])
    expected = rotated(attended.out, a["cos"], -a["sin"])
    cast, scale = found
    tokens, groups = len(a["q"]), a["groups"]

    def blocks(x: torch.Tensor) -> torch.Tensor:
        """Reshape [tokens, heads, d] to [groups, tokens, blocks, 128]."""
        return x.reshape(tokens, groups, -1).transpose(0, 1).unflatten(2, (-1, 128))

    expected, size = blocks(expected), blocks(attended.size)
    value, step = cast.double().view(expected.shape), scale.double().view(expected.shape[:3])[..., None]
    off = 2**-6 * size.amax(-1)
    largest = expected.abs().amax(-1)
    check_scales(scale.view(largest.shape), largest - off, largest + off, a["use_ue8m0"])
    error = (value * step - expected).abs()
    if not (error <= expected.abs() / 16 * 1.01 + step / 512 + off[..., None]).all():
        raise AssertionError(f"out: off by up to {error.max():.3g}, more than rounding")
    check_unbiased("out", value * step, expected)
    return error.max().item() if error.numel() else 0.0


# sliding_window_decode, window_slots


def small_pages(new: Maker) -> Given:
    return {"block_table": new.ints([[1, 0], [2, -1]]), "cache_seqlens": new.ints([20, 1])}


def small_window_decode(new: Maker) -> Given:
    tensors = {"q": new.bf16(2, 2, 2, 576), "cache": new.float_cache(3, 16, 576), **small_pages(new), "window": 3}
    return {**tensors, **small_softmax(new), "is_fp8_kvcache": False}


def small_ring(new: Maker) -> Given:
    keys = {"block_table": None, "cache_seqlens": new.ints([20, 1])}
    tensors = {"q": new.bf16(2, 2, 2, 512), "cache": new.v4_cache(2, 16), **keys, "window": 3}
    return {**tensors, **small_softmax(new), "is_fp8_kvcache": True}


LENGTHS = (0, 1, 2, 3, 5, 48, 49, 64, 127, 128, 130, 500, 1001)


def window_decode(
    new: Maker,
    layout: str = "584 bytes",
    lengths: Sequence[int] = LENGTHS,
    s_q: int = 2,
    heads: int = 64,
    window: int = 128,
    page: int = 64,
    ring: bool = False,
    d_v: int = D_V,
    sink: bool = True,
) -> Given:
    """Make arguments of `sliding_window_decode`. Slots in no query's window are NaN. Unused entries of the block table
    are outside the cache. ring: one page per sequence and no block table."""
    (d, dtype), columns = LAYOUTS[layout], 1 + max(lengths) // page
    pages = len(lengths) if ring else len(lengths) * columns + 3
    cache, table = empty_cache(new.device, layout, pages, page), None
    if not ring:
        table = new.order(1, pages, len(lengths) * columns).view(-1, columns).int()
    for b, length in enumerate(lengths):
        position = torch.arange(max(0, length - s_q - window + 1), length, device=new.device)
        own = b if ring else table[b, position // page].long()
        rows = small(new, len(position), d, dtype=F32)
        dsa.reference.write_kv_cache(rows, cache, own * page + position % page)
        if not ring:
            table[b, -(-length // page) :] = 2**31 - 1
    given = {"q": new.f32(len(lengths), s_q, heads, d).to(dtype), "cache": cache, "block_table": table}
    given |= {"cache_seqlens": new.ints(list(lengths)), "window": window, "softmax_scale": d**-0.5, "d_v": d_v}
    return {**given, "attn_sink": new.f32(heads) if sink else None, "is_fp8_kvcache": "bytes" in layout}


def slots_of_windows(a: Given, s_q: int, page: int) -> torch.Tensor:
    """Return int64 [B, s_q, window]: the slots of the keys in each query's window, -1 for no key."""
    table, lengths, window = a["block_table"], a["cache_seqlens"].long(), a["window"]
    last = lengths[:, None] - s_q + torch.arange(s_q, device=lengths.device)
    key = (last - window + 1).clamp(min=0)[..., None] + torch.arange(window, device=lengths.device)
    number = torch.arange(len(lengths), device=lengths.device).view(-1, 1, 1).expand_as(key)
    if table is not None:
        inside = key // page < table.shape[1]
        rows = torch.nn.functional.pad(table.long(), (0, 1))
        number = rows[number, (key // page).where(inside, 0)].where(inside, -1)
    slots = number * page + key % page
    return slots.where((key <= last[..., None]) & (number >= 0) & (slots < 2**31), -1)


def check_window_decode(a: Given, found: Results) -> float:
    cache, q, table = a["cache"], a["q"], a["block_table"]
    window = a["window"] if table is None else min(a["window"], max(1, table.shape[1] * cache.shape[1]))
    lists = slots_of_windows(a | {"window": window}, q.shape[1], cache.shape[1]).flatten(0, 1)
    rows = all_rows(cache)
    rest = a["softmax_scale"], a["d_v"], a["attn_sink"]
    attended = attend_lists(q.flatten(0, 1), rows, valid(lists, len(rows)), *rest)
    return check_attended(found, by_sequence(attended, q), SPARSE_TOLERANCES)


def check_slots(a: Given, found: Results) -> float:
    return equal("slots", found[0], slots_of_windows(a, a["s_q"], a["page_size"]))


def small_slots(new: Maker) -> Given:
    return {**small_pages(new), "s_q": 2, "page_size": 16, "window": 3}


def slots(
    new: Maker,
    lengths: Sequence[int] = LENGTHS,
    s_q: int = 2,
    page: int = 64,
    pages: int = 20,
    window: int = 128,
    ring: bool = False,
) -> Given:
    """Make arguments of `window_slots`. About a fifth of the block table is -1, missing pages. ring: no block table."""
    table = new.below(5000, len(lengths), pages)
    table = table.where(new.below(5, len(lengths), pages) > 0, -1)
    keys = {"block_table": None if ring else table, "cache_seqlens": new.ints(list(lengths))}
    return {**keys, "s_q": s_q, "page_size": page, "window": window}


# window_indices


def small_indices(new: Maker) -> Given:
    numbers = {"cu_seqlens_q": new.ints([0, 2, 4]), "cu_seqlens_k": new.ints([0, 3, 5])}
    return {**numbers, "total_q": 6, "window": 3}


def indices(new: Maker, sequences: Sequence[tuple[int, int]] = SEQUENCES, window: int = 128, more: int = 3) -> Given:
    """Make arguments of `window_indices`. more: queries that belong to no sequence."""
    return {**bounds(new, sequences), "total_q": sum(q for q, _ in sequences) + more, "window": window}


def check_indices(a: Given, found: Results) -> float:
    return equal("indices", found[0], window_keys(a, a["total_q"]))


# Sizes for hostile contents and for `check`.

SHORT = {"sequences": FEW_SEQUENCES, "heads": 2, "window": 8}
JOINED = {**SHORT, "entries": 20, "top_k": 5}
DECODED = {"lengths": (40, 1, 64), "heads": 2, "window": 8, "page": 16}
FIVE_SLOTS = {"lengths": (3, 0, 64, 129, 250), "pages": 4, "window": 40}
FIVE_SEQUENCES = {"sequences": ((3, 6), (0, 0), (6, 12), (8, 16), (13, 26)), "window": 40, "more": 0}
WINDOW_SIZES = {"sequences": ((0, 0), (9, 9), (5, 30), (3, 0), (20, 2)), "heads": 20, "window": 8}
JOINED_SIZES = {**WINDOW_SIZES, "entries": 50, "top_k": 70}
DECODE_SIZES = {"lengths": (0, 1, 20, 64, 130), "heads": 20, "window": 70}
BOUND_NAMES, LIST_NAMES = ("cu_seqlens_q", "cu_seqlens_k"), ("indices", "topk_length")

CASES = [
    Case(
        "sliding_window_attention",
        sized(small_sliding, sliding),
        check_sliding,
        WINDOW_SIZES,
        MORE_HEADS,
        hostile={
            **with_sizes(BOUNDS, BOUND_NAMES, {"": {**SHORT, "d": 576}}),
            **with_sizes(IN_ROWS, ("indices",), {"": {**SHORT, "d": 576, "listed": True}}),
        },
    ),
    Case(
        "sliding_window_attention listed",
        lambda new, **sizes: (
            sliding(new, listed=True, **sizes) if sizes else small_sliding(new) | {"indices": small_near(new)}
        ),
        check_sliding,
        WINDOW_SIZES,
    ),
    Case(
        "window_sparse_attention",
        sized(small_joined, joined),
        check_joined,
        JOINED_SIZES,
        MORE_HEADS,
        hostile={
            **with_sizes(BOUNDS, BOUND_NAMES, {"": {**JOINED, "d": 576}}),
            **with_sizes(IN_ROWS, LIST_NAMES, {"": {**JOINED, "d": 576}}),
            **with_sizes(IN_ROWS, ("window_indices",), {"": {**JOINED, "d": 576, "listed": True}}),
        },
    ),
    Case(
        "window_sparse_attention listed",
        sized(small_joined_listed, joined),
        check_joined,
        {**JOINED_SIZES, "listed": True},
    ),
    Case(
        "window_attention_cast_to_fp8",
        sized(small_cast, with_cast),
        check_cast,
        {**JOINED_SIZES, "groups": 2},
        MORE_HEADS,
        hostile={
            **with_sizes(BOUNDS, BOUND_NAMES, {"": {**JOINED, "groups": 1}}),
            **with_sizes(IN_ROWS, LIST_NAMES, {"": {**JOINED, "groups": 1}}),
            **with_sizes(IN_ROWS, ("window_indices",), {"": {**JOINED, "groups": 1, "listed": True}}),
        },
    ),
    Case(
        "window_attention_cast_to_fp8 listed",
        sized(small_cast_listed, with_cast),
        check_cast,
        {**JOINED_SIZES, "entries": 0, "groups": 1, "listed": True, "use_ue8m0": False},
    ),
    Case(
        "sliding_window_decode",
        sized(small_window_decode, window_decode),
        check_window_decode,
        {**DECODE_SIZES, "layout": "bf16, 576"},
        hostile={
            **with_sizes(IN_ROWS, ("block_table", "cache_seqlens"), {"": {**DECODED, "layout": "bf16, 576"}}),
            **with_sizes(IN_ROWS, ("block_table",), {"bytes": {**DECODED, "layout": "656 bytes"}}),
        },
    ),
    Case(
        "sliding_window_decode ring",
        sized(small_ring, window_decode),
        check_window_decode,
        {**DECODE_SIZES, "page": 75, "ring": True},
        hostile=with_sizes(IN_ROWS, ("cache_seqlens",), {"ring": {**DECODED, "layout": "bf16, 576", "ring": True}}),
    ),
    Case(
        "window_indices",
        sized(small_indices, indices),
        check_indices,
        {"window": 40},
        hostile=with_sizes(BOUNDS, BOUND_NAMES, {"": FIVE_SEQUENCES}),
    ),
    Case(
        "window_slots",
        sized(small_slots, slots),
        check_slots,
        {"pages": 20},
        hostile={
            "block_table": Hostile(PER_ROW.kept, lambda x: [(b, 1) for b in (0, 2, 4)], FIVE_SLOTS),
            "cache_seqlens": Hostile(PER_ROW.kept, ends, FIVE_SLOTS),
        },
    ),
    Case(
        "window_slots ring",
        sized(lambda new: small_slots(new) | {"block_table": None}, slots),
        check_slots,
        {"page": 130, "ring": True},
        hostile={"cache_seqlens ring": Hostile(PER_ROW.kept, ends, {**FIVE_SLOTS, "ring": True})},
    ),
]
