"""DeepSeek-V4's compressor: every m tokens become one entry, a sum of their projections weighted per channel.

Entry i of a sequence is made of its block i, the tokens i m to i m + m - 1, and where blocks overlap also of block
i - 1. The token that ends a block is the first to see its entry.
"""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.cache.indexer_cache import SLOTS, check_index_cache, check_writable_slots, write_indexer_cache
from dsa.reference.cache.kv_cache import CACHE_DTYPES, check_kv_cache, page_layout, write_kv_cache
from dsa.reference.elementwise.rotary import apply_rotary, check_rotated
from dsa.reference.gemm.fp8_cast import per_token_cast_to_fp8
from dsa.runtime.arguments import ALIGNED, CONTIGUOUS, F32, ROWS, Arguments, Flag, Number, Tensor
from dsa.runtime.checks import FLOATS, INT32, check_memory, check_updatable


def _check_blocks(ape: torch.Tensor, state: torch.Tensor | None, overlap: bool) -> int:
    """Blocks can be made, and the state holds what they need. -> d"""
    m, c = ape.shape
    if m == 0 or c == 0 or (overlap and c % 2):
        raise ValueError(
            f"ape: must have rows and kv's channels, with overlap an even number, got shape {list(ape.shape)}"
        )
    least = 2 * m if overlap else m
    if state is not None and state.shape[1] < least:
        raise ValueError(
            f"state: shape must be [S, n, 2, {c}] with n at least {least}, got {list(state.shape)} (sizes as of kv, "
            "ape and overlap)"
        )
    return c // 2 if overlap else c


def _check_compress(
    ape: torch.Tensor, state: torch.Tensor | None, state_slots: torch.Tensor | None, overlap: bool
) -> None:
    _check_blocks(ape, state, overlap)
    if (state is None) != (state_slots is None):
        raise ValueError("state, state_slots: must be given together, got one of them")


def _check_write(
    kv: torch.Tensor,
    ape: torch.Tensor,
    norm_weight: torch.Tensor,
    cos: torch.Tensor,
    cache: torch.Tensor,
    state: torch.Tensor,
    overlap: bool,
) -> None:
    d = _check_blocks(ape, state, overlap)
    if norm_weight.shape[0] != d:
        raise ValueError(
            f"norm_weight: shape must be [{d}], got {list(norm_weight.shape)} (sizes as of kv and overlap)"
        )
    check_rotated("kv", kv[:, :d], cos)
    if is_index_cache(cache, d):
        check_index_cache("cache", cache)
        if d & (d - 1):
            raise ValueError(f"cache: an index cache has a power of two channels an entry, kv gives {d}")
    elif (cached := check_kv_cache("cache", cache)["d"]) != d:
        raise ValueError(f"cache: must have entries of {d} channels, got {cached} (sizes as of kv and overlap)")


_PROJECTIONS = {
    "kv": Tensor("T c", FLOATS, layout=ROWS),
    "gate": Tensor("T c", FLOATS, like="kv", layout=ROWS),
    "ape": Tensor("m c", F32, layout=ALIGNED),
}
_SEQUENCES = {
    "cu_seqlens": Tensor("B+1", INT32, layout=CONTIGUOUS),
    "starts": Tensor("B", INT32, layout=CONTIGUOUS),
}
COMPRESS_KV = Arguments(
    rule=_check_compress,
    **_PROJECTIONS,
    **_SEQUENCES,
    state=Tensor("S n 2 c", F32, optional=True, written=True),
    state_slots=Tensor("B", INT32, optional=True),
    overlap=Flag(),
)
WRITE_COMPRESSED_KV = Arguments(
    rule=_check_write,
    **_PROJECTIONS,
    norm_weight=Tensor("d", F32, layout=ALIGNED),
    cos=Tensor("T R/2", F32, layout=ROWS),
    sin=Tensor("T R/2", F32, layout=ROWS),
    cache=Tensor("pages P 1 bytes", CACHE_DTYPES, layout=page_layout, written=True),
    slots=Tensor("T", SLOTS, layout=CONTIGUOUS),
    **_SEQUENCES,
    state=Tensor("S n 2 c", F32, layout=ALIGNED, written=True),
    state_slots=Tensor("B", INT32, layout=CONTIGUOUS),
    overlap=Flag(),
    eps=Number(least=0),
)


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

    A block is m tokens of a sequence, and block i ends with entry i. Without overlap the entry is made of the m tokens
    of its block with all their channels, d = c. With overlap it is made of two blocks, d = c / 2: block i - 1 gives the
    first d channels of its tokens, block i the last d channels of its own, and entry 0 is made of block 0 alone.

    kv, gate    [T, c] fp32, bf16 or fp16, both of one dtype: projections of new tokens, the sequences one after another
    ape         [m, c] fp32
    cu_seqlens  [B + 1] int32, from at least 0 to at most T, not decreasing: sequence b has the tokens cu_seqlens[b] up
                to cu_seqlens[b + 1]
    starts      [B] int32, at least 0: how many tokens of each sequence came before the new ones; `state` has the last
                n of these
    state       [S, n, 2, c] fp32, n at least m, or 2 m with overlap: a sequence's state slot has KV and Z of its token
                at position p in row p mod n; those of the new tokens are written. None: all sequences begin here.
                With K - 1 rows more, a sequence can go on from any of its last K tokens: those behind are forgotten
    state_slots [B] int32: the slot of each sequence in `state`, from 0 to S - 1. Sequences that share a slot, as
                padding may, overwrite each other's state
    overlap     whether an entry is made of two blocks

    Returns (entries [N, d] fp32, tokens [N] int64, the new tokens that end their blocks, ascending). Gradients flow to
    kv, gate and ape. Raises TypeError or ValueError for other types, dtypes, shapes, devices and integers, before
    anything is written.
    Source: DeepSeek-V4 (arXiv 2606.19348), section 2.3, and `Compressor` of its inference code.
    """
    COMPRESS_KV.check(kv, gate, ape, cu_seqlens, starts, state, state_slots, overlap)
    check_memory("kv", kv)
    if state is not None:
        check_updatable("state", state)
    m, d = ape.shape[0], kv.shape[1] // 2 if overlap else kv.shape[1]
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

    Sum, norm and rope are fp32 and round once, to kv's dtype. Not differentiable. Raises ValueError for slots below -1
    or beyond the cache, too, and for integers as `compress_kv` does. Whatever it raises, nothing is written. Arguments
    as of `dsa.write_compressed_kv`.
    """
    WRITE_COMPRESSED_KV.check(
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
    return cache.dtype == torch.uint8 and cache.shape[3] == d + 4


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
