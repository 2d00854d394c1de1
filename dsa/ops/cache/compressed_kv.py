"""DeepSeek-V4's compressor: every few tokens become one entry of the cache."""

import torch

from dsa.kernels.cache.limits import COMPRESSED_DTYPES, COMPRESSED_KINDS, ROPE_CHANNELS
from dsa.ops._aligned import rows_at_16_bytes
from dsa.ops._kernel_arguments import check_page_size, dtype_name, pages_as_rows
from dsa.ops.cache._kv_rows import cache_rows, check_cache, layout_name, slot_words
from dsa.reference.cache import compressed_kv as reference
from dsa.runtime.op import op

__all__ = ["compress_kv", "write_compressed_kv"]

compress_kv = reference.compress_kv


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

    C[i, c] = sum_j softmax_j(Z[j, c]) KV[j, c] over the tokens j of entry i; Z = gate + ape[position mod m]. A block is
    m tokens of a sequence, and block i ends with entry i. Without overlap the entry is made of the m tokens of its
    block with all their channels, d = c. With overlap it is made of two blocks, d = c / 2: block i - 1 gives the first
    d channels of its tokens, block i the last d channels of its own, and entry 0 is made of block 0 alone.

    kv, gate     [T, c] fp32, bf16 or fp16: projections of new tokens, the sequences one after another
    ape          [m, c] fp32
    norm_weight  [d] fp32
    cos, sin     [T, R / 2] fp32: the row of a token that ends block i is for position i m; the rows of other tokens
                 are not used. Rope rotates the last R channels in pairs (2i, 2i + 1)
    cache        of entries, [pages, P, 1, d | 584] as `write_kv_cache` has it, or [pages, P, 1, d + 4] bytes as
                 `write_indexer_cache` has it: then entries pass the Hadamard transform and are rounded to e4m3 with a
                 power-of-two scale each
    slots        [T] int32 or int64: page * P + offset for a token that ends a block, or -1, which skips its entry; for
                 all other tokens -1
    cu_seqlens   [B + 1] int32, from at least 0 to at most T, not decreasing: sequence b has the tokens cu_seqlens[b] up
                 to cu_seqlens[b + 1]
    starts       [B] int32, at least 0, and starts + T below 2^31 - 512: how many tokens of each sequence came before
                 the new ones; `state` has the last n of these
    state        [S, n, 2, c] fp32, n at least m, or 2 m with overlap: a sequence's state slot has KV and Z of its token
                 at position p in row p mod n; those of the new tokens are written. With K - 1 rows more than that, a
                 sequence can go on from any of its last K tokens: those behind are forgotten
    state_slots  [B] int32: the slot of each sequence in `state`, from 0 to S - 1. Sequences that share a slot, as
                 padding may, overwrite each other's state
    overlap      whether an entry is made of two blocks
    eps          added to the mean of the squares: a finite number, at least 0

    Sum, norm and rope are fp32; an entry is rounded once, to kv's dtype. This op is not differentiable; `compress_kv`
    is. Raises TypeError or ValueError for other types, dtypes, shapes and strides. The reference also raises for slots
    below -1 or beyond the cache and for cu_seqlens, starts and state_slots other than these. The kernel does not see
    these in time: it skips entries with such slots and sequences with such state slots, takes a sequence whose
    boundaries decrease or are outside for one without new tokens, and writes unspecified entries for a sequence with
    such a start; everything else is as it would be without them.
    On Hopper: one kernel; kv fp32 or bf16; d = 512 with m = 4 and overlap or m = 128 without, into floats or 584 bytes,
    and d = 128 with m = 4 and overlap, into bf16 or 132 bytes; R = 64; rows and pages at multiples of 16 bytes. The
    kernel sums in another order than the reference, so that now and then a number rounds to its neighbour.
    Deterministic. CUDA-graph safe with new lengths and slots, no host synchronisation, no workspace.
    Source: DeepSeek-V4 (arXiv 2606.19348), section 2.3, and `Compressor` of its inference code.
    """
    _write_compressed_kv(
        *(kv, gate, ape, norm_weight, cos, sin, cache, slots, cu_seqlens, starts, state, state_slots, overlap, eps)
    )


def _check_limits(
    kv: torch.Tensor,
    ape: torch.Tensor,
    norm_weight: torch.Tensor,
    cos: torch.Tensor,
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
    if 2 * cos.shape[1] != ROPE_CHANNELS:
        raise ValueError(f"cos: the kernel rotates R {ROPE_CHANNELS} channels, got {2 * cos.shape[1]}")
    if reference.is_index_cache(cache, d):
        check_page_size("cache", cache)
    else:
        check_cache(cache)


@op(
    arguments=reference.WRITE_COMPRESSED_KV,
    reference=reference.write_compressed_kv,
    limits=_check_limits,
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

    if starts.shape[0] and kv.shape[0]:  # without pages the state is written all the same
        d, m = norm_weight.shape[0], ape.shape[0]
        is_index = reference.is_index_cache(cache, d)
        pages = pages_as_rows(cache).unflatten(1, (-1, d + 4)) if is_index else cache_rows(cache)
        kv, gate, cos, sin = (rows_at_16_bytes(x) for x in (kv, gate, cos, sin))
        layout = "index" if is_index else layout_name(cache)
        compile_write_compressed_kv(dtype_name(kv.dtype), d, m, overlap, layout)(
            *(kv, gate, ape, norm_weight, cos, sin, pages, slot_words(slots), cu_seqlens, starts, state, state_slots),
            *(cache.shape[1], float(eps)),
        )
