"""Cases of flash_mla_sparse_fwd, flash_mla_with_kvcache and its plans, and merge_attention."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

import dsa
from dsa.cases.attention import (
    D_V,
    DENSE_TOLERANCES,
    FP16,
    IN_ROWS,
    INF,
    LAYOUTS,
    PREFILL_TOLERANCES,
    SPARSE_TOLERANCES,
    Attended,
    all_rows,
    attend_lists,
    by_sequence,
    check_attended,
    corners,
    everywhere,
    filled_cache,
    small,
    some_rows,
    spoiled,
    valid,
    with_sizes,
)
from dsa.cases.case import BF16, F32, PER_ROW, Case, Given, Hostile, Kept, Maker, Results, nothing
from dsa.kernels.mla.limits import NARROW_DIMS
from dsa.testing import assert_close, poisoned

HALF_ULP = {BF16: 2**-8, FP16: 2**-11, F32: 2**-24}


def sized(default: Callable[[Maker], Given], make: Callable[..., Given]) -> Callable[..., Given]:
    """Return a maker that calls `default` if no sizes are given, else `make`."""
    return lambda new, **sizes: make(new, **sizes) if sizes else default(new)


def equal(name: str, found: torch.Tensor, expected: torch.Tensor) -> float:
    if not torch.equal(found.long(), expected.long()):
        wrong = (found != expected).nonzero()[:1].tolist()
        raise AssertionError(f"{name}: not as expected, first at {wrong}")
    return 0.0


def check_scales(scale: torch.Tensor, low: torch.Tensor, high: torch.Tensor, use_ue8m0: bool) -> None:
    """Check the scales of FP8 blocks whose largest magnitudes are between low and high."""
    low, high = low.clamp_min(1e-4) / 448, high.clamp_min(1e-4) / 448
    if use_ue8m0:
        low, high = 2.0 ** low.log2().ceil(), 2.0 ** high.log2().ceil()
        if not (scale.frexp().mantissa == 0.5).all():
            raise AssertionError("scale: expected powers of two")
    if not ((scale >= low * (1 - 1e-6)) & (scale <= high * (1 + 1e-6))).all():
        raise AssertionError(
            f"scale: expected from {low.flatten()[:4]} to {high.flatten()[:4]}, got {scale.flatten()[:4]}"
        )


def check_unbiased(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that rounding has no bias: the mean of found / expected, over large numbers, must be near 1."""
    sizes = expected.abs()
    large = sizes > sizes.amax() / 20 if sizes.numel() else sizes > 0
    ratio = (found[large] / expected[large]).mean().item() if large.sum() > 1000 else 1.0
    if not abs(ratio - 1) <= 4e-3:
        raise AssertionError(f"{name}: {ratio:.4f} times what it should be")


# flash_mla_sparse_fwd


def small_prefill(new: Maker) -> Given:
    tensors = {"q": new.bf16(3, 2, 576), "kv": new.bf16(5, 1, 576)}
    tensors["indices"] = new.ints([[[0, 3, -1, 3]], [[4, 1, 2, 0]], [[5, -1, -1, -7]]])
    rest = {"attn_sink": new.f32(2), "topk_length": new.ints([4, 2, 0])}
    return {**tensors, "sm_scale": 0.04, "d_v": D_V, **rest, "out": None, "enable_batch_invariant": False}


def small_prefill_into(new: Maker) -> Given:
    given = small_prefill(new) | {"attn_sink": None, "topk_length": None, "enable_batch_invariant": True}
    return given | {"out": new.bf16(3, 2, D_V)}


def prefill(
    new: Maker,
    tokens: int = 5,
    heads: int = 128,
    keys: int = 5000,
    top_k: int = 512,
    d: int = 576,
    dtype: torch.dtype = BF16,
    d_v: int = D_V,
    invalid: float = 0.1,
    sink: bool = True,
    counted: bool = False,
    scale: float | None = None,
    into: bool = False,
    invariant: bool = False,
) -> Given:
    given = {"q": new.f32(tokens, heads, d).to(dtype), "kv": small(new, keys, 1, d, dtype=dtype)}
    given["indices"] = some_rows(new, tokens, keys, top_k, invalid)[:, None]
    lengths = new.below(top_k + 9, tokens) - 4
    lengths[:1], lengths[1:2] = top_k, 0
    return {
        **given,
        "sm_scale": d**-0.5 if scale is None else scale,
        "d_v": d_v,
        "attn_sink": new.f32(heads) if sink else None,
        "topk_length": lengths if counted else None,
        "out": poisoned((tokens, heads, d_v), dtype, new.device) if into else None,
        "enable_batch_invariant": invariant,
    }


def check_prefill(a: Given, found: Results) -> float:
    lists = valid(a["indices"][:, 0], len(a["kv"]), a["topk_length"])
    out, lse, largest, _ = attend_lists(a["q"], a["kv"][:, 0], lists, a["sm_scale"], a["d_v"], a["attn_sink"])
    return check_attended(found[:3], (out, largest, lse), PREFILL_TOLERANCES)


# flash_mla_with_kvcache

SELECTION = ("indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length")
NO_PLAN = {"tile_scheduler_metadata": None, "num_splits": None}


def small_dense(new: Maker) -> Given:
    keys = {"block_table": new.ints([[1, 0], [2, -1]]), "cache_seqlens": new.ints([20, 1])}
    tensors = {"q": new.bf16(2, 2, 2, 576), "k_cache": new.float_cache(3, 16, 576), **keys, "head_dim_v": D_V}
    plan = {"tile_scheduler_metadata": dsa.get_mla_metadata()[0], "num_splits": None}
    options = {"softmax_scale": None, "causal": True, "is_fp8_kvcache": False, "enable_batch_invariant": False}
    return {**tensors, **plan, **options, **dict.fromkeys(SELECTION), "out": None}


def small_dense_into(new: Maker) -> Given:
    return small_dense(new) | NO_PLAN | {"out": new.bf16(2, 2, 2, D_V)}


def small_old_plan(new: Maker) -> Given:
    keys = {"block_table": new.ints([[1, 0], [2, -1]]), "cache_seqlens": new.ints([20, 0])}
    tensors = {"q": new.bf16(2, 1, 4, 576), "k_cache": new.float_cache(3, 16, 576), **keys, "head_dim_v": D_V}
    options = {"softmax_scale": 0.05, "causal": False, "is_fp8_kvcache": False, "enable_batch_invariant": False}
    return {**tensors, **old_plan(tensors), **options, **dict.fromkeys(SELECTION), "out": None}


def old_plan(given: Given) -> Given:
    """Return the plan in the old style that `get_mla_metadata` makes for a call with these arguments."""
    (_, s_q, heads, _), kv_heads = given["q"].shape, given["k_cache"].shape[2]
    plan = dsa.get_mla_metadata(given["cache_seqlens"], s_q * heads // kv_heads, kv_heads)
    return dict(zip(NO_PLAN, plan))


def dense(
    new: Maker,
    lengths: Sequence[int] = (100, 65, 0, 3, 64),
    s_q: int = 2,
    heads: int = 128,
    kv_heads: int = 1,
    page: int = 64,
    d: int = 576,
    dtype: torch.dtype = BF16,
    d_v: int = D_V,
    causal: bool = False,
    invariant: bool = False,
    scale: float | None = None,
    plan: str = "",
    into: bool = False,
    full: bool = False,
) -> Given:
    """Make sequences in random pages of a cache whose other rows are NaN; unused entries of the block table are invalid
    pages.

    plan  "old" or "new": the style of `get_mla_metadata`; "": no plan
    full  no row of the cache is NaN, and every entry of the table is a page
    """
    used = [-(-n // page) for n in lengths]
    cache = poisoned((sum(used) + 3, page, kv_heads, d), dtype, new.device)
    order, width = new.order(1, len(cache), sum(used))[0], max([*used, 1]) + 1
    garbage = new.ints([-1, 2147480000, -(2**31)]).repeat(len(lengths) * width)
    table = garbage[: len(lengths) * width].view(len(lengths), width).clone()
    rows = cache.view(-1, kv_heads, d)
    for b, (n, own) in enumerate(zip(lengths, order.split(used))):
        table[b, : len(own)] = own
        slots = (own[:, None] * page + torch.arange(page, device=new.device)).flatten()[:n]
        rows[slots] = small(new, n, kv_heads, d, dtype=dtype)
    if full:
        cache, table = new.f32(*cache.shape).to(dtype), new.below(len(cache), len(lengths), width - 1)
    q = new.f32(len(lengths), s_q, heads, d).to(dtype)
    given = {"q": q, "k_cache": cache, "block_table": table, "cache_seqlens": new.ints(list(lengths))}
    options = {"softmax_scale": scale, "causal": causal, "is_fp8_kvcache": False, "enable_batch_invariant": invariant}
    plans = {**NO_PLAN, **(old_plan(given) if plan == "old" else {})}
    plans |= {"tile_scheduler_metadata": dsa.get_mla_metadata()[0]} if plan == "new" else {}
    out = poisoned((*q.shape[:3], d_v), dtype, new.device) if into else None
    return {**given, "head_dim_v": d_v, **plans, **options, **dict.fromkeys(SELECTION), "out": out}


def dense_lists(a: Given) -> torch.Tensor:
    """Return [B, s_q, n]: the slots of the keys that each query sees, -1 for no key."""
    table, lengths, s_q = a["block_table"], a["cache_seqlens"].long()[:, None], a["q"].shape[1]
    (pages, page), (_, width) = a["k_cache"].shape[:2], table.shape
    position = torch.arange(int(lengths.clamp(0, width * page).max()) if len(lengths) else 0, device=table.device)
    number = table[:, position // page].long()
    there = (number >= 0) & (number < pages) & (position < lengths)
    slots = (number * page + position % page).where(there, -1)[:, None].expand(-1, s_q, -1)
    if not a["causal"]:
        return slots
    seen = lengths - s_q + torch.arange(1, s_q + 1, device=table.device)
    return slots.where(position < seen[..., None], -1)


def scale_of(a: Given) -> float:
    return a["q"].shape[3] ** -0.5 if a["softmax_scale"] is None else a["softmax_scale"]


def check_dense(a: Given, found: Results) -> float:
    q, cache, lists = a["q"].flatten(0, 1), a["k_cache"], dense_lists(a).flatten(0, 1)
    group, parts = q.shape[1] // cache.shape[2], []
    for h in range(cache.shape[2]):
        keys, own = all_rows(cache[:, :, h : h + 1]), q[:, h * group : (h + 1) * group]
        parts.append(attend_lists(own, keys, lists, scale_of(a), a["head_dim_v"]))
    whole = Attended(*(torch.cat(x, 1) for x in zip(*parts)))
    return check_attended(found[:2], by_sequence(whole, a["q"]), DENSE_TOLERANCES)


def small_selection(new: Maker, d: int, caches: Sequence[torch.Tensor], fp8: bool, into: bool = False) -> Given:
    topk_indices = new.ints([[[0, 30, -1]], [[47, 48, 5]]])
    first = {"k_cache": caches[0], "indices": topk_indices, "topk_length": new.ints([3, 2])}
    more = {"extra_k_cache": caches[1], "extra_indices_in_kvcache": topk_indices[..., :2].clone()}
    options = {"softmax_scale": 0.05, "causal": False, "is_fp8_kvcache": fp8, "enable_batch_invariant": True}
    none = {"block_table": None, "cache_seqlens": None, **NO_PLAN, "head_dim_v": D_V, "attn_sink": new.f32(2)}
    tensors = {"q": new.bf16(2, 1, 2, d), **none, **first, **more, "extra_topk_length": new.ints([2, 1])}
    return {**tensors, **options, "out": new.bf16(2, 1, 2, D_V) if into else None}


def small_sparse(new: Maker) -> Given:
    return small_selection(new, 576, (new.float_cache(3, 16, 576), new.float_cache(2, 5, 576)), False)


def small_v32(new: Maker, into: bool = False) -> Given:
    return small_selection(new, 576, (new.v32_cache(3, 16), new.v32_cache(2, 5)), True, into)


def small_v4(new: Maker) -> Given:
    return small_selection(new, 512, (new.v4_cache(3, 16), new.v4_cache(2, 16)), True)


def sparse(
    new: Maker,
    layout: str = "656 bytes",
    batch: int = 2,
    s_q: int = 1,
    heads: int = 128,
    top_k: int = 512,
    page: int = 64,
    rows: int = 3000,
    extra: tuple[int, int] | None = None,
    invalid: float = 0.05,
    sink: bool = False,
    counted: bool = False,
    invariant: bool = False,
    scale: float | None = None,
    into: bool = False,
) -> Given:
    """Make queries that select random keys of a cache of `rows` keys; all other slots are NaN. extra: (keys per query,
    page size) of a second cache, which has a third of the rows."""
    d, dtype = LAYOUTS[layout]
    d_v = dict(NARROW_DIMS).get(d, D_V)
    given = {"q": new.f32(batch, s_q, heads, d).to(dtype), **dict.fromkeys(SELECTION)}

    def select(cache: str, lists: str, lengths: str, count: int, k: int, size: int) -> None:
        given[cache], slots = filled_cache(new, layout, count, size)
        given[lists] = pick(new, given[cache], slots, batch, s_q, k, invalid)
        counts = new.below(k + 9, batch) - 4
        counts[:1] = k
        given[lengths] = counts if counted else None

    select("k_cache", "indices", "topk_length", rows, top_k, page)
    if extra is not None:
        select("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length", rows // 3, *extra)
    options = {"softmax_scale": scale, "causal": False, "is_fp8_kvcache": "bytes" in layout}
    none = {"block_table": None, "cache_seqlens": None, **NO_PLAN, "head_dim_v": d_v}
    return {
        **given,
        **none,
        **options,
        "attn_sink": new.f32(heads) if sink else None,
        "enable_batch_invariant": invariant,
        "out": poisoned((batch, s_q, heads, d_v), dtype, new.device) if into else None,
    }


def pick(
    new: Maker, cache: torch.Tensor, slots: torch.Tensor, batch: int, s_q: int, k: int, invalid: float = 0.0
) -> torch.Tensor:
    """Return int32 [batch, s_q, k]: random slots. The fraction `invalid` of them is replaced by indices outside the
    cache."""
    places = some_rows(new, batch * s_q, len(slots), k).view(batch, s_q, k).long()
    return spoiled(new, slots[places].int(), cache.shape[0] * cache.shape[1], invalid)


def check_sparse(a: Given, found: Results) -> float:
    keys, lists, begin = [], [], 0
    for cache, indices, counts in (
        ("k_cache", "indices", "topk_length"),
        ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"),
    ):
        if a[cache] is not None:
            rows = all_rows(a[cache])
            named = valid(a[indices], len(rows), None if a[counts] is None else a[counts][:, None])
            keys.append(rows)
            lists.append((named + begin).where(named >= 0, -1).flatten(0, 1))
            begin += len(rows)
    rest = scale_of(a), a["head_dim_v"], a["attn_sink"]
    attended = attend_lists(a["q"].flatten(0, 1), torch.cat(keys), torch.cat(lists, 1), *rest)
    return check_attended(found[:2], by_sequence(attended, a["q"]), SPARSE_TOLERANCES)


# get_mla_metadata


def metadata(new: Maker, lengths: Sequence[int] = (20, 0), rows: int = 4, kv_heads: int = 1) -> Given:
    heads = {"num_q_tokens_per_head_k": rows, "num_heads_k": kv_heads, "num_heads_q": rows * kv_heads}
    return {"cache_seqlens": new.ints(list(lengths)), **heads, "is_fp8_kvcache": False, "topk": None}


def plan_cuts(lengths: Sequence[int], plan: torch.Tensor, splits: torch.Tensor) -> list[list[tuple[int, int]]]:
    """Return, for each sequence, the ranges [first, end) of 64-key tiles that the plan makes. Raise AssertionError if
    the ranges do not cover the sequence once, or if the numbering of splits is wrong."""
    tiles, rows = [-(-max(n, 0) // 64) for n in lengths], plan.tolist()
    cuts: list[list[tuple[int, int]]] = [[] for _ in lengths]
    for first, tile, last, end, index, *_ in rows:
        for b in range(first, last + 1):
            if b == first and len(cuts[b]) != index:
                raise AssertionError(f"plan: sequence {b} has {len(cuts[b])} splits in the parts before, got {index}")
            cuts[b].append((tile if b == first else 0, end if b == last and end < 2**30 else tiles[b]))
    for b, own in enumerate(cuts):
        whole = own and own[0][0] == 0 and own[-1][1] == tiles[b]
        if not whole or any(x[1] != y[0] for x, y in itertools.pairwise(own)):
            raise AssertionError(f"plan: sequence {b} of {tiles[b]} tiles is cut into {own}")
    many = [b for b, own in enumerate(cuts) if len(own) > 1]
    if [row[5] for row in rows] != many + [-1] * (len(rows) - len(many)) or any(row[6] or row[7] for row in rows):
        raise AssertionError(f"plan: expected split sequences {many[:9]} and zeros, got {rows[:9]}")
    numbers = [0, *itertools.accumulate(len(own) if len(own) > 1 else 0 for own in cuts)]
    equal("num_splits", splits.cpu(), torch.tensor(numbers))
    return cuts


def check_plan(a: Given, found: Results) -> float:
    plan_cuts(a["cache_seqlens"].tolist(), *found)
    return 0.0


def decoding_with_the_plan(given: Given, place: Any) -> Kept:
    """Return a function that decodes the valid lengths with a call's plan. A plan for wrong lengths must still give the
    same results, up to rounding."""
    new, lengths = Maker(given["cache_seqlens"].device.type), given["cache_seqlens"]
    q, cache = new.f32(len(lengths), 1, 8, 576).to(FP16), new.f32(30, 16, 1, 576).to(FP16)
    table = new.below(30, len(lengths), 19)
    return lambda plan: dsa.flash_mla_with_kvcache(q, cache, table, lengths, D_V, *plan, 0.05)


# merge_attention


def small_branches(new: Maker) -> Given:
    outs, lses = [new.bf16(3, 2, 16) for _ in range(2)], [new.f32(3, 2) for _ in range(2)]
    return {"outs": outs, "lses": lses, "attn_sink": new.f32(2)}


def branches(
    new: Maker,
    count: int = 3,
    shape: Sequence[int] = (41, 16, 512),
    dtype: torch.dtype = BF16,
    sink: bool = True,
) -> Given:
    """Make branches whose weights vary widely. In each branch a random sixth of the rows has no keys: lse is +inf or
    -inf, and out is NaN."""
    outs, lses = [], []
    for _ in range(count):
        out, lse = new.f32(*shape).to(dtype), 4 * new.f32(*shape[:-1])
        mark = new.below(12, *shape[:-1])
        lse = lse.masked_fill(mark == 0, INF).masked_fill(mark == 1, -INF)
        outs.append(out.masked_fill(lse.isinf()[..., None], torch.nan))
        lses.append(lse)
    return {"outs": outs, "lses": lses, "attn_sink": new.f32(shape[-2]) if sink else None}


def check_merge(a: Given, found: Results) -> float:
    """Compare with float64. The tolerance is half a unit in the last place; for fp32 it covers the rounding of
    intermediate steps."""
    logs = torch.stack([x.double() for x in a["lses"]])
    empty = logs.isinf()
    logs = logs.masked_fill(empty, -INF)
    lse = logs.logsumexp(0)
    nothing = lse == -INF
    weights = (logs - lse.masked_fill(nothing, 0.0)).exp()
    if a["attn_sink"] is not None:
        weights = weights * torch.sigmoid(lse - a["attn_sink"].double()).masked_fill(nothing, 0.0)
    values = torch.stack([x.double() for x in a["outs"]]).masked_fill(empty[..., None], 0.0)
    rounding = 1e-5 if found[0].dtype == F32 else 1.01 * HALF_ULP[found[0].dtype]
    expected = (weights[..., None] * values).sum(0)
    error = assert_close("out", found[0], expected, abs_tol=4e-6, rel_tol=rounding, cos_tol=5e-6)
    assert_close("lse", found[1], lse.masked_fill(nothing, INF), abs_tol=2e-6, rel_tol=1e-6)
    return error


# Hostile contents.


def plan_numbers(x: torch.Tensor) -> list[Any]:
    return [(0, column) for column in range(6)] if x.dim() == 2 else everywhere(x)


# Dense decoding from a cache without NaN. In "cache_seqlens planned here" the op makes the plan. One wrong length
# changes the plan, so the other sequences are split at other tiles and rounded differently. So `exact` is False. A page
# can occur three times in a sequence, and the rounding errors then add up. In bf16 they reach 1.2e-3, too much for the
# tolerance, in fp16 0.13e-3. So this variant uses fp16. A lost key would change a result by 9e-3 or more.
FULL = {"lengths": (300, 5, 70), "page": 16, "full": True, "scale": 0.05, "causal": True}
PLANNED_HERE, WITH_PLAN = {**FULL, "heads": 8}, {**FULL, "heads": 8, "plan": "old", "causal": False}
TWO_ROW_TILES, INVARIANT = {**FULL, "heads": 64, "plan": "old"}, {**PLANNED_HERE, "invariant": True}
DENSE_HOSTILE = {
    "cache_seqlens planned here": Hostile(PER_ROW.kept, corners, {**PLANNED_HERE, "dtype": FP16}, exact=False),
    "block_table planned here": Hostile(PER_ROW.kept, corners, PLANNED_HERE),
    **with_sizes(
        IN_ROWS,
        ("block_table", "cache_seqlens"),
        {"with a plan": WITH_PLAN, "two row tiles": TWO_ROW_TILES, "batch invariant": INVARIANT},
    ),
}
# With a wrong plan any sequence can be left out, so no result is checked.
PLAN_HOSTILE = with_sizes(
    Hostile(nothing, plan_numbers),
    ("tile_scheduler_metadata", "num_splits"),
    {"with a plan": WITH_PLAN, "two row tiles": TWO_ROW_TILES},
)


def sparse_hostile(variants: dict[str, Given]) -> dict[str, Hostile]:
    """Return hostile contents of index lists and their lengths. `variants` should have short and long lists, because
    the kernels split only long lists."""
    common = {"s_q": 2, "page": 16, "rows": 240, "extra": (5, 16), "invalid": 0.0, "counted": True}
    names = "indices", "topk_length", "extra_indices_in_kvcache", "extra_topk_length"
    return with_sizes(IN_ROWS, names, {variant: {**common, **sizes} for variant, sizes in variants.items()})


# Sizes for `check`: the last tiles of keys, heads and queries are partly filled, and some rows have no keys.
PREFILL_SIZES = {"tokens": 7, "heads": 20, "keys": 300, "top_k": 135, "counted": True}
HOSTILE_PREFILL = {"tokens": 3, "keys": 100, "top_k": 70, "counted": True}
DENSE_SIZES = {"lengths": (100, 65, 0, 3, 64), "heads": 20}
SPARSE_SIZES = {"batch": 3, "s_q": 2, "heads": 20, "top_k": 135, "rows": 300, "extra": (70, 16), "sink": True}
HOSTILE_NARROW = {"layout": "bf16, 160", "heads": 33, "top_k": 70, "s_q": 2, "page": 16, "rows": 240, "counted": True}
SPARSE_SIZES |= {"counted": True, "page": 16}
MORE_HEADS = ({"heads": 128},)  # 128 heads select other kernels than few heads

CASES = [
    Case(
        "flash_mla_sparse_fwd",
        sized(small_prefill, prefill),
        check_prefill,
        PREFILL_SIZES,
        (*MORE_HEADS, {"d": 160, "d_v": 128}),
        hostile=with_sizes(
            IN_ROWS,
            ("indices", "topk_length"),
            {
                f"{d}, {heads} heads": {**HOSTILE_PREFILL, "heads": heads, "d": d, "d_v": d_v}
                for d, d_v, heads in ((576, D_V, 64), (512, D_V, 16), (576, D_V, 20), (160, 128, 33))
            },
        ),
    ),
    Case(
        "flash_mla_sparse_fwd into out",
        sized(small_prefill_into, prefill),
        check_prefill,
        {**PREFILL_SIZES, "into": True, "invariant": True},
        written=("out",),
    ),
    Case(
        "flash_mla_with_kvcache dense",
        sized(small_dense, dense),
        check_dense,
        DENSE_SIZES,
        ({"kv_heads": 2}, {"heads": 128}),
        hostile=DENSE_HOSTILE,
    ),
    Case(
        "flash_mla_with_kvcache dense into out",
        sized(small_dense_into, dense),
        check_dense,
        {**DENSE_SIZES, "causal": True, "into": True},
        written=("out",),
    ),
    Case(
        "flash_mla_with_kvcache old plan",
        sized(small_old_plan, dense),
        check_dense,
        {**DENSE_SIZES, "plan": "old"},
        hostile=PLAN_HOSTILE,
    ),
    Case(
        "flash_mla_with_kvcache sparse",
        sized(small_sparse, sparse),
        check_sparse,
        {**SPARSE_SIZES, "layout": "bf16, 576"},
        (*MORE_HEADS, {"layout": "bf16, 160", "extra": None}),
        hostile=sparse_hostile(
            {
                "16 bits": {"layout": "bf16, 576", "heads": 8, "top_k": 70},
                "16 bits, many heads": {"layout": "bf16, 512", "heads": 65, "top_k": 440},
            }
        )
        | with_sizes(IN_ROWS, ("indices", "topk_length"), {"narrow": HOSTILE_NARROW}),
    ),
    Case(
        "flash_mla_with_kvcache v32",
        sized(small_v32, sparse),
        check_sparse,
        SPARSE_SIZES,
        MORE_HEADS,
        hostile=sparse_hostile({"bytes": {"heads": 8, "top_k": 440}}),
    ),
    Case(
        "flash_mla_with_kvcache v32 into out",
        sized(lambda new: small_v32(new, into=True), sparse),
        check_sparse,
        {**SPARSE_SIZES, "into": True, "invariant": True},
        written=("out",),
    ),
    Case(
        "flash_mla_with_kvcache v4",
        sized(small_v4, sparse),
        check_sparse,
        {**SPARSE_SIZES, "layout": "584 bytes"},
        MORE_HEADS,
        hostile=sparse_hostile({"bytes, many heads": {"layout": "584 bytes, unpadded", "heads": 64, "top_k": 70}}),
    ),
    Case(
        "get_mla_metadata",
        metadata,
        check_plan,
        {"lengths": (300, 0, 5, 70_000), "rows": 16},
        hostile={
            "cache_seqlens": Hostile(
                decoding_with_the_plan,
                lambda x: [*everywhere(x), slice(None)],
                {"lengths": (300, 5, 70), "rows": 8},
                False,
            )
        },
    ),
    Case("merge_attention", sized(small_branches, branches), check_merge, {"count": 3}),
]
