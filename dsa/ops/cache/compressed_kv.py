"""DeepSeek-V4's compressor: each block of m tokens gives one cache entry, computed from this block alone, or from this
block and the block before it."""

import torch

from dsa.kernels.cache.limits import COMPRESSED_DTYPES, COMPRESSED_KINDS, ROPE_CHANNELS
from dsa.ops.cache._kv_rows import cache_rows, check_cache, layout_name, slot_words
from dsa.ops.cache._specs import (
    CACHE_DTYPES,
    SLOTS,
    check_index_cache,
    check_kv_cache,
    page_layout,
    pages_as_rows,
    slots_and_page_bytes,
)
from dsa.ops.elementwise.rotary import check_rotated
from dsa.reference.cache import compressed_kv as reference
from dsa.runtime.declare import (
    ALIGNED,
    CONTIGUOUS,
    F32,
    FLOATS,
    INT32,
    ROWS,
    Arguments,
    Flag,
    Number,
    Tensor,
    check_memory,
    check_updatable,
    dtype_name,
    op,
    rows_at_16_bytes,
)

__all__ = ["compress_kv", "write_compressed_kv"]


def _check_blocks(ape: torch.Tensor, state: torch.Tensor | None, overlap: bool) -> int:
    """Return d, the number of channels of an entry. Raises ValueError for blocks without tokens or channels, and for a
    state with too few rows."""
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
    if reference.is_index_cache(cache, d):
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
    """C[i, x] = sum_j softmax_j(Z[j, x]) KV[j, x] over the tokens j of entry i; Z = gate + ape[position mod m].

    KV is kv in fp32, and x is one of an entry's d channels. A sequence is divided into blocks of m tokens, and the
    last token of block i completes entry i. Without overlap, d = c, and entry i is computed from the m tokens of block
    i. With overlap, d = c / 2, and entry i is computed from two blocks: from channels 0 to d - 1 of the tokens of block
    i - 1, and from channels d to c - 1 of the tokens of block i. Entry 0 is then computed from block 0 alone.

    kv, gate    [T, c] fp32, bf16 or fp16, both of one dtype: projections of new tokens, the sequences one after another
    ape         [m, c] fp32
    cu_seqlens  [B + 1] int32, from at least 0 to at most T, not decreasing: sequence b has the tokens cu_seqlens[b] up
                to cu_seqlens[b + 1]
    starts      [B] int32, at least 0: the number of tokens of each sequence before the new ones; `state` contains the
                last n of them
    state       [S, n, 2, c] fp32, n at least m, or 2 m with overlap: row p mod n of a sequence's slot contains KV and Z
                of the token at position p; the op writes the rows of the new tokens. None: all sequences begin in this
                call. With K - 1 rows more than this minimum, a sequence can be continued after any of the last K
                tokens, and the later tokens are dropped
    state_slots [B] int32: the slot of each sequence in `state`, from 0 to S - 1. Sequences that share a slot, for
                example padding, overwrite each other's state
    overlap     whether an entry is computed from two blocks

    Returns (entries [N, d] fp32, tokens [N] int64), where tokens are the indices in [0, T) of the new tokens that
    complete an entry, ascending. Differentiable in kv, gate and ape. Raises TypeError or ValueError for other types,
    dtypes, shapes, devices, cu_seqlens, starts and state_slots, before it writes anything. It runs in PyTorch on every
    device.
    Source: DeepSeek-V4 (arXiv 2606.19348), section 2.3, and `Compressor` of its inference code.
    """
    COMPRESS_KV.check(kv, gate, ape, cu_seqlens, starts, state, state_slots, overlap)
    check_memory("kv", kv)
    if state is not None:
        check_updatable("state", state)
    return reference.compress_kv(kv, gate, ape, cu_seqlens, starts, state, state_slots, overlap=overlap)


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
    """For every new token that completes an entry C[i], write rope(RMSNorm(C[i])) to the token's cache slot, in place.

    C[i, x] = sum_j softmax_j(Z[j, x]) KV[j, x] over the tokens j of entry i; Z = gate + ape[position mod m]. KV is kv,
    and x is one of an entry's d channels. A sequence is divided into blocks of m tokens, and the last token of block i
    completes entry i. Without overlap, d = c, and entry i is computed from the m tokens of block i. With overlap, d = c
    / 2, and entry i is computed from two blocks: from channels 0 to d - 1 of the tokens of block i - 1, and from
    channels d to c - 1 of the tokens of block i. Entry 0 is then computed from block 0 alone.

    kv, gate     [T, c] fp32, bf16 or fp16: projections of new tokens, the sequences one after another
    ape          [m, c] fp32
    norm_weight  [d] fp32
    cos, sin     [T, R / 2] fp32: the row of a token that completes entry i contains the cos and sin of position i * m,
                 the position of the block's first token. The rows of other tokens are not used. Rope rotates the last R
                 channels in pairs (2i, 2i + 1)
    cache        [pages, P, 1, d | 584] in a layout of `write_kv_cache`, or [pages, P, 1, d + 4] bytes in the layout of
                 `write_indexer_cache`: then entries are Hadamard-transformed and rounded to e4m3 with one power-of-two
                 scale per entry
    slots        [T] int32 or int64: page * P + offset for a token that completes an entry, or -1 to skip the entry; the
                 slots of other tokens are -1
    cu_seqlens   [B + 1] int32, from at least 0 to at most T, not decreasing: sequence b has the tokens cu_seqlens[b] up
                 to cu_seqlens[b + 1]
    starts       [B] int32, at least 0, and starts + T below 2^31 - 512: the number of tokens of each sequence before
                 the new ones; `state` contains the last n of them
    state        [S, n, 2, c] fp32, n at least m, or 2 m with overlap: row p mod n of a sequence's slot contains KV and
                 Z of the token at position p; the op writes the rows of the new tokens. With K - 1 rows more than this
                 minimum, a sequence can be continued after any of the last K tokens, and the later tokens are dropped
    state_slots  [B] int32: the slot of each sequence in `state`, from 0 to S - 1. Sequences that share a slot, for
                 example padding, overwrite each other's state
    overlap      whether an entry is computed from two blocks
    eps          added to the mean of the squares: a finite number, at least 0

    Sum, norm and rope are computed in fp32; an entry is rounded once, to kv's dtype. This op is not differentiable;
    `compress_kv` is. Raises TypeError or ValueError for other types, dtypes, shapes and strides. The reference also
    raises for slots below -1 or beyond the cache and for invalid cu_seqlens, starts and state_slots. The kernel cannot
    raise for these: it skips entries with invalid slots and sequences with invalid state slots, writes nothing for a
    sequence whose boundaries decrease or lie outside [0, T], and writes unspecified entries for a sequence with an
    invalid start. All other entries and states are right.
    On Hopper: one kernel; kv fp32 or bf16; d = 512 (m = 4 with overlap, or m = 128 without), into entries of floats or
    of 584 bytes; d = 128 (m = 4 with overlap), into entries of bf16 or of 132 bytes; R = 64; rows and pages at
    multiples of 16 bytes. The kernel and the reference sum in different orders, so a value occasionally rounds to an
    adjacent representable number. Deterministic. CUDA-graph safe with new lengths and slots, no host synchronisation,
    no workspace.
    Source: DeepSeek-V4 (arXiv 2606.19348), section 2.3, and `Compressor` of its inference code.
    """
    _write_compressed_kv(
        *(kv, gate, ape, norm_weight, cos, sin, cache, slots, cu_seqlens, starts, state, state_slots, overlap, eps)
    )


def _check_kind(
    kv: torch.Tensor,
    ape: torch.Tensor,
    norm_weight: torch.Tensor,
    cache: torch.Tensor,
    overlap: bool,
) -> None:
    d, m = norm_weight.shape[0], ape.shape[0]
    if dtype_name(kv.dtype) not in COMPRESSED_DTYPES:
        raise ValueError(f"kv: the kernel takes fp32 and bf16, got {dtype_name(kv.dtype)}")
    if (d, m, overlap) not in COMPRESSED_KINDS:
        accepted = ", ".join(f"{d} of {m} {'with' if lap else 'without'} overlap" for d, m, lap in COMPRESSED_KINDS)
        got = f"{d} of {m} {'with' if overlap else 'without'}"
        raise ValueError(f"ape: the kernel takes entries of channels and tokens {accepted}, got {got}")
    if not reference.is_index_cache(cache, d):
        check_cache(cache)


@op(
    arguments=WRITE_COMPRESSED_KV,
    reference=reference.write_compressed_kv,
    limits={"R/2": (ROPE_CHANNELS // 2,), **slots_and_page_bytes("bytes")},
    rule=_check_kind,
)
def _write_compressed_kv(
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
    from dsa.kernels.cache.compressed_kv_sm90 import compile_write_compressed_kv

    if starts.shape[0] and kv.shape[0]:  # also without pages, because the kernel still writes the state
        d, m = norm_weight.shape[0], ape.shape[0]
        is_index = reference.is_index_cache(cache, d)
        pages = pages_as_rows(cache).unflatten(1, (-1, d + 4)) if is_index else cache_rows(cache)
        kv, gate, cos, sin = (rows_at_16_bytes(x) for x in (kv, gate, cos, sin))
        layout = "index" if is_index else layout_name(cache)
        compile_write_compressed_kv(dtype_name(kv.dtype), d, m, overlap, layout)(
            *(kv, gate, ape, norm_weight, cos, sin, pages, slot_words(slots), cu_seqlens, starts, state, state_slots),
            *(cache.shape[1], float(eps)),
        )
