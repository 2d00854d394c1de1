"""Cases of DeepSeek-V4's compressor, compress_kv and write_compressed_kv (see dsa/reference/cache/compressed_kv.py)."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch

import dsa
from dsa.cases.cache import (
    INT64,
    every,
    latent_cache,
    normed,
    other_slots,
    other_tokens,
    same,
    same_cache,
    slot_bytes,
    slot_numbers,
    slots_inside,
)
from dsa.cases.case import BF16, INT32, Case, Given, Hostile, Kept, Maker, Results, ends, nothing
from dsa.cases.elementwise import rotated
from dsa.testing import assert_close


def new_tokens(
    new: Maker,
    c: int = 16,
    lengths: Sequence[int] | None = None,
    starts: Sequence[int] | None = None,
    m: int = 4,
    overlap: bool = True,
    dtype: torch.dtype = BF16,
    spare: int = 0,
    with_state: bool = True,
) -> Given:
    """Make the arguments that `compress_kv` and `write_compressed_kv` share.

    c                channels of `kv`
    lengths, starts  numbers of new tokens and of earlier tokens of each sequence. Without a state all starts are 0
    m                tokens per block
    spare            number of extra rows per slot of the state

    With `lengths`, rows of the state that contain no earlier token are NaN.
    """
    poisoned, lengths = lengths is not None, (4, 3) if lengths is None else lengths
    starts = (3,) + (0,) * (len(lengths) - 1) if starts is None else starts
    rows, states = (2 * m if overlap else m) + spare, [2 * b for b in reversed(range(len(lengths)))]
    given = {"kv": new.f32(sum(lengths), c).to(dtype), "gate": (3 * new.f32(sum(lengths), c)).to(dtype)}
    given |= {"ape": new.f32(m, c), "cu_seqlens": new.ints([0, *accumulate(lengths)])}
    if not with_state:
        return {**given, "starts": new.ints([0] * len(lengths)), "state": None, "state_slots": None, "overlap": overlap}
    state = new.f32(2 * len(lengths) - 1, rows, 2, c)
    if poisoned:
        state[1::2] = math.nan
        for slot, start in zip(states, starts):
            state[slot, start:] = math.nan
    return {**given, "starts": new.ints(starts), "state": state, "state_slots": new.ints(states), "overlap": overlap}


def block_ends(a: Given) -> list[tuple[int, int, int]]:
    """Return (sequence, index among all new tokens, position in the sequence) of every new token that ends a block."""
    bounds, m = a["cu_seqlens"].tolist(), len(a["ape"])
    found = [
        (b, token, start + token - low)
        for b, (start, (low, high)) in enumerate(zip(a["starts"].tolist(), pairwise(bounds)))
        for token in range(low, high)
    ]
    return [x for x in found if (x[2] + 1) % m == 0]


def compressed(a: Given) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (entries, tokens) by the formula, in float64: each block that a new token ends, and the index of this
    token."""
    kv, gate, ape, m, overlap = a["kv"].double(), a["gate"].double(), a["ape"].double(), len(a["ape"]), a["overlap"]
    b, token, position = torch.tensor(block_ends(a), dtype=INT64, device=kv.device).view(-1, 3).T
    before = torch.arange(1 - (2 * m if overlap else m), 1, device=kv.device)
    positions, new = position[:, None] + before, token[:, None] + before
    is_new = (positions >= a["starts"].long()[b, None])[..., None]
    k, z = kv[new.clamp(min=0)], gate[new.clamp(min=0)] + ape[positions % m]
    if a["state"] is not None:
        rows = a["state"].double()[a["state_slots"].long()[b, None], positions % a["state"].shape[1]]
        k, z = k.where(is_new, rows[:, :, 0]), z.where(is_new, rows[:, :, 1])
    absent = (positions < 0)[..., None]
    k, z = k.masked_fill(absent, 0.0), z.masked_fill(absent, -math.inf)
    if overlap:
        d = kv.shape[1] // 2
        k, z = (torch.cat((x[:, :m, :d], x[:, m:, d:]), 1) for x in (k, z))
    return (z.softmax(1) * k).sum(1), token


def check_state(a: Given, state: torch.Tensor) -> None:
    """Require the last n new tokens of each sequence in the sequence's slot, which has n rows. All other rows must be
    unchanged."""
    expected, n, m = a["state"].clone(), a["state"].shape[1], len(a["ape"])
    sequences = zip(a["starts"].tolist(), pairwise(a["cu_seqlens"].tolist()), a["state_slots"].tolist())
    for start, (low, high), slot in sequences:
        kept = torch.arange(max(low, high - n), high, device=state.device)
        position = kept - low + start
        new = a["kv"][kept].float(), a["gate"][kept].float() + a["ape"][position % m]
        expected[slot, position % n] = torch.stack(new, 1)
    same("state", state, expected)


def check_compressed(a: Given, found: Results) -> float:
    entries, tokens, *state = found
    expected, right = compressed(a)
    same("tokens", tokens, right)
    for x in state:
        check_state(a, x)
    return assert_close("entries", entries, expected, abs_tol=1e-5, rel_tol=1e-4)


def new_entries(
    new: Maker,
    layout: str = "v4",
    d: int = 512,
    pages: int = 40,
    page_size: int = 64,
    slot_dtype: torch.dtype = INT64,
    **sizes: Any,
) -> Given:
    given = new_tokens(new, 2 * d if sizes.get("overlap", True) else d, **sizes)
    tokens = len(given["kv"])
    if "lengths" in sizes:
        slots, ending = torch.full((tokens,), -1, device=new.device), [token for _, token, _ in block_ends(given)]
        slots[ending] = new.order(1, pages * page_size, len(ending))[0]
    else:
        pages, page_size, slots = 2, 16, new.ints([3, -1, -1, -1, -1, 20, -1])
        slot_dtype = INT64 if layout == "index" else INT32
    index = layout == "index"
    cache = new.index_cache(pages, page_size, d) if index else latent_cache(new, layout, d, pages, page_size)
    given |= {"norm_weight": new.f32(d).abs() + 0.5, **new.angles(tokens)}
    return {**given, "cache": cache, "slots": slots.to(slot_dtype), "eps": 1e-6}


def hadamard(channels: int) -> torch.Tensor:
    """Return the normalised Hadamard matrix in float64."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(channels)] for i in range(channels)]
    return torch.tensor(signs, dtype=torch.double) / channels**0.5


def check_write_compressed(a: Given, found: Results) -> float:
    """Compare the written entries with those that the reference writes to a copy of the cache, and with the formula.
    The state must be exact, and all other slots of the cache must be unchanged."""
    (cache, state), d = found, len(a["norm_weight"])
    index = cache.dtype == torch.uint8 and cache.shape[3] == d + 4
    check_state(a, state)
    entries, tokens = compressed(a)
    slots = slots_inside(a["slots"], cache)[tokens]
    kept = slots >= 0
    slots, tokens = slots[kept], tokens[kept]
    got, others = slot_numbers(cache, index)[slots], torch.ones(cache.shape[0] * cache.shape[1], dtype=torch.bool)
    others[slots.cpu()] = False
    same("other slots", *(slot_bytes(x, index)[others.to(x.device)] for x in (cache, a["cache"])))
    same_cache(cache, cache, index)
    every = torch.full_like(a["slots"], -1, dtype=INT64)
    every[tokens] = slots
    by_reference = a | {"cache": a["cache"].clone(), "state": a["state"].clone(), "slots": every}
    dsa.reference.write_compressed_kv(**by_reference)
    expected = slot_numbers(by_reference["cache"], index)[slots]
    # In a byte cache a number can be off by one e4m3 step, which is up to 1/8 of the number. In a float cache it can be
    # off by two bf16 steps, each of up to 1/128 of the number.
    rel = 1 / 8 if cache.element_size() == 1 else 2.01 / 128
    assert_close("entries against the reference", got, expected, abs_tol=2e-2, rel_tol=rel, cos_tol=2e-5)
    rows = rotated(normed(entries[kept], a["norm_weight"], a["eps"]), a["cos"][tokens], a["sin"][tokens])
    if cache.element_size() > 1:
        return assert_close("entries", got, rows, abs_tol=1e-3, rel_tol=2.01 / 128, cos_tol=1e-5)
    return check_quantised("entries", got, rows @ hadamard(d).to(rows.device) if index else rows)


def check_quantised(name: str, got: torch.Tensor, expected: torch.Tensor) -> float:
    """Check a quantised result's errors. With ten rows or more, also check that rounding has no bias: the mean of got /
    expected, over large numbers, must be near 1."""
    error = assert_close(name, got, expected, abs_tol=6e-2, rel_tol=0.075, cos_tol=2e-3)
    if len(expected) < 10:
        return error
    large = expected.abs() > expected.abs().max() / 20
    ratio = (got[large] / expected[large]).mean().item()
    if abs(ratio - 1) > 4e-3:
        raise AssertionError(f"{name}: {ratio:.4f} times what it should be")
    return error


# Hostile contents (see case.Hostile).


def other_sequences(wrong: Sequence[int], given: Given, place: tuple[int], index: bool = False) -> Kept:
    """Return a function that keeps all slots and states except those of sequences place[0] + i, for each i in
    `wrong`."""
    bounds, state_slots = given["cu_seqlens"].tolist(), given["state_slots"].tolist()
    sequences = [place[0] + i for i in wrong if 0 <= place[0] + i < len(state_slots)]
    slots = [slot for b in sequences for slot in given["slots"][bounds[b] : bounds[b + 1]].tolist()]
    return other_slots(given, slots, [state_slots[b] for b in sequences], index)


def ending_slots(x: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the places of three tokens: the first, and the first and the last that have a slot. x: slots, -1 for
    tokens that do not end a block."""
    ending = (x >= 0).nonzero()[:, 0].tolist()
    return [(0,), (ending[0],), (ending[-1],)]


def hostile_sequences(layout: str, **sizes: Any) -> dict[str, Hostile]:
    index = layout == "index"
    options = {"layout": layout, "pages": 3, "lengths": (13, 0, 270, 5, 9), "starts": (2, 7, 120, 0, 3), **sizes}
    own, adjacent = (partial(other_sequences, x, index=index) for x in ((0,), (-1, 0)))
    found = {"cu_seqlens": Hostile(adjacent, every), "starts": Hostile(own, ends), "state_slots": Hostile(own, ends)}
    found["slots"] = Hostile(partial(other_tokens, index=index), ending_slots)
    return {f"{name} {layout}": Hostile(x.kept, x.places, options) for name, x in found.items()}


CONTINUED = {"lengths": (130, 0, 7, 33, 270), "starts": (6, 5, 0, 131, 1)}
CASES = [
    Case(
        "compress_kv",
        new_tokens,
        check_compressed,
        {"c": 256, **CONTINUED},
        written=("state",),
        hostile={
            name: Hostile(nothing, ends, {"c": 256, **CONTINUED}) for name in ("cu_seqlens", "starts", "state_slots")
        },
    ),
    Case(
        "compress_kv without a state",
        partial(new_tokens, with_state=False),
        check_compressed,
        {"lengths": (9, 1, 0, 260), "m": 128, "overlap": False, "c": 64},
    ),
    Case(
        "write_compressed_kv",
        new_entries,
        check_write_compressed,
        {"layout": "bfloat16", **CONTINUED},
        written=("cache", "state"),
        hostile=hostile_sequences("v4") | hostile_sequences("bfloat16", m=128, overlap=False),
    ),
    Case(
        "write_compressed_kv index",
        partial(new_entries, layout="index", d=128),
        check_write_compressed,
        CONTINUED,
        written=("cache", "state"),
        hostile=hostile_sequences("index", slot_dtype=INT32),
    ),
]
