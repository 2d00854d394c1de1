"""Cases of mha_varlen_fwd and selection_bits."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

import dsa
from dsa.cases.attention import (
    FEW_SEQUENCES,
    IN_ROWS,
    INF,
    Attended,
    attend,
    bounds,
    check_attended,
    corners,
    everywhere,
    other_sequences,
    with_sizes,
)
from dsa.cases.case import BF16, PER_ROW, Case, Given, Hostile, Kept, Maker, Results
from dsa.cases.mla import HALF_ULP, equal, sized

BOUND_NAMES = "cu_seqlens_q", "cu_seqlens_k"
PACKED = {"sequences": FEW_SEQUENCES, "rope": 64, "top_k": 60, "more": 0}


def small_mha(new: Maker) -> Given:
    tensors = {"q": new.bf16(5, 4, 192), "k": new.bf16(9, 2, 128), "v": new.bf16(9, 2, 128)}
    numbers = {"cu_seqlens_q": new.ints([0, 2, 5]), "cu_seqlens_k": new.ints([0, 3, 9])}
    options = {"max_seqlen_k": 6, "softmax_scale": 0.1, "causal": True, "dense_keys": 0}
    more = {"k_rope": new.bf16(9, 64), "selected": new.ints([[-1, 3, 0, 7]] * 5), "attn_sink": new.f32(4)}
    return {**tensors, **numbers, **options, **more}


def mha(
    new: Maker,
    sequences: Sequence[tuple[int, int]] = ((77, 77), (0, 5), (9, 130), (30, 3), (129, 200)),
    heads: int = 4,
    kv_heads: int = 2,
    dims: tuple[int, int] = (192, 128),
    rope: int = 0,
    dtype: torch.dtype = BF16,
    causal: bool = True,
    top_k: int = 0,
    scale: float = 1.0,
    more: int = 37,
    sinks: bool = False,
) -> Given:
    """Make packed sequences.

    top_k  number of keys that each query selects, some after the sequence's end. 0: no selection
    scale  factor of the queries
    more   number of queries, and of keys, after the last sequence; they are NaN
    """
    (dim, value_dim), (queries, keys) = dims, (sum(x) for x in zip(*sequences))

    def packed(count: int, *channels: int) -> torch.Tensor:
        x = new.f32(count + more, *channels).to(dtype)
        x[count:] = torch.nan
        return x

    given = {"q": packed(queries, heads, dim) * scale, "k": packed(keys, kv_heads, dim - rope)}
    given |= {"v": packed(keys, kv_heads, value_dim), **bounds(new, sequences)}
    longest = max(n for _, n in sequences)
    selected = None
    if top_k:
        first = [k for (q, _), k in zip(sequences, given["cu_seqlens_k"].tolist()) for _ in range(q)]
        starts = new.ints(first + [0] * more)
        chosen = new.order(queries + more, longest, min(top_k, longest)).int() + starts[:, None]
        selected = dsa.selection_bits(chosen, starts, longest)
    options = {"max_seqlen_k": longest, "softmax_scale": dim**-0.5, "causal": causal, "dense_keys": 0}
    apart = {"k_rope": packed(keys, rope) if rope else None, "attn_sink": new.f32(heads) if sinks else None}
    return {**given, **options, **apart, "selected": selected}


def keys_of_bits(bits: torch.Tensor) -> torch.Tensor:
    """Return bool [T, 32 * words]: for each row and key, whether the key's bit is set. bits: a result of
    `selection_bits`."""
    key = torch.arange(32 * bits.shape[1], device=bits.device)
    word, bit = key // 128 * 4 + key % 8 // 2, key % 128 // 8 * 2 + key % 2
    return (bits[:, word] >> bit & 1).bool()


def attend_sequences(a: Given) -> Attended:
    """Compute attention per sequence. Queries without keys, and queries of no sequence, have out 0 and lse +inf."""
    q, k, v = a["q"], a["k"], a["v"]
    if a["k_rope"] is not None:
        k = torch.cat((k, a["k_rope"][:, None].expand(-1, k.shape[1], -1)), 2)
    out = q.new_zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    lse = torch.full(q.shape[:2], INF, dtype=torch.float64, device=q.device)
    whole = Attended(out, lse, -lse, torch.zeros_like(out))
    spans = (itertools.pairwise(a[name].tolist()) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    for (begin, end), (first, last) in zip(*spans):
        if begin == end or first == last:
            continue
        visible = torch.ones(end - begin, last - first, dtype=torch.bool, device=q.device)
        if a["causal"]:
            visible = visible.tril((last - first) - (end - begin))
        if a["selected"] is not None:
            looked_up = visible.sum(1, keepdim=True) > a["dense_keys"]
            visible = visible & (keys_of_bits(a["selected"][begin:end])[:, : last - first] | ~looked_up)
        found = attend(q[begin:end], k[first:last], v[first:last], visible, a["softmax_scale"])
        for x, rows in zip(whole, found):
            x[begin:end] = rows
    if a["attn_sink"] is not None:
        shares = (lse - a["attn_sink"].double()).sigmoid().masked_fill(lse == INF, 1.0)  # INF: no keys, so out is 0
        out.mul_(shares[..., None])
    return whole


def check_mha(a: Given, found: Results) -> float:
    """Check the queries that belong to a sequence, with about the tolerances of FlashAttention's tests."""
    rows = slice(int(a["cu_seqlens_q"][0]), int(a["cu_seqlens_q"][-1]))
    expected, rounding = attend_sequences(a), 2.01 * HALF_ULP[a["q"].dtype]
    out = {"abs_tol": 4 * rounding, "rel_tol": rounding, "cos_tol": 2e-5}
    tolerances = out, {"abs_tol": 2e-5, "rel_tol": 2e-6}
    return check_attended([found[0][rows], found[1].T[rows]], [x[rows] for x in expected[:2]], tolerances)


def small_bits(new: Maker) -> Given:
    return {"indices": new.ints([[0, 3, -1], [130, 5, 9]]), "starts": new.ints([0, 2]), "max_keys": 140}


def bits(new: Maker, tokens: int = 40, top_k: int = 100, max_keys: int = 300, starts: bool = True) -> Given:
    first = new.below(1000, tokens) * starts
    listed = first[:, None] + new.below(max_keys + 10, tokens, top_k) - 5
    return {"indices": listed, "starts": first if starts else None, "max_keys": max_keys}


def check_bits(a: Given, found: Results) -> float:
    indices, blocks = a["indices"].long(), -(-a["max_keys"] // 128)
    key = indices if a["starts"] is None else indices - a["starts"].long()[:, None]
    there = (indices >= 0) & (key >= 0) & (key < a["max_keys"])
    expected = torch.zeros(len(indices), 128 * blocks + 1, dtype=torch.bool, device=indices.device)
    expected.scatter_(1, key.where(there, 128 * blocks), True)
    return equal("bits", keys_of_bits(found[0]), expected[:, :-1])


def by_query(kept: Callable[[Given, Any], Kept]) -> Callable[[Given, Any], Kept]:
    """Adapt `kept`, which selects rows, to the results out [T, H, d] and lse [H, T]. lse is transposed to [T, H]
    first."""
    return lambda given, place: lambda results: kept(given, place)([results[0], results[1].T])


CASES = [
    Case(
        "mha_varlen_fwd",
        sized(small_mha, mha),
        check_mha,
        {
            "rope": 64,
            "top_k": 60,
            "more": 0,  # because results for rows that belong to no sequence are undefined
            "sinks": True,
        },
        hostile={
            **with_sizes(Hostile(by_query(other_sequences), everywhere), BOUND_NAMES, {"": PACKED}),
            **with_sizes(Hostile(by_query(PER_ROW.kept), corners), ("selected",), {"": PACKED}),
        },
    ),
    Case(
        "selection_bits",
        sized(small_bits, bits),
        check_bits,
        {"tokens": 40},
        hostile=with_sizes(IN_ROWS, ("indices", "starts"), {"": {"tokens": 6, "top_k": 5, "max_keys": 200}}),
    ),
]
