"""Cases of make_v4_cache, of slot_mapping, and of the ops that write and read the paged caches (MLA latents, index
keys)."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

import dsa
from dsa.cases.case import BF16, E4M3, F32, INT32, PER_ROW, Case, Given, Hostile, Kept, Maker, Results, ends
from dsa.cases.elementwise import rotated
from dsa.testing import calc_diff

INT64, INT_MAX = torch.int64, 2**31 - 1
# cache layout -> channels of a latent. Float layouts accept any number of channels.
CHANNELS = {"bfloat16": 576, "float16": 576, "float32": 576, "v32": 576, "v4": 512}


# The bytes of caches and the numbers they encode, by the definition of the layouts.


def slot_bytes(cache: torch.Tensor, index: bool = False) -> torch.Tensor:
    """Return uint8 [slots, bytes]: all bytes of each slot. In caches of index keys and in V4 caches, a page first has
    the values of all its slots, then their scales. index: whether the cache contains index keys."""
    pages, size, _, width = cache.shape
    page = cache.reshape(pages, size * width).view(torch.uint8)
    byte_cache = cache.element_size() == 1
    widths = (width - 4, 4) if index else (576, 8) if byte_cache and width == 584 else (width * cache.element_size(),)
    parts = page.split([size * n for n in widths], 1)
    return torch.cat([x.reshape(pages * size, n) for x, n in zip(parts, widths)], 1)


def between_pages(cache: torch.Tensor) -> torch.Tensor:
    """Return uint8 [pages, bytes]: a view of the padding after each page of a V4 cache. Other caches have no
    padding."""
    used = cache.shape[1] * cache.shape[3]
    padding = cache.stride(0) - used if cache.dtype == torch.uint8 and cache.shape[3] == 584 else 0
    return cache.as_strided((len(cache), padding), (cache.stride(0), 1), cache.storage_offset() + used)


def slot_numbers(cache: torch.Tensor, index: bool = False) -> torch.Tensor:
    """Return float64 [slots, d]: the numbers that the bytes of each slot encode."""
    if cache.element_size() > 1:
        return cache.reshape(-1, cache.shape[3]).double()
    raw, width = slot_bytes(cache, index), cache.shape[3]
    if index:
        values, scales = raw[:, : width - 4], raw[:, width - 4 :].contiguous().view(F32).double()
    elif width == 656:
        values, scales = raw[:, :512], raw[:, 512:528].contiguous().view(F32).double()
    else:
        values, scales = raw[:, :448], raw[:, 576:583].contiguous().view(torch.float8_e8m0fnu).float().double()
    numbers = values.view(E4M3).double().unflatten(1, (scales.shape[1], -1)) * scales[..., None]
    rope = raw[:, :0] if index else raw[:, 528:656] if width == 656 else raw[:, 448:576]
    return torch.cat((numbers.flatten(1), rope.contiguous().view(BF16).double()), 1)


def same(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise AssertionError unless `found` has the shape and the numbers of `expected`, which is converted to found's
    dtype first. NaN equals NaN, but e4m3 numbers are compared as bytes."""
    expected = expected.to(found.dtype)
    if found.element_size() == 1 and found.is_floating_point():
        found, expected = found.view(torch.uint8), expected.view(torch.uint8)
    if found.shape != expected.shape:
        raise AssertionError(f"{name}: expected shape {list(expected.shape)}, got {list(found.shape)}")
    wrong = (found != expected) & ~(found.isnan() & expected.isnan())
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise AssertionError(f"{name}: {int(wrong.sum())} of {wrong.numel()} numbers differ, the first at {at}")


def same_cache(found: torch.Tensor, expected: torch.Tensor, index: bool = False) -> None:
    """Raise AssertionError if a byte in a slot differs, or if the padding between pages was written. Before the call
    all bytes of the padding are equal, so they must be equal after the call."""
    same("slots", slot_bytes(found, index), slot_bytes(expected, index))
    padding = between_pages(found)
    if (padding != padding[:1, :1]).any():
        raise AssertionError("cache: bytes between its pages were written")


def some_slots(new: Maker, tokens: int, capacity: int, dtype: torch.dtype = INT64, outside: bool = False) -> Any:
    """Return random slots below `capacity`, a different one per token, but -1 for the second token. outside: the next 3
    tokens, or 7 with int64, get slots outside the cache."""
    slots, numbers = new.order(1, capacity, tokens)[0], [-1]
    if outside:
        numbers += [capacity, -(2**31), INT_MAX]
        numbers += [2**32, 2**63 - 1, -(2**32) + 5, 2**40 + 5] if dtype == INT64 else []
    numbers = numbers[: max(tokens - 1, 0)]
    slots[1 : 1 + len(numbers)] = new.ints(numbers, INT64)
    return slots.to(dtype)


def slots_inside(slots: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Return the slots as int64, with -1 in place of slots outside the cache."""
    inside = (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    return slots.long().where(inside, -1)


# write_indexer_cache, read_indexer_cache


def index_keys(
    new: Maker,
    tokens: int | None = None,
    d: int = 128,
    pages: int = 27,
    page_size: int = 64,
    slot_dtype: torch.dtype = INT64,
    outside: bool = False,
) -> Given:
    if tokens is None:
        tokens, d, pages, page_size, slots = 3, 32, 3, 16, new.ints([7, -1, 40], INT64)
    else:
        slots = some_slots(new, tokens, pages * page_size, slot_dtype, outside)
    keys = {"k": new.e4m3(tokens, d), "k_scale": new.positive(tokens)}
    return {**keys, "cache": new.index_cache(pages, page_size, d), "slots": slots}


def check_write_index(a: Given, found: Results) -> float:
    slots = slots_inside(a["slots"], a["cache"])
    expected, rows = slot_bytes(a["cache"], index=True), slots >= 0
    expected[slots[rows]] = torch.cat((a["k"].view(torch.uint8), a["k_scale"][:, None].view(torch.uint8)), 1)[rows]
    same("slots", slot_bytes(found[0], index=True), expected)
    return 0.0


def index_slots(
    new: Maker,
    tokens: int | None = None,
    d: int = 128,
    pages: int = 27,
    page_size: int = 64,
    slot_dtype: torch.dtype = INT64,
    into: bool = False,
) -> Given:
    if tokens is None:
        tokens, d, pages, page_size, slots = 4, 32, 3, 16, new.ints([7, -1, 48, 40])
    else:
        slots = some_slots(new, tokens, pages * page_size, slot_dtype, outside=True)
    given = {"cache": new.index_cache(pages, page_size, d), "slots": slots}
    results = {"k": new.e4m3(tokens, d), "k_scale": new.positive(tokens)} if into else {"k": None, "k_scale": None}
    return given | results


def check_read_index(a: Given, found: Results) -> float:
    """Check k and k_scale. If the caller passed tensors for them, `found` contains both twice: as results and as
    written arguments."""
    slots = slots_inside(a["slots"], a["cache"])
    raw = slot_bytes(a["cache"], index=True)[slots] * (slots >= 0)[:, None]
    for k, k_scale in zip(found[::2], found[1::2], strict=True):
        same("k", k, raw[:, :-4].contiguous().view(E4M3))
        same("k_scale", k_scale, raw[:, -4:].contiguous().view(F32)[:, 0])
    return 0.0


# make_v4_cache, write_kv_cache, read_kv_cache


def check_new_cache(a: Given, found: Results) -> float:
    (cache,), pages, size = found, a["pages"], a["page_size"]
    stride = math.ceil(size * 584 / 576) * 576
    if (cache.shape, cache.stride()) != ((pages, size, 1, 584), (stride, 584, 584, 1)):
        raise AssertionError(f"cache: got shape {list(cache.shape)} with strides {list(cache.stride())}")
    same("cache", cache, torch.zeros_like(cache))
    return 0.0


def latent_cache(new: Maker, layout: str, d: int, pages: int, page_size: int) -> torch.Tensor:
    """Return a cache with random numbers in every slot. In the V4 layout the padding between pages is bytes of 0xFF."""
    if layout == "v32":
        return new.v32_cache(pages, page_size)
    if layout != "v4":
        return new.f32(pages, page_size, 1, d).to(getattr(torch, layout))
    cache = new.v4_cache(pages, page_size)
    between_pages(cache).fill_(0xFF)
    return cache


def rows_of_all_sizes(new: Maker, tokens: int, d: int, least: int, most: int) -> torch.Tensor:
    """Return fp32 [tokens, d]: Gaussian rows, each multiplied by a random power of two from 2^least to 2^most."""
    return new.f32(tokens, d) * torch.exp2(new.below(most - least + 1, tokens, 1).float() + least)


def latent_rows(
    new: Maker,
    layout: str = "bfloat16",
    tokens: int | None = None,
    d: int = 0,
    pages: int = 9,
    page_size: int = 64,
    dtype: torch.dtype = BF16,
    slot_dtype: torch.dtype = INT64,
    outside: bool = False,
    use_ue8m0: bool = True,
) -> Given:
    d = d or CHANNELS[layout]
    if tokens is None:
        tokens, pages, page_size, slots = 4, 3, 16, new.ints([7, -1, 40, 0])
    else:
        slots = some_slots(new, tokens, pages * page_size, slot_dtype, outside)
    kv = rows_of_all_sizes(new, tokens, d, -20, 13).to(dtype)
    return {"kv": kv, "cache": latent_cache(new, layout, d, pages, page_size), "slots": slots, "use_ue8m0": use_ue8m0}


def written(a: Given, rows: torch.Tensor) -> torch.Tensor:
    """Return a copy of the cache into which the reference's `write_kv_cache` has written these rows."""
    cache = a["cache"].clone()
    dsa.reference.write_kv_cache(rows, cache, slots_inside(a["slots"], cache), a["use_ue8m0"])
    return cache


def check_write_kv(a: Given, found: Results) -> float:
    """Check the written cache.

    All bytes must be the reference's. Float caches and rope channels must contain `kv` rounded to their dtype. Other
    channels, e4m3 numbers times scales, must be within half an e4m3 step of `kv`.
    """
    same_cache(found[0], written(a, a["kv"]))
    slots = slots_inside(a["slots"], a["cache"])
    x, got = a["kv"][slots >= 0], slot_numbers(found[0])[slots[slots >= 0]]
    if found[0].element_size() > 1:
        same("rows", got, x.to(found[0].dtype).double())
        return 0.0
    n, group = x.shape[1] - 64, 128 if x.shape[1] == 576 else 64
    same("rope channels", got[:, n:], x[:, n:].to(BF16).double())
    x, got = x[:, :n].double().unflatten(1, (-1, group)), got[:, :n].unflatten(1, (-1, group))
    scale = x.abs().amax(2, keepdim=True).clamp(min=1e-4) / 448 * (2 if a["use_ue8m0"] else 1)
    error = (got - x).abs()
    if not (error <= 1.001 * torch.maximum(x.abs() / 16, scale / 1024)).all():
        raise AssertionError(f"rows: off by up to {(error / scale).max():.3g} scales")
    return 0.0


def latent_slots(
    new: Maker,
    layout: str = "bfloat16",
    shape: tuple[int, ...] = (),
    d: int = 0,
    pages: int = 9,
    page_size: int = 64,
    dtype: torch.dtype = BF16,
    slot_dtype: torch.dtype = INT64,
) -> Given:
    """Make arguments of `read_kv_cache`. Some slots are outside the cache. shape: the shape of `slots`."""
    if not shape:
        pages, page_size, slots = 3, 16, new.ints([[7, -1], [40, 3]], INT64)
    else:
        slots = some_slots(new, math.prod(shape), pages * page_size, slot_dtype, outside=True).view(shape)
    cache = latent_cache(new, layout, d or CHANNELS[layout], pages, page_size)
    return {"cache": cache, "slots": slots, "dtype": dtype}


def check_read_kv(a: Given, found: Results) -> float:
    """Check that the rows are the numbers that the slots encode, rounded to fp32 and then to the dtype, and zeros for
    slots outside the cache."""
    slots = slots_inside(a["slots"], a["cache"])
    expected = slot_numbers(a["cache"]).float()[slots].masked_fill(slots[..., None] < 0, 0.0)
    if not found[0].is_contiguous():
        raise AssertionError("rows: must be contiguous")
    same("rows", found[0], expected.to(a["dtype"]))
    return 0.0


# write_mla_cache


def projection(
    new: Maker,
    layout: str = "bfloat16",
    tokens: int | None = None,
    d: int = 0,
    pages: int = 9,
    page_size: int = 64,
    dtype: torch.dtype = BF16,
    slot_dtype: torch.dtype = INT64,
    outside: bool = False,
    kept: bool = True,
    **options: object,
) -> Given:
    """Make arguments of `write_mla_cache`. kept: whether the call passes `out`."""
    d = d or CHANNELS[layout]
    if tokens is None:
        tokens, pages, page_size, slots = 4, 3, 16, new.ints([7, -1, 40, 0], INT64)
    else:
        slots = some_slots(new, tokens, pages * page_size, slot_dtype, outside)
    kv = rows_of_all_sizes(new, tokens, d, -12, 7).to(dtype)  # eps, 1e-6, matters for small rows
    given = {"kv": kv, "norm_weight": 1 + new.f32(512), **new.angles(tokens)}
    given |= {"cache": latent_cache(new, layout, d, pages, page_size), "slots": slots}
    given |= {"eps": 1e-6, "interleaved": True, "use_ue8m0": True, **options}
    return {**given, "out": new.f32(tokens, d).to(dtype) if kept else None}


def unrounded(a: Given) -> torch.Tensor:
    """Return the rows that `write_mla_cache` computes before it rounds them to the cache's format. They are the `out`
    of a call with an fp32 cache. This cache has no pages, because only `out` is used."""
    out, d = torch.full_like(a["kv"], math.nan), a["kv"].shape[1]
    cache = torch.empty(0, 1, 1, d, dtype=F32, device=out.device)
    dsa.write_mla_cache(**a | {"cache": cache, "slots": torch.full_like(a["slots"], -1), "out": out})
    return out


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x * weight.double() / (x.square().mean(1, keepdim=True) + eps).sqrt()


def check_projected(a: Given, rows: torch.Tensor) -> float:
    """Check the rows that `unrounded` returns.

    The norm and the rotation each round to kv's dtype. A kernel can add the norm's squares in another order than the
    reference, and then sometimes rounds a number the other way. So a few numbers can differ from the formula's.
    """
    kv, n, (cos, sin) = a["kv"], len(a["norm_weight"]), (a["cos"], a["sin"])
    if n + 2 * cos.shape[1] <= kv.shape[1]:  # the norm does not cover the rotated channels
        options = {"interleaved": a["interleaved"], "dims": "last"}
        same("rope channels", rows[:, n:], dsa.reference.apply_rotary(kv[:, n:], cos, sin, **options))
    latent = normed(kv[:, :n], a["norm_weight"], a["eps"]).to(kv.dtype)
    expected = rotated(torch.cat((latent, kv[:, n:]), 1).double(), cos, sin, a["interleaved"])
    size = expected.abs()
    rope = size[:, -2 * cos.shape[1] :]
    # A rotated channel is a sum of two products, and each product can be one rounding step off. So the error is
    # relative to the row's largest rotated channel.
    rope[:] = rope.amax(1, keepdim=True)
    error, info = (rows.double() - expected).abs(), torch.finfo(kv.dtype)
    if not (error <= 4 * info.eps * (size + info.smallest_normal)).all():
        raise AssertionError(f"rows: off by up to {(error / size).nan_to_num(0.0).max() / info.eps:.3g} eps")
    if kv.dtype != F32 and (steps := int((rows != expected.to(kv.dtype)).sum())) > 4 + 2e-3 * rows.numel():
        raise AssertionError(f"rows: {steps} of {rows.numel()} numbers are rounded the other way")
    if not (diff := calc_diff(rows, expected.to(kv.dtype))) <= 1e-6:
        raise AssertionError(f"rows: calc_diff {diff:.3g} is above 1e-6")
    return diff


def as_kept(a: Given, rows: torch.Tensor) -> torch.Tensor:
    """Return the `out` that `write_mla_cache` writes for these rows. With a byte cache, out has the rows after
    quantisation and dequantisation."""
    if a["cache"].element_size() > 1:
        return rows
    page = torch.zeros(1, max(len(rows), 1), 1, a["cache"].shape[3], dtype=torch.uint8, device=rows.device)
    every = {"cache": page, "slots": torch.arange(len(rows), device=rows.device), "use_ue8m0": a["use_ue8m0"]}
    return slot_numbers(written(every, rows))[: len(rows)].float().to(rows.dtype)


def check_write_mla(a: Given, found: Results) -> float:
    """Compare the rows that `unrounded` returns with the formula. The cache, and `out` if it is given, must contain
    exactly the numbers that follow from these rows (`written`, `as_kept`)."""
    rows = unrounded(a)
    error = check_projected(a, rows)
    same_cache(found[0], written(a, rows))
    for out in found[1:]:
        same("out", out, as_kept(a, rows))
    return error


# slot_mapping

KEYS = {
    "slot_mapping": ([[1, 0], [2, -1]], [20, 1], {"num_tokens": 6, "page_size": 4, "ratio": 4, "ring": False}),
    "ring": ([[1], [2]], [20, 1], {"num_tokens": 6, "page_size": 16, "ratio": 1, "ring": True}),
    "all": ([[1, 0], [2, -1]], None, {"num_tokens": 4, "page_size": 4, "ratio": 1, "ring": False}),
}


def keys(
    new: Maker,
    kind: str = "slot_mapping",
    sequences: int = 0,
    most: int = 40,
    earlier: int = 300,
    first: int = 0,
    pages: int = 7,
    **options: Any,
) -> Given:
    """Make arguments of `slot_mapping`.

    kind       a key of KEYS, which sets ratio and ring; with "all", cache_seqlens is None
    sequences  number of sequences. Each has up to `most` new tokens after up to `earlier` cached tokens; every fifth
               has no new token
    first      index of the first sequence's first token. Tokens before it belong to no sequence
    pages      pages per sequence; the page numbers are random
    """
    table, cached, kind_options = KEYS[kind]
    if not sequences:
        given = {"block_table": new.ints(table), "cu_seqlens": new.ints([0, 3, 4])}
        return {**given, "cache_seqlens": None if cached is None else new.ints(cached), **kind_options}
    lengths = new.below(most + 1, sequences)
    lengths[1::5] = 0
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).add(first).to(INT32)
    cached = None if cached is None else lengths + new.below(earlier + 1, sequences)
    given = {"block_table": new.below(5000, sequences, pages) - 1, "cu_seqlens": bounds, "cache_seqlens": cached}
    return given | kind_options | {"num_tokens": first + sequences * most // 2 + 3, "page_size": 48} | options


def mapped(a: Given) -> list[int]:
    bounds, table, size, ratio = a["cu_seqlens"].tolist(), a["block_table"].tolist(), a["page_size"], a["ratio"]
    owners = [-1] * a["num_tokens"]
    # If sequences overlap, a token belongs to the sequence that begins last.
    for b in sorted(range(len(table)), key=bounds.__getitem__):
        low, high = (min(max(x, 0), len(owners)) for x in bounds[b : b + 2])
        if low < high:
            owners[low:high] = [b] * (high - low)
    lengths = [high - low for low, high in pairwise(bounds)]
    lengths = lengths if a["cache_seqlens"] is None else a["cache_seqlens"].tolist()

    def slot(t: int, b: int) -> int:
        if b < 0:
            return -1
        position = lengths[b] - (bounds[b + 1] - t)
        if position < 0 or lengths[b] > INT_MAX or (position + 1) % ratio:
            return -1
        row, capacity = position // ratio, len(table[b]) * size
        if a["ring"]:
            row = row % capacity if row >= lengths[b] // ratio - capacity else capacity
        page = table[b][row // size] if row < capacity else -1
        return page * size + row % size if page >= 0 else -1

    return [slot(t, b) for t, b in enumerate(owners)]


def check_mapped(a: Given, found: Results) -> float:
    (slots,) = found
    if slots.dtype != INT64 or not slots.is_contiguous():
        raise AssertionError(f"slots: must be contiguous int64, got {slots.dtype}")
    same("slots", slots, torch.tensor(mapped(a), dtype=INT64, device=slots.device))
    return 0.0


# The results that hostile numbers (see case.Hostile) cannot change.


def other_slots(given: Given, slots: Iterable[int], states: Iterable[int] = (), index: bool = False) -> Kept:
    """Return a function that keeps the cache's bytes outside `slots`, and a flag: whether the padding between pages was
    written. Of the other results it keeps the rows that are not in `states` (state slots)."""
    wrong = [slot for slot in slots if slot >= 0]

    def kept(results: Results) -> Results:
        cache, *others = results
        raw, padding = slot_bytes(cache, index), between_pages(cache)
        untouched = torch.tensor([slot not in wrong for slot in range(len(raw))], device=raw.device)
        written_padding = (padding != padding[:1, :1]).any()
        return [raw[untouched], written_padding, *(x[[i for i in range(len(x)) if i not in states]] for x in others)]

    return kept


def other_tokens(given: Given, place: tuple[int], index: bool = False) -> Kept:
    """Return a function that keeps all slots of the cache except the slot that the token at `place` has in the valid
    call. It also keeps all of `out` or of the state, which do not depend on slots."""
    return other_slots(given, [int(given["slots"][place])], index=index)


def mapped_elsewhere(wrong: Sequence[int], given: Given, place: tuple[int, ...]) -> Kept:
    """Return a function that keeps the results of all sequences except sequences place[0] + i, for each i in `wrong`.

    Tokens after the last boundary are not kept, because with a wrong boundary they can belong to a sequence.
    """
    bounds, sequences = given["cu_seqlens"].tolist(), len(given["block_table"])
    of_wrong = {t for i in wrong if 0 <= (b := place[0] + i) < sequences for t in range(bounds[b], bounds[b + 1])}
    others = [t for t in range(min(given["num_tokens"], bounds[-1])) if t not in of_wrong]
    return lambda results: [x[others] for x in results]


def every(x: torch.Tensor) -> list[tuple[int, ...]]:
    return [(i,) for i in range(len(x))]


def first_column(x: torch.Tensor) -> list[tuple[int, ...]]:
    return [(i, 0) for i, _ in ends(x)]


def slots_of_both(kept: Any, name: str = "slots", **sizes: Any) -> dict[str, Hostile]:
    kinds = {"int32": INT32, "int64": INT64}
    sizes = {"pages": 3, "page_size": 64, **sizes}
    return {f"{name} {kind}": Hostile(kept, ends, {**sizes, "slot_dtype": x}) for kind, x in kinds.items()}


def hostile_keys(kind: str, *names: str, **sizes: Any) -> dict[str, Hostile]:
    sizes = {"kind": kind, "sequences": 5, "most": 12, "earlier": 12, "pages": 8, "page_size": 4, **sizes}
    own, adjacent = partial(mapped_elsewhere, (0,)), partial(mapped_elsewhere, (-1, 0))
    which = {"block_table": (own, first_column), "cu_seqlens": (adjacent, every), "cache_seqlens": (own, ends)}
    what = " of rings" if sizes.get("ring") else ""
    return {f"{x}{what} ratio {r}": Hostile(*which[x], {**sizes, "ratio": r}) for x in names for r in (1, 3)}


def latent_cases() -> list[Case]:
    found = []
    for name, layout in (("float", "bfloat16"), ("v32", "v32"), ("v4", "v4")):
        rows, slots, kv = (partial(make, layout=layout) for make in (latent_rows, latent_slots, projection))
        hostile = slots_of_both(other_tokens, tokens=9)
        fp32 = {"tokens": 9, "layout": "float32", "d": 512}
        more = slots_of_both(other_tokens, "slots float32", **fp32) if name == "float" else {}
        reading, sizes = slots_of_both(PER_ROW.kept, shape=(9,)), {"tokens": 301}
        found += [
            Case(f"write_kv_cache {name}", rows, check_write_kv, sizes, written=("cache",), hostile=hostile | more),
            Case(f"read_kv_cache {name}", slots, check_read_kv, {"shape": (6, 50)}, hostile=reading),
            Case(f"write_mla_cache {name}", kv, check_write_mla, sizes, written=("cache", "out"), hostile=hostile),
        ]
    return found


CASES = [
    Case(
        "write_indexer_cache",
        index_keys,
        check_write_index,
        {"tokens": 777},
        written=("cache",),
        hostile=slots_of_both(partial(other_tokens, index=True), tokens=9),
    ),
    Case(
        "read_indexer_cache",
        index_slots,
        check_read_index,
        {"tokens": 777},
        hostile=slots_of_both(PER_ROW.kept, tokens=9),
    ),
    Case(
        "read_indexer_cache into k",
        partial(index_slots, into=True),
        check_read_index,
        {"tokens": 777},
        written=("k", "k_scale"),
    ),
    Case(
        "make_v4_cache",
        lambda new, pages=3, page_size=4: {"pages": pages, "page_size": page_size, "device": new.device},
        check_new_cache,
    ),
    *latent_cases(),
    Case(
        "slot_mapping",
        keys,
        check_mapped,
        {"sequences": 33, "ratio": 1},
        hostile=hostile_keys("slot_mapping", "block_table", "cu_seqlens", "cache_seqlens"),
    ),
    Case(
        "slot_mapping ring",
        partial(keys, kind="ring"),
        check_mapped,
        {"sequences": 33, "pages": 1, "ratio": 4},
        hostile=hostile_keys("ring", "block_table", "cu_seqlens", "cache_seqlens", pages=1, ring=True),
    ),
    Case(
        "slot_mapping all",
        partial(keys, kind="all"),
        check_mapped,
        {"sequences": 33},
        hostile=hostile_keys("all", "block_table", "cu_seqlens")
        | hostile_keys("all", "block_table", "cu_seqlens", pages=1, ring=True),
    ),
]
