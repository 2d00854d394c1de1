"""Cases of the ops that prepare the lightning indexer's queries and keys, of the ops that compute its scores, and of
the op that plans scores over pages."""

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch

import dsa
from dsa.cases.case import (
    BF16,
    E4M3,
    F32,
    INT32,
    PER_ROW,
    Case,
    Given,
    Hostile,
    Kept,
    Maker,
    Results,
    ends,
    nothing,
    same_bits,
)
from dsa.testing import calc_diff, poisoned

F16, INF = torch.float16, torch.inf


def require(right: bool | torch.Tensor, message: str) -> None:
    if not (right.all() if isinstance(right, torch.Tensor) else right):
        raise AssertionError(message)


def require_same(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    require(got.shape == expected.shape and got.dtype == expected.dtype, f"{name}: shape or dtype is wrong")
    require(torch.equal(got, expected), f"{name}: {int((got != expected).sum())} of {got.numel()} numbers are wrong")


# quantize_indexer_queries, write_indexer_keys


def queries(
    new: Maker, tokens: int = 3, heads: int = 2, dtype: torch.dtype = BF16, rotated: int = 64, **options: Any
) -> Given:
    options = {"interleaved": False, "dims": "first", "use_ue8m0": False} | options
    q, weights = new.f32(tokens, heads, 128).to(dtype), new.f32(tokens, heads)
    return {"q": q, "weights": weights, **new.angles(tokens, rotated), **options}


def keys(
    new: Maker,
    tokens: int | None = None,
    dtype: torch.dtype = BF16,
    rotated: int = 64,
    page_size: int = 64,
    slot_dtype: torch.dtype = INT32,
    **options: Any,
) -> Given:
    """Make arguments of `write_indexer_keys`. With `tokens`, every seventh token has slot -1, and the cache is NaN."""
    options = {"eps": 1e-6, "interleaved": True, "dims": "last", "use_ue8m0": True} | options
    norm = {"norm_weight": new.f32(128), "norm_bias": new.f32(128)}
    if tokens is None:
        tokens, cache = 3, {"cache": new.index_cache(3, 16, 128), "slots": new.ints([7, -1, 40])}
    else:
        pages = 2 * -(-tokens // page_size) + 1
        slots = new.order(1, pages * page_size, tokens)[0].to(slot_dtype)
        slots[1::7] = -1
        cache = {"cache": poisoned((pages, page_size, 1, 132), torch.uint8, new.device), "slots": slots}
    return {"k": (3 * new.f32(tokens, 128) + 1).to(dtype), **norm, **new.angles(tokens, rotated), **cache, **options}


def transformed(x: torch.Tensor, a: Given) -> torch.Tensor:
    """Return H128 rope(x) in float64, rounded to x's dtype after rope and after H128, the Hadamard transform."""
    channels, interleaved = 2 * a["cos"].shape[1], a["interleaved"]
    out, angles = x.double(), torch.complex(a["cos"].double(), a["sin"].double())
    part = out[..., :channels] if a["dims"] == "first" else out[..., 128 - channels :]
    pairs = part.unflatten(-1, (-1, 2)) if interleaved else part.unflatten(-1, (2, -1)).mT
    rotated = torch.complex(pairs[..., 0], pairs[..., 1]) * (angles if x.dim() == 2 else angles[:, None])
    rotated = torch.view_as_real(rotated)
    part.copy_((rotated if interleaved else rotated.mT).flatten(-2))
    signs = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.double, device=x.device)
    hadamard = reduce(torch.kron, [signs] * 7) / 128**0.5
    return (out.to(x.dtype).double() @ hadamard).to(x.dtype).double()


def check_cast(q: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype, use_ue8m0: bool) -> float:
    """Check that q [..., 128] and scale [...] are the FP8 cast of `rows`, up to a rounding error of `dtype` and
    fp32."""
    eps = torch.finfo(dtype).eps + 1e-6
    exact = rows.abs().amax(-1).clamp(min=1e-4) / 448
    if use_ue8m0:  # near a power of two, rounding can give either of two scales
        low, high = ((exact * (1 + e)).log2().ceil().exp2() for e in (-4 * eps, 4 * eps))
        require((scale == low) | (scale == high), "scale: not the next power of two")
    else:
        require((scale - exact).abs() <= 4 * eps * exact, "scale: not the largest number / 448")
    quotients = rows / scale[..., None]
    half_step = quotients.abs().clamp(min=2.0**-6).log2().floor().exp2() / 16
    error = (quotients - q.double()).abs()
    require(error <= half_step + eps * (quotients.abs() + 256), "values: not the nearest numbers of e4m3")
    return error.max().item() if error.numel() else 0.0


def check_queries(a: Given, found: Results) -> float:
    """Require the reference's bits, and compare with float64."""
    for name, got, right in zip(("q", "weights"), found, dsa.reference.quantize_indexer_queries(**a), strict=True):
        require(got.is_contiguous() and same_bits(got, right), f"{name}: not the reference's bits")
    q, weights = found
    scale = weights.double() / a["weights"].double()
    return check_cast(q, scale, transformed(a["q"], a), a["q"].dtype, a["use_ue8m0"])


def by_slot(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of an index cache by slot: values [slots, D] and scales [slots, 4]."""
    page_size, dim = cache.shape[1], cache.shape[3] - 4
    raw = cache.flatten(1)
    return raw[:, : page_size * dim].reshape(-1, dim), raw[:, page_size * dim :].reshape(-1, 4)


def check_keys(a: Given, found: Results) -> float:
    """Compare with float64 and with the reference.

    The kernel adds the norm's sums in another order than the reference, so a few bytes may differ. Slots to which no
    token is written must keep their bytes.
    """
    (cache,), before, slots = found, a["cache"], a["slots"].long()
    there = (slots >= 0) & (slots < before.shape[0] * before.shape[1])
    expected = before.clone()
    dsa.reference.write_indexer_keys(**a | {"cache": expected, "slots": slots.where(there, -1)})
    written = int(there.sum())
    # Without ue8m0, the last bit of every scale can differ as well: one byte per token.
    most = 2 + 2e-3 * 132 * written + (0 if a["use_ue8m0"] else written)
    require((cache != expected).sum() <= most, "cache: many bytes differ from the reference's")
    others = torch.ones(before.shape[0] * before.shape[1], dtype=torch.bool, device=slots.device)
    others[slots[there]] = False
    for now, then in zip(by_slot(cache), by_slot(before)):
        require_same("other slots of the cache", now[others], then[others])
    values, scales = (x[slots[there]] for x in by_slot(cache))
    x = a["k"].double() - a["k"].double().mean(1, keepdim=True)
    normed = x / (x.square().mean(1, keepdim=True) + a["eps"]).sqrt()
    normed = (normed * a["norm_weight"].double() + a["norm_bias"].double()).to(a["k"].dtype)
    rows, scale = transformed(normed, a)[there], scales.view(F32)[:, 0].double()
    return check_cast(values.view(E4M3), scale, rows, a["k"].dtype, a["use_ue8m0"])


def other_slots(given: Given, place: tuple[int, ...]) -> Kept:
    """Return a function that keeps the bytes of all slots except the slot that is at `place` in the valid call."""
    kept = torch.arange(given["cache"].shape[0] * given["cache"].shape[1], device=given["slots"].device)
    kept = kept != given["slots"][place]
    return lambda results: [x[kept] for x in by_slot(results[0])]


# Scores and the bounds of their errors. calc_diff over a matrix does not notice a single wrong score, so every score
# has a bound as well. A score is a sum of terms w k_scale q[d] k[d] over heads and channels. Terms cancel in the sum,
# so rounding errors are proportional to the sum of the terms' magnitudes ("all terms" below) and not to the score.
#
# fp32 accumulators: Hopper's FP8 wgmma adds 32 products and the accumulator. It aligns these addends to the largest one
# and truncates them 13 bits below the largest one's leading bit. So each addend loses up to 2^-13 = 1.2e-4 of the
# largest addend. The largest addend is a tenth to a third of the sum of a head's terms. The errors of addends and heads
# have both signs. Together they stay below 5e-5 of all terms. All other steps are in fp32.
#
# fp16 accumulators: sums over 32 channels, weights, and sums over a lane's heads (at most eight) are rounded to 11
# bits, each by up to 4.9e-4 of the value. These errors have both signs. Together they stay below 3e-4 of all terms.
#
# The bounds below are at least ten times these figures. For comparison, a typical score is 1.4% of all terms with 64
# heads of 128 channels, and more with fewer heads or channels. The reference in PyTorch computes all steps in fp32 and
# is far more accurate than the kernels.
OF_TERMS = {F32: 1e-3, F16: 3e-3}  # error bound / sum of the terms' magnitudes, by the accumulators' dtype
OF_TERMS_IN_PYTORCH = 1e-5
MOST_DIFF = {F32: 5e-6, BF16: 3e-5}  # limit of calc_diff, by the scores' dtype, from DeepGEMM's tests
BF16_ROUNDING = 2.0**-8  # largest rounding error of a bf16 score / score
RANGES = ("cu_seq_len_k_start", "cu_seq_len_k_end")


def check_scores(got: torch.Tensor, expected: torch.Tensor, terms: torch.Tensor, of_terms: float) -> float:
    """Check that each score is within its bound, that -inf is where it is expected, and that calc_diff is small.

    terms     for each score, the sum of the terms' magnitudes; used only where the expected score is finite
    of_terms  the error bound of a score, as a fraction of `terms`

    Return calc_diff.
    """
    diff = calc_diff(got, expected)
    require(diff < MOST_DIFF[got.dtype], f"scores: calc_diff {diff:.3g} is above {MOST_DIFF[got.dtype]}")
    seen = expected != -INF
    got, expected, terms, rounding = got[seen], expected[seen], terms[seen], BF16_ROUNDING * (got.dtype == BF16)
    excess = (got.double() - expected).abs() - rounding * expected.abs() - of_terms * terms
    wrong = int((~(excess <= 0)).sum())
    require(wrong == 0, f"scores: {wrong} of {excess.numel()} are off by more than rounding")
    return diff


def scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> Results:
    """Return (scores, sums of their terms' magnitudes) in float64. A score, for query t and key s, is sum_h weights[t,
    h] * relu(q[t, h] . k[s]), without the key's scale."""
    k, chunk = k.double(), max(1, 2**26 // max(1, q.shape[1] * len(k)))
    parts = [
        ((w[:, None] @ (x @ k.T).relu())[:, 0], (w.abs()[:, None] @ (x.abs() @ k.abs().T))[:, 0])
        for x, w in zip(q.double().split(chunk), weights.double().split(chunk))
    ]
    return [torch.cat(x) for x in zip(*parts)]


def scored(new: Maker, queries: int, keys: int, heads: int, dim: int, exact: bool) -> Given:
    """Make q, kv and weights of random numbers.

    exact: make small integers, whose sums are exact in any order. Every key then occurs twice, so that scores tie.
    """
    if not exact:
        kv = new.e4m3(keys, dim), new.positive(keys)
        return {"q": new.e4m3(queries, heads, dim), "kv": kv, "weights": new.f32(queries, heads)}
    half = -(-keys // 2)
    k, scale = (new.below(5, half, dim) - 2).to(E4M3), (new.below(3, half) + 1).float()
    q, weights = (new.below(5, queries, heads, dim) - 2).to(E4M3), (new.below(5, queries, heads) - 2).float()
    return {"q": q, "kv": (torch.cat((k, k))[:keys], torch.cat((scale, scale))[:keys]), "weights": weights}


def ranges(new: Maker, queries: int, keys: int, window: int) -> Given:
    """Make a range of keys per query. With `window`: causal ranges of at most that many keys. Otherwise some ranges are
    empty or reach beyond the keys."""
    if not queries:
        return dict(zip(RANGES, (new.ints([0, 2, 5]), new.ints([7, 5, 5]))))
    if window:
        last = torch.arange(keys - queries + 1, keys + 1, dtype=INT32, device=new.device)
        return dict(zip(RANGES, ((last - window).clamp(min=0), last)))
    return dict(zip(RANGES, (new.below(keys + 6, queries) - 5, new.below(keys + 100, queries))))


# fp8_mqa_logits, mqa_logits


def contiguous(
    new: Maker,
    queries: int = 0,
    keys: int = 7,
    heads: int = 8,
    dim: int = 32,
    window: int = 0,
    exact: bool = False,
    **options: Any,
) -> Given:
    options = {"clean_logits": True, "max_seqlen_k": 0, "logits_dtype": F32, "accumulators": F16} | options
    return {**scored(new, queries or 3, keys, heads, dim, exact), **ranges(new, queries, keys, window), **options}


def unquantised(new: Maker, dtype: torch.dtype = BF16, **sizes: Any) -> Given:
    given = contiguous(new, **sizes)
    q, k = given["q"].to(dtype), given["kv"][0].to(dtype)
    return {"q": q, "k": k, "weights": given["weights"], **{name: given[name] for name in RANGES}}


def clipped(a: Given, keys: int) -> list[torch.Tensor]:
    return [a[name].long().clamp(0, keys) for name in RANGES]


def check_logits(a: Given, found: Results) -> float:
    (got,), (k, scale), width = found, a["kv"], a["max_seqlen_k"]
    first, last = (x[:, None] for x in clipped(a, len(k)))
    expected, terms = (x * scale for x in scores(a["q"], k, a["weights"]))
    key = torch.arange(width or len(k), device=got.device).expand(len(got), -1)
    if width:
        key = key + first
        expected, terms = (x.gather(1, key.clamp(max=len(k) - 1)) for x in (expected, terms))
    expected = expected.where((key >= first) & (key < last), -INF)
    return check_matrix(a, got, expected, terms)


def check_matrix(a: Given, got: torch.Tensor, expected: torch.Tensor, terms: torch.Tensor) -> float:
    """Check the scores that an op returns: dtype, row strides that are multiples of 1024 bytes, and values. Columns
    that a query does not see are checked only if `clean_logits` is set."""
    require(got.dtype == a["logits_dtype"], f"logits: dtype {got.dtype}")
    require(got.stride(0) * got.element_size() % 1024 == 0 and got.stride(1) == 1, f"logits: strides {got.stride()}")
    if not a["clean_logits"]:
        got = got.where(expected != -INF, -INF)
    return check_scores(got, expected, terms, OF_TERMS[a["accumulators"]] if got.is_cuda else OF_TERMS_IN_PYTORCH)


def check_unquantised(a: Given, found: Results) -> float:
    (got,), key = found, torch.arange(len(a["k"]), device=a["k"].device)
    first, last = (x[:, None] for x in clipped(a, len(key)))
    expected, terms = scores(a["q"], a["k"], a["weights"])
    return check_scores(got, expected.where((key >= first) & (key < last), -INF), terms, OF_TERMS_IN_PYTORCH)


# get_paged_mqa_logits_metadata, fp8_paged_mqa_logits


def planned(new: Maker, batch: int = 0, next_n: int = 0, block_kv: int = 32, num_sms: int = 5) -> Given:
    """Make arguments of `get_paged_mqa_logits_metadata`. With next_n there is a length per query instead of per
    sequence. With `batch`, some lengths are 0 or negative."""
    if not batch:
        return {"context_lens": new.ints([70, 0]), "block_kv": block_kv, "num_sms": num_sms}
    shape = (batch, next_n) if next_n else (batch,)
    lengths = (new.below(5000, *shape) - 50) * (new.below(5, *shape) > 0)
    return {"context_lens": lengths.int(), "block_kv": block_kv, "num_sms": num_sms}


def check_plan(a: Given, found: Results) -> float:
    """Check that the plan divides the splits of 256 keys evenly among the SMs, in order. Each SM's entry must name the
    first split of the SM: an existing split, or the end of all sequences."""
    (plan,), lengths, sms = found, a["context_lens"].long().clamp(min=0), a["num_sms"]
    lengths = lengths if lengths.dim() == 1 else lengths.amax(1)
    splits = ((lengths + 255) // 256).clamp(max=(2**31 - 1) // max(1, len(lengths)))
    total = splits.sum()
    share = (total // sms).repeat(sms) + (torch.arange(sms, device=plan.device) >= sms - total % sms)
    first = torch.cat((share.new_zeros(1), share.cumsum(0)))
    require(plan.dtype == INT32 and plan.shape == (sms + 1, 2), "plan: shape or dtype is wrong")
    sequence, split = plan.long().unbind(1)
    require((sequence >= 0) & (sequence <= len(lengths)), "plan: no such sequence")
    before = torch.cat((splits.new_zeros(1), splits.cumsum(0)))[sequence]
    own = torch.cat((splits, splits.new_ones(1)))[sequence]  # the end of all sequences, (B, 0), has only split 0
    require((split >= 0) & (split < own), "plan: no such split")
    require_same("plan: first splits", before + split, first)
    return 0.0


def in_order(given: Given, place: tuple[int, ...]) -> Kept:
    """Return a function that evaluates properties of a plan for any lengths: whether the entries are in order, whether
    they are in range, and whether the last entry is the end of all sequences."""

    def kept(results: Results) -> Results:
        sequences, splits = results[0].long().unbind(1)
        order = (sequences[1:] > sequences[:-1]) | (sequences[1:] == sequences[:-1]) & (splits[1:] >= splits[:-1])
        count = len(given["context_lens"])
        inside = (sequences >= 0) & (sequences <= count) & (splits >= 0) & (splits < 2**23)
        return [torch.stack((order.all(), inside.all(), sequences[-1] == count))]

    return kept


def paged(
    new: Maker,
    lengths: Sequence[int] = (),
    next_n: int = 2,
    heads: int = 8,
    dim: int = 32,
    page_size: int = 32,
    columns: int = 50,
    spare_pages: int = 3,
    per_query: bool | None = None,
    num_sms: int = 2,
    exact: bool = False,
    **options: Any,
) -> Given:
    """Make arguments of `fp8_paged_mqa_logits` for sequences of these lengths.

    columns    max_context_len, the number of columns of the result
    per_query  whether context_lens has a length per query. None: True in the default call, False with `lengths`
    num_sms    the number of SMs that the plan is for; with 0 the op makes the plan
    """
    if lengths:
        given = in_pages(new, lengths, next_n, heads, dim, page_size, spare_pages, exact)
        if per_query:
            counts = new.below(2**30, len(lengths), next_n) % (given["context_lens"][:, None] + 1)
            counts[:, -1] = given["context_lens"]
            given["context_lens"] = counts
    else:
        tensors = {"q": new.e4m3(2, 2, 8, 32), "kv_cache": new.index_cache(3, 32, 32), "weights": new.f32(4, 8)}
        counts = new.ints([40, 1] if per_query is False else [[39, 40], [0, 1]])
        given = {**tensors, "context_lens": counts, "block_table": new.ints([[2, 0], [1, -1]])}
    plan = dsa.reference.get_paged_mqa_logits_metadata(given["context_lens"], page_size, num_sms) if num_sms else None
    options = {"clean_logits": True, "logits_dtype": F32, "accumulators": F16} | options
    return {**given, "schedule_meta": plan, "max_context_len": columns, **options}


def in_pages(
    new: Maker, lengths: Sequence[int], next_n: int, heads: int, dim: int, page_size: int, spare_pages: int, exact: bool
) -> Given:
    """Make q, weights, lengths, and keys in random pages of a cache whose other bytes are 0xFF (NaN).

    Unused entries of the block table are invalid pages; its last column has only unused entries.
    """
    batch, used = len(lengths), [-(-n // page_size) for n in lengths]
    width, pages = max([*used, 1]) + 1, sum(used) + spare_pages
    garbage = new.ints([-1, 10**8, -(2**31), 2**31 - 1]).repeat(batch * width)
    table = garbage[: batch * width].view(batch, width).clone()
    owned = torch.arange(width, device=new.device) < new.ints(used)[:, None]
    table[owned] = new.order(1, pages, sum(used))[0].int()
    position, counts = torch.arange(width * page_size, device=new.device), new.ints(lengths)
    slots = (table.long()[:, position // page_size] * page_size + position % page_size)[position < counts[:, None]]
    given = scored(new, batch * next_n, len(slots), heads, dim, exact)
    cache = poisoned((pages, page_size, 1, dim + 4), torch.uint8, new.device)
    dsa.reference.write_indexer_cache(*given["kv"], cache, slots)
    q = given["q"].unflatten(0, (batch, next_n))
    return {"q": q, "kv_cache": cache, "weights": given["weights"], "context_lens": counts, "block_table": table}


def visible(a: Given) -> torch.Tensor:
    """Return int64 [B, next_n]: the number of keys that each query sees. It is limited to the columns of the result,
    and to the keys that fit in the pages of a row of the block table."""
    lengths, next_n = a["context_lens"].long(), a["q"].shape[1]
    if lengths.dim() == 1:
        lengths = lengths[:, None] + torch.arange(1 - next_n, 1, device=lengths.device)
    return lengths.clamp(0, min(a["max_context_len"], a["block_table"].shape[1] * a["kv_cache"].shape[1]))


def paged_scores(a: Given) -> torch.Tensor:
    """Compute (scores, sums of their terms' magnitudes) in float64, as one tensor [2, B * next_n, columns]. Both are
    -inf past a query's keys and for keys in missing pages."""
    q, cache, counts, columns = a["q"], a["kv_cache"], visible(a), a["max_context_len"]
    (batch, next_n, _, dim), (pages, page_size) = q.shape, cache.shape[:2]
    raw, of_keys = cache.flatten(1), page_size * dim
    out = torch.full((2, batch, next_n, columns), -INF, dtype=torch.double, device=q.device)
    for b, count in enumerate(counts.amax(1).tolist()):
        table = a["block_table"][b, : -(-count // page_size)].long()
        there = (table >= 0) & (table < pages)
        own = raw[table.where(there, 0)]
        k = own[:, :of_keys].reshape(-1, dim)[:count].view(E4M3)
        scale = own[:, of_keys:].contiguous().view(F32).flatten()[:count]
        hidden = torch.arange(count, device=q.device) >= counts[b][:, None]
        hidden = hidden | ~there.repeat_interleave(page_size)[:count]
        for x, found in zip(out, scores(q[b], k, a["weights"][b * next_n : (b + 1) * next_n])):
            x[b, :, :count] = (found * scale).masked_fill(hidden, -INF)
    return out.flatten(1, 2)


def check_paged(a: Given, found: Results) -> float:
    return check_matrix(a, found[0], *paged_scores(a))


def other_sequences(given: Given, place: tuple[int, ...]) -> Kept:
    """Return a function that keeps the rows of all sequences except the sequence at `place`."""
    batch = len(given["q"])
    others = [b for b in range(batch) if b != place[0]]
    return lambda results: [x.unflatten(0, (batch, -1))[others] for x in results]


# Hostile contents (see case.Hostile)


def first_column(x: torch.Tensor) -> list[Any]:
    return [(*place[:1], *[0] * (x.dim() - 1)) for place in ends(x)]


def two_pages(table: torch.Tensor) -> list[Any]:
    return [(0, 1), (1, table.shape[1] - 1)]


def plan_places(plan: torch.Tensor) -> list[Any]:
    return [(row, column) for row in (0, 3, len(plan) - 1) for column in (0, 1)]


def other_tables(given: Given, place: tuple[int, ...]) -> Kept:
    """Return a function that keeps the rows of all queries except those of sequence place[0]."""
    others = given["row_to_seq"] != place[0]
    return lambda results: [x[others] for x in results]


def per_row(names: Sequence[str], more: str = "", **sizes: Any) -> dict[str, Hostile]:
    """Return hostile contents of the named arguments. block_table is the table of two sequences; any other argument has
    a number per row."""
    kinds = {"block_table": (other_tables, two_pages)}
    return {f"{x} {more}".strip(): Hostile(*kinds.get(x, (PER_ROW.kept, ends)), sizes) for x in names}


def of_pages(**sizes: Any) -> dict[str, Hostile]:
    sizes = {
        "lengths": (130, 70, 5, 190),
        "page_size": 64,
        "heads": 64,
        "dim": 128,
        "columns": 192,
        **sizes,
    }
    found = {
        f"{x} of {n}": Hostile(other_sequences, first_column, {**sizes, "next_n": n})
        for x in ("context_lens", "block_table")
        for n in (1, 4)
    }
    per_query = {**sizes, "next_n": 2, "per_query": True}
    return found | {"context_lens per query": Hostile(other_sequences, first_column, per_query)}


WIDE = {"heads": 64, "dim": 128}
FEW = {"queries": 9, "keys": 200, "window": 150, "exact": True, **WIDE}
LENGTHS = {"lengths": (0, 1, 63, 64, 65, 257, 700, 5), "page_size": 64, "columns": 720, **WIDE}
_SLOTS = {
    name: Hostile(other_slots, ends, {"tokens": 9, "slot_dtype": x})
    for name, x in (("slots int32", INT32), ("slots int64", torch.int64))
}
_PLANS = {
    name: Hostile(in_order, first_column, {"batch": 300, "next_n": n, "block_kv": 64, "num_sms": 132})
    for name, n in (("context_lens", 0), ("context_lens per query", 2))
}
_META = {
    f"schedule_meta of {n}": Hostile(nothing, plan_places, {**LENGTHS, "next_n": n, "num_sms": 7, "accumulators": F32})
    for n in (1, 4)
}
CASES = [
    Case("quantize_indexer_queries", queries, check_queries, {"tokens": 37, "heads": 5}),
    Case(
        "write_indexer_keys",
        keys,
        check_keys,
        {"tokens": 130, "page_size": 64},
        written=("cache",),
        hostile=_SLOTS,
    ),
    Case(
        "fp8_mqa_logits",
        contiguous,
        check_logits,
        {"queries": 37, "keys": 333, **WIDE},
        hostile=per_row(RANGES, **FEW, accumulators=F32),
    ),
    Case(
        "fp8_mqa_logits compressed",
        partial(contiguous, max_seqlen_k=5, logits_dtype=BF16, accumulators=F32),
        check_logits,
        {"queries": 37, "keys": 333, "max_seqlen_k": 100, **WIDE},
        hostile=per_row(RANGES, **FEW, max_seqlen_k=60, logits_dtype=F32),
    ),
    Case(
        "mqa_logits",
        unquantised,
        check_unquantised,
        {"queries": 37, "keys": 133, "heads": 16},
        hostile=per_row(RANGES, **FEW),
    ),
    Case(
        "get_paged_mqa_logits_metadata",
        planned,
        check_plan,
        {"batch": 300, "block_kv": 64, "num_sms": 132},
        ({"next_n": 2},),
        hostile=_PLANS,
    ),
    Case(
        "fp8_paged_mqa_logits",
        paged,
        check_paged,
        {**LENGTHS, "next_n": 4, "num_sms": 132},
        ({"per_query": True},),
        hostile={**of_pages(num_sms=0, accumulators=F32), **_META},
    ),
]
