"""DeepSeek-V4's compressor: every m tokens become one entry, a sum of their projections weighted per channel.

Entry i of a sequence is made of its block i, the tokens i m to i m + m - 1, and where blocks overlap also of block
i - 1. The token that ends a block is the first to see its entry.
"""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.cache.indexer_cache import check_cache, check_writable_slots, write_indexer_cache
from dsa.reference.cache.kv_cache import check_write, write_kv_cache
from dsa.reference.checks import (
    FLOATS,
    check_flag,
    check_memory,
    check_number,
    check_same_device,
    check_same_dtype,
    check_tensor,
    check_updatable,
    check_writable,
)
from dsa.reference.elementwise.rotary import apply_rotary, check_rotary
from dsa.reference.gemm.fp8_cast import per_token_cast_to_fp8


@without_autocast
def compress_kv(
    kv: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    cu_seqlens: torch.Tensor,
    starts: torch.Tensor,
    state: torch.Tensor | None = None,
    state_slots: torch.Tensor | None = None,
    *,
    overlap: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """C[i, c] = sum_j softmax_j(Z[j, c]) KV[j, c] over the slots j of entry i; Z = gate + ape[position mod m].

    The slots of entry i are the m tokens of block i, and d = c. With overlap they are 2 m, and d = c / 2: of block
    i - 1 the first d channels of each token, of block i the last d; block -1 has no weight.

    kv, gate    [T, c] fp32, bf16 or fp16, both of one dtype: projections of new tokens, the sequences one after another
    ape         [m, c] fp32
    cu_seqlens  [B + 1] int32, from at least 0 to at most T, not decreasing: sequence b has the tokens cu_seqlens[b] up
                to cu_seqlens[b + 1]
    starts      [B] int32, at least 0: tokens of each sequence before these, which are in `state`
    state       [S, n, 2, c] fp32, n = m, or 2 m with overlap: KV and Z of the token at position p in row p mod n of
                the sequence's state slot. The new tokens' are written. None: all sequences begin here
    state_slots [B] int32: the slot of each sequence in `state`, from 0 to S - 1. Those of one slot, as of sequences
                that are padding, spoil each other's state

    Returns (entries [N, d] fp32, tokens [N] int64, the new tokens that end their blocks, ascending). Gradients flow to
    kv, gate and ape. Raises TypeError or ValueError for other types, dtypes, shapes, devices and integers; then nothing
    is written.
    Source: DeepSeek-V4 (arXiv 2606.19348), section 2.3, and `Compressor` of its inference code.
    """
    d = check_compress(kv, gate, ape, cu_seqlens, starts, state, state_slots, overlap)
    check_memory("kv", kv)
    if state is not None:
        check_updatable("state", state)
    m, overlap = ape.shape[0], d < kv.shape[1]
    entries, tokens = [kv.new_empty(0, d, dtype=torch.float32)], [torch.empty(0, dtype=torch.int64, device=kv.device)]
    bounds, first = cu_seqlens.tolist(), starts.tolist()
    _check_sequences(bounds, first, None if state_slots is None else state_slots.tolist(), kv, state)
    for b, (start, low, high) in enumerate(zip(first, bounds, bounds[1:])):
        # From the first token that an entry of these can be made of: in block start // m, or the one before.
        begin = max(start // m - overlap, 0) * m
        positions = torch.arange(start, start + high - low, device=kv.device)
        k, z = kv[low:high].float(), gate[low:high].float() + ape[positions % m]
        if state is not None:
            kept_state, n = state[state_slots[b]], state.shape[1]
            old = kept_state[torch.arange(begin, start, device=kv.device) % n]
            kept = positions[-n:] if len(positions) else positions
            new = torch.stack((k, z), 1).detach()[-n:] if len(positions) else old[:0]
            state[state_slots[b], kept % n] = new
            k, z = torch.cat((old[:, 0], k)), torch.cat((old[:, 1], z))
        one, count = start // m, (start + high - low) // m - start // m
        if count == 0:
            continue
        own = slice(one * m - begin, (one + count) * m - begin)
        k_slots, z_slots = k[own, -d:].unflatten(0, (count, m)), z[own, -d:].unflatten(0, (count, m))
        if overlap:
            before = slice(max(one - 1, 0) * m - begin, (one + count - 1) * m - begin)
            pad = m if one == 0 else 0
            k_before = torch.cat((k.new_zeros(pad, d), k[before, :d])).unflatten(0, (count, m))
            z_before = torch.cat((z.new_full((pad, d), -torch.inf), z[before, :d])).unflatten(0, (count, m))
            k_slots, z_slots = torch.cat((k_before, k_slots), 1), torch.cat((z_before, z_slots), 1)
        entries.append((z_slots.softmax(1) * k_slots).sum(1))
        tokens.append(low + torch.arange(one + 1, one + count + 1, device=kv.device) * m - 1 - start)
    return torch.cat(entries), torch.cat(tokens)


@torch.no_grad()
@without_autocast
def write_compressed_kv(
    kv: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    norm_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    starts: torch.Tensor,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    *,
    overlap: bool,
    eps: float = 1e-6,
) -> None:
    """Writes rope(RMSNorm(C)) of every entry that a new token ends into that token's slot of the cache, in place.

    kv, gate, ape, cu_seqlens, starts, state, state_slots, overlap  as `compress_kv` takes them
    norm_weight  [d] fp32
    cos, sin     [T, R / 2] fp32: for a token that ends block i, of position i m; the others' are not used. Rope turns
                 the last R channels in pairs (2i, 2i + 1)
    cache        of entries, [pages, P, 1, d | 584] as `write_kv_cache` has it, or [pages, P, 1, d + 4] bytes as
                 `write_indexer_cache` has it: then entries pass the Hadamard transform and are rounded to e4m3 with a
                 power-of-two scale each
    slots        [T] int32 or int64: page * P + offset for a token that ends a block; -1 skips its entry, and is what
                 the others have
    eps          added to the mean of the squares: a finite number, at least 0

    Sum, norm and rope are fp32 and round once, to kv's dtype. Not differentiable. Raises TypeError or ValueError for
    other types, dtypes, shapes and devices, for slots below -1 or beyond the cache, and for integers as `compress_kv`
    does; then nothing is written.
    """
    check_write_compressed(
        kv, gate, ape, norm_weight, cos, sin, cache, slots, cu_seqlens, starts, state, state_slots, overlap, eps
    )
    check_memory("cache", cache)
    check_updatable("cache", cache)
    check_writable_slots(slots, cache.shape[0] * cache.shape[1])
    entries, tokens = compress_kv(kv, gate, ape, cu_seqlens, starts, state, state_slots, overlap=overlap)
    normed = entries * torch.rsqrt(entries.square().mean(-1, keepdim=True) + eps) * norm_weight
    rows = apply_rotary(normed, cos[tokens], sin[tokens], interleaved=True, dims="last").to(kv.dtype)
    if is_index_cache(cache, rows.shape[1]):
        k, scale = per_token_cast_to_fp8(rows, True, rows.shape[1], hadamard=True)
        write_indexer_cache(k, scale.squeeze(-1), cache, slots[tokens])
    else:
        write_kv_cache(rows, cache, slots[tokens])


def is_index_cache(cache: torch.Tensor, d: int) -> bool:
    """Whether a cache holds d e4m3 numbers and a scale an entry."""
    return cache.dtype == torch.uint8 and cache.dim() == 4 and cache.shape[3] == d + 4


def _check_sequences(
    bounds: list[int], starts: list[int], state_slots: list[int] | None, kv: torch.Tensor, state: torch.Tensor | None
) -> None:
    """The values of the integers of `compress_kv`."""
    if bounds[0] < 0 or bounds[-1] > len(kv) or bounds != sorted(bounds):
        raise ValueError(f"cu_seqlens: must not decrease, from at least 0 to at most kv's T={len(kv)}, got {bounds}")
    if any(start < 0 or (start and state_slots is None) for start in starts):
        raise ValueError(f"starts: must be at least 0, and 0 without a state, got {starts}")
    if state_slots is not None and any(not 0 <= slot < len(state) for slot in state_slots):
        raise ValueError(f"state_slots: must be from 0 to {len(state) - 1}, got {state_slots} (sizes as of state)")


def check_compress(
    kv: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    cu_seqlens: torch.Tensor,
    starts: torch.Tensor,
    state: torch.Tensor | None,
    state_slots: torch.Tensor | None,
    overlap: bool,
) -> int:
    """The checks of `compress_kv`, but for the values of its integers. -> d"""
    check_tensor("kv", kv, FLOATS, ("T", "c"))
    check_tensor("gate", gate, FLOATS, tuple(kv.shape), "kv")
    check_same_dtype(("kv", kv), gate=gate)
    check_tensor("ape", ape, (torch.float32,), ("m", kv.shape[1]), "kv")
    check_tensor("cu_seqlens", cu_seqlens, (torch.int32,), ("B + 1",))
    if cu_seqlens.shape[0] == 0:
        raise ValueError("cu_seqlens: must have B + 1 entries, got none")
    check_tensor("starts", starts, (torch.int32,), (cu_seqlens.shape[0] - 1,), "cu_seqlens")
    check_flag("overlap", overlap)
    m, c = ape.shape
    if m == 0 or c == 0 or (overlap and c % 2):
        raise ValueError(
            f"ape: must have rows and kv's channels, with overlap an even number, got shape {list(ape.shape)}"
        )
    if (state is None) != (state_slots is None):
        raise ValueError("state, state_slots: must be given together, got one of them")
    if state is not None:
        check_tensor("state", state, (torch.float32,), ("S", 2 * m if overlap else m, 2, c), "kv, ape and overlap")
        check_tensor("state_slots", state_slots, (torch.int32,), tuple(starts.shape), "cu_seqlens and starts")
        check_writable("state", state)
    check_same_device(
        ("kv", kv), gate=gate, ape=ape, cu_seqlens=cu_seqlens, starts=starts, state=state, state_slots=state_slots
    )
    return c // 2 if overlap else c


def check_write_compressed(
    kv: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    norm_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    starts: torch.Tensor,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    overlap: bool,
    eps: float,
) -> None:
    """The checks of `write_compressed_kv`, but for the values of its integers."""
    d = check_compress(kv, gate, ape, cu_seqlens, starts, state, state_slots, overlap)
    if state is None:
        raise TypeError("state: must be a torch.Tensor, got NoneType")
    check_tensor("norm_weight", norm_weight, (torch.float32,), (d,), "kv and overlap")
    check_number("eps", eps, 0)
    row = kv[:, :d]
    check_rotary("kv", row, cos, sin, True, "last")
    if isinstance(cache, torch.Tensor) and is_index_cache(cache, d):
        check_tensor("cache", cache, (torch.uint8,), ("pages", "P", 1, d + 4))
        check_tensor("slots", slots, (torch.int32, torch.int64), (len(kv),), "kv")
        check_cache("cache", cache)
        check_writable("cache", cache)
        if d & (d - 1):
            raise ValueError(f"cache: an index cache has a power of two channels an entry, kv gives {d}")
        check_same_device(("cache", cache), kv=kv, slots=slots)
    else:
        check_write(row, cache, slots, True)
    check_same_device(("cache", cache), norm_weight=norm_weight)
