"""DeepSeek-V4's compressor: every m tokens become one entry, a sum of their projections with weights per channel.

Block i of a sequence is the tokens i m to i m + m - 1, and entry i is the weighted sum over block i. With overlap the
sum is over the blocks i - 1 and i. The last token of a block is the first to attend to the block's entry.
"""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.cache.indexer_cache import check_writable_slots, write_indexer_cache
from dsa.reference.cache.kv_cache import write_kv_cache
from dsa.reference.elementwise.rotary import apply_rotary
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
    """C[i, c] = sum_j softmax_j(Z[j, c]) KV[j, c] over the tokens j of entry i; Z = gate + ape[position mod m].

    KV is kv in fp32. An entry has d channels c: as many as kv, or with overlap half as many. With overlap, the tokens
    of block i - 1 contribute their first d channels, and the tokens of block i their last d channels. Returns (entries
    [N, d] fp32, tokens [N] int64: the indices of the new tokens that end blocks, ascending). Writes the new tokens to
    `state`. Differentiable in kv, gate and ape. Raises ValueError for invalid cu_seqlens, starts and state_slots,
    before anything is written. Arguments as in `dsa.compress_kv`.
    Source: DeepSeek-V4 (arXiv 2606.19348), section 2.3, and `Compressor` of the model's inference code.
    """
    m, d = ape.shape[0], kv.shape[1] // 2 if overlap else kv.shape[1]
    entries, tokens = [kv.new_empty(0, d, dtype=torch.float32)], [torch.empty(0, dtype=torch.int64, device=kv.device)]
    bounds, first = cu_seqlens.tolist(), starts.tolist()
    _check_sequences(bounds, first, None if state_slots is None else state_slots.tolist(), kv, state)
    for b, (start, low, high) in enumerate(zip(first, bounds, bounds[1:])):
        # `begin` is the position of the first token that the next entry needs, with overlap in the block before.
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
    """For every new token that ends a block, write rope(RMSNorm(C)) of the block's entry to the token's cache slot, in
    place.

    C is the result of `compress_kv`. Sum, norm and rope are computed in fp32; their result is rounded once, to kv's
    dtype. In a cache of index keys, the rounded entry is then Hadamard-transformed and cast to FP8. Not differentiable.
    Raises ValueError for slots below -1 or beyond the cache, and for invalid cu_seqlens, starts and state_slots, before
    anything is written. Arguments as in `dsa.write_compressed_kv`.
    """
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
    """Whether the cache has the layout of `write_indexer_cache`, with d e4m3 numbers and one fp32 scale per slot."""
    return cache.dtype == torch.uint8 and cache.shape[3] == d + 4


def _check_sequences(
    bounds: list[int], starts: list[int], state_slots: list[int] | None, kv: torch.Tensor, state: torch.Tensor | None
) -> None:
    if bounds[0] < 0 or bounds[-1] > len(kv) or bounds != sorted(bounds):
        raise ValueError(f"cu_seqlens: must not decrease, from at least 0 to at most kv's T={len(kv)}, got {bounds}")
    if any(start < 0 or (start and state_slots is None) for start in starts):
        raise ValueError(f"starts: must be at least 0, and 0 without a state, got {starts}")
    if state_slots is not None and any(not 0 <= slot < len(state) for slot in state_slots):
        raise ValueError(f"state_slots: must be from 0 to {len(state) - 1}, got {state_slots} (sizes as of state)")
