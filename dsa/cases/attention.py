"""Parts that the cases of attention ops share: attention in float64, tolerances, random numbers, index lists, caches,
packed sequences, and the results that an invalid number in an index tensor cannot change."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

import dsa
from dsa.cases.case import BF16, F32, PER_ROW, Given, Hostile, Kept, Maker, Results
from dsa.testing import assert_close, poisoned

FP16, INF = torch.float16, torch.inf
D_V = 512
# Pairs (tolerances of out, tolerances of the LSE and of the largest logit) for 16-bit results, from FlashMLA's tests.
# The keys are arguments of `assert_close`.
PREFILL_TOLERANCES = (
    {"abs_tol": 8e-4, "rel_tol": 3.01 / 128, "cos_tol": 7e-6},
    {"abs_tol": 1e-6, "rel_tol": 2.01 / 65536},
)
DENSE_TOLERANCES = {"abs_tol": 8e-4, "rel_tol": 2.01 / 128, "cos_tol": 5e-6}, {"abs_tol": 1e-6, "rel_tol": 8.01 / 65536}
SPARSE_TOLERANCES = (
    {"abs_tol": 1e-3, "rel_tol": 2.01 / 128, "cos_tol": 5e-6},
    {"abs_tol": 1e-6, "rel_tol": 8.01 / 65536},
)
FP32_TOLERANCES = {"abs_tol": 2e-5, "rel_tol": 2e-5}
# `attend_lists` gathers keys into a float64 tensor of at most this number of elements: 512 MiB on a GPU, 8 MiB on a
# CPU.
_CHUNK, _CPU_CHUNK = 2**26, 2**20


# Attention in float64.


class Attended(NamedTuple):
    """Results of attention in float64, for T queries with H heads each.

    out      [T, H, dv], 0 for a query without keys
    lse      [T, H], natural log, without the sink; +inf for a query without keys
    largest  [T, H], the largest scaled logit; -inf for a query without keys
    size     [T, H, dv], `out` computed with the values' magnitudes; rounding errors of `out` are proportional to `size`
    """

    out: torch.Tensor
    lse: torch.Tensor
    largest: torch.Tensor
    size: torch.Tensor


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    sink: torch.Tensor | None = None,
) -> Attended:
    """Return attention in float64: out[t] = sum_j softmax_j(scale * q[t] . k[j]) v[j] over the j where visible[t, j].

    q        [T, H, d]. Query head h uses key head h // (H / Hk)
    keys     [N, Hk, d], and values [N, Hk, dv], N >= 1. If each query has its own keys: [T, N, Hk, d], [T, N, Hk, dv]
    visible  bool [T, N]
    sink     [H]: out is scaled by e^lse / (e^lse + e^sink). None: no sink
    """
    own = "t" if keys.dim() == 4 else ""
    logits = torch.einsum(f"tkgd,{own}nkd->tkgn", q.double().unflatten(1, (keys.shape[-2], -1)), keys.double()) * scale
    logits = logits.masked_fill(~visible[:, None, None], -INF)
    lse = logits.logsumexp(3)
    empty = lse == -INF
    weights = (logits - lse.masked_fill(empty, 0.0)[..., None]).exp()
    if sink is not None:
        left = torch.sigmoid(lse - sink.double().view(lse.shape[1:]))
        weights *= left.masked_fill(empty, 0.0)[..., None]
    out, size = (
        torch.einsum(f"tkgn,{own}nkd->tkgd", weights, x.double()).flatten(1, 2) for x in (values, values.abs())
    )
    return Attended(out, lse.masked_fill(empty, INF).flatten(1), logits.amax(3).flatten(1), size)


def attend_lists(
    q: torch.Tensor,
    keys: torch.Tensor,
    lists: torch.Tensor,
    scale: float,
    d_v: int = D_V,
    sink: torch.Tensor | None = None,
) -> Attended:
    """Return the attention (`attend`) of each query to the keys that the query's list names.

    keys   [N, d]. The values are the first d_v channels. Rows that are in no list may contain NaN
    lists  [T, K]: rows of keys, -1 for no key
    """
    padded = torch.cat((keys, keys.new_zeros(1, keys.shape[1])))  # index -1 reads row N, all zeros
    lists = torch.nn.functional.pad(lists.long(), (0, 1), value=-1)
    numbers = _CPU_CHUNK if q.device.type == "cpu" else _CHUNK
    at_a_time = max(1, numbers // (lists.shape[1] * keys.shape[1]))
    parts = []
    for part, rows in zip(q.split(at_a_time), lists.split(at_a_time)):
        own = padded[rows][:, :, None]
        parts.append(attend(part, own, own[..., :d_v], rows >= 0, scale, sink))
    return Attended(*map(torch.cat, zip(*parts)))


def valid(indices: torch.Tensor, n: int, counts: torch.Tensor | None = None) -> torch.Tensor:
    """Return the indices [..., K] as int64, with -1 in place of indices outside [0, n). With `counts` [...], indices at
    position counts[...] and later positions are -1, too."""
    there = (indices >= 0) & (indices < n)
    if counts is not None:
        there &= torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    return indices.long().where(there, -1)


def check_attended(found: Results, expected: Results, tolerances: tuple[Mapping[str, float], ...]) -> float:
    """Check `found`: out and the statistics that an op returns, lse or (max_logits, lse). Return the largest error of
    out. `expected` has the same order."""
    out, *statistics = found
    error = assert_close("out", out, expected[0], **FP32_TOLERANCES if out.dtype == F32 else tolerances[0])
    for x, right in zip(statistics, expected[1:], strict=True):
        if x.dtype != F32:
            raise AssertionError(f"lse or max_logits: expected fp32, got {x.dtype}")
        assert_close("lse or max_logits", x, right, **tolerances[1])
    return error


def by_sequence(attended: Attended, q: torch.Tensor) -> Results:
    """Return out [B, s_q, H, d_v] and lse [B, H, s_q] from attention for B * s_q query rows. q: [B, s_q, H, d]."""
    out, lse = (x.unflatten(0, q.shape[:2]) for x in attended[:2])
    return out, lse.transpose(1, 2)


# Numbers and lists.


def small(new: Maker, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Return normal random numbers with standard deviation 0.1, clamped to [-1, 1]. The absolute tolerances above
    assume keys and values of this size."""
    return (new.f32(*shape) / 10).clamp(-1, 1).to(dtype)


def no_keys(new: Maker, n: int) -> torch.Tensor:
    return new.ints([-1, n, -(2**31), 2**31 - 1, n + 1, -2])


def spoiled(new: Maker, indices: torch.Tensor, n: int, fraction: float) -> torch.Tensor:
    """Return the indices, each replaced with probability `fraction` by an index outside [0, n)."""
    bad = no_keys(new, n)[new.below(6, *indices.shape).long()]
    replaced = torch.rand(indices.shape, generator=new.generator, device=new.device) < fraction
    return torch.where(replaced, bad, indices)


def some_rows(new: Maker, queries: int, n: int, k: int, invalid: float = 0.0) -> torch.Tensor:
    """Return int32 [queries, k]: random rows below n for each query, all different if k <= n. Each is replaced with
    probability `invalid` by an index outside [0, n)."""
    rows = new.order(queries, n, k) if k <= n else new.below(max(n, 1), queries, k)
    return spoiled(new, rows.int(), n, invalid)


# Caches.

# layout -> (channels d of queries and latents, dtype of the queries). "any scales": half of the rows have scales that
# `write_kv_cache` would not write. "unpadded": pages are adjacent in memory, without the padding of `make_v4_cache`.
LAYOUTS = {
    "bf16, 576": (576, BF16),
    "bf16, 512": (512, BF16),
    "bf16, 160": (160, BF16),
    "fp16, 576": (576, FP16),
    "fp16, 512": (512, FP16),
    "656 bytes": (576, BF16),
    "656 bytes, any scales": (576, BF16),
    "584 bytes": (512, BF16),
    "584 bytes, unpadded": (512, BF16),
}


def empty_cache(device: str, layout: str, pages: int, page: int) -> torch.Tensor:
    """Return a cache filled with NaN (in byte caches with bytes of 0xFF), also in the padding between pages."""
    d, dtype = LAYOUTS[layout]
    if layout == "584 bytes":
        cache = dsa.make_v4_cache(pages, page, device)
        cache.as_strided((pages * cache.stride(0),), (1,)).fill_(0xFF)
        return cache
    if "bytes" in layout:
        return poisoned((pages, page, 1, int(layout[:3])), torch.uint8, device)
    return poisoned((pages, page, 1, d), dtype, device)


def filled_cache(new: Maker, layout: str, rows: int, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (a cache, its written slots in random order). About half of the slots are written, `rows` in all; the
    others are NaN."""
    pages = -(-2 * rows // page) + 1
    cache = empty_cache(new.device, layout, pages, page)
    slots = new.order(1, pages * page, rows)[0]
    any_scales = layout.endswith("any scales")
    kv = small(new, rows, LAYOUTS[layout][0], dtype=F32)
    dsa.reference.write_kv_cache(kv, cache, slots, use_ue8m0=not any_scales)
    # `write_kv_cache` computes each scale from the largest number of a group, but callers may write any scale. So
    # multiply the scales of half of the rows by random factors.
    if any_scales:
        scales = cache.view(-1, 656)[:, 512:528].view(F32)
        some = slots[: rows // 2]
        factors = torch.rand(len(some), 4, generator=new.generator, device=new.device)
        scales[some] = scales[some] * (0.5 + factors)
    return cache, slots


def all_rows(cache: torch.Tensor) -> torch.Tensor:
    """Return every slot of the cache as fp32 [slots, d]."""
    slots = torch.arange(cache.shape[0] * cache.shape[1], device=cache.device)
    return dsa.reference.read_kv_cache(cache, slots)


# Packed sequences.

# (queries, keys) of each sequence.
SEQUENCES = ((0, 0), (1, 1), (50, 50), (0, 30), (17, 300), (3, 0), (130, 130), (5, 2), (1, 900))
# (queries, keys) of each sequence for tests of hostile bounds: more queries than a tile has (128), no queries, some
# queries that see no key, and few queries.
FEW_SEQUENCES = ((130, 140), (0, 4), (7, 3), (5, 70))


def bounds(new: Maker, sequences: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
    ends = ([0, *itertools.accumulate(x)] for x in zip(*sequences))
    return dict(zip(("cu_seqlens_q", "cu_seqlens_k"), map(new.ints, ends)))


# The places at which hostile numbers (see case.Hostile) are written, and the results that they cannot change.


def corners(x: torch.Tensor) -> list[Any]:
    """Return the indices of the first and the last element of the first row, and of the last row."""
    rows, last = (0, len(x) - 1), tuple(n - 1 for n in x.shape[1:])
    return list(dict.fromkeys((row, *column) for row in rows for column in ((0,) * len(last), last)))


def everywhere(x: torch.Tensor) -> list[Any]:
    return list(range(len(x)))


def other_sequences(given: Given, place: int) -> Kept:
    """Return a function that keeps the results of all sequences except the two that share the wrong bound."""
    bounds = given["cu_seqlens_q"].tolist()
    spans = [span for b, span in enumerate(itertools.pairwise(bounds)) if b not in (place - 1, place)]
    rows = [row for first, end in spans for row in range(first, end)]
    return lambda results: [x[rows] for x in results]


IN_ROWS, BOUNDS = Hostile(PER_ROW.kept, corners), Hostile(other_sequences, everywhere)


def with_sizes(hostile: Hostile, names: Sequence[str], variants: dict[str, Given]) -> dict[str, Hostile]:
    """Return {"argument variant": `hostile` with the sizes of the variant} for each named argument and variant."""
    return {
        f"{name} {variant}".strip(): Hostile(hostile.kept, hostile.places, sizes, hostile.exact)
        for variant, sizes in variants.items()
        for name in names
    }
