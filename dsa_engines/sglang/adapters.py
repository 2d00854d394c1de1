"""SGLang's calls on Hopper, as functions of tensors over dsa's ops.

They keep what SGLang gives and expects: its arguments' names and order, selections as cache slots or as columns, -1 for
no key, and statistics of attention in base 2 where its FlashMLA gives them so. No function copies to the host or waits
for the GPU, and all can be captured in a CUDA graph.
"""

import math

import torch

import dsa

LOG2E = math.log2(math.e)


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    clean_logits: bool = False,
    max_seqlen_k: int = 0,
) -> torch.Tensor:
    """`dsa.fp8_mqa_logits`, with sgl-deep-gemm's names and defaults.

    With max_seqlen_k above 0, as for DeepSeek-V4, what lies outside [ks, ke) is -inf: SGLang makes that range empty
    where a query has no more keys than are selected, and `dsa.topk_indices` reads the scores of such a query, too.
    """
    return dsa.fp8_mqa_logits(q, kv, weights, ks, ke, clean_logits or max_seqlen_k > 0, max_seqlen_k)


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
) -> torch.Tensor:
    """`dsa.fp8_paged_mqa_logits`, with sgl-deep-gemm's names and defaults but for `indices`."""
    return dsa.fp8_paged_mqa_logits(
        q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits
    )


def get_paged_mqa_logits_metadata(context_lens: torch.Tensor, block_kv: int, num_sms: int) -> torch.Tensor:
    """`dsa.get_paged_mqa_logits_metadata`, with sgl-deep-gemm's names but for `indices`."""
    return dsa.get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms)


def topk(
    logits: torch.Tensor, lengths: torch.Tensor, topk: int, row_starts: torch.Tensor | None = None
) -> torch.Tensor:
    """int32 [rows, topk]: selected keys of logits[r, start : start + length], counted from the row's start."""
    return dsa.topk_indices(logits, topk, starts=row_starts, lengths=lengths)


def topk_paged(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    page_table: torch.Tensor,
    page_size: int,
    row_starts: torch.Tensor | None = None,
    row_to_batch: torch.Tensor | None = None,
) -> torch.Tensor:
    """int32 [rows, topk]: the same as cache slots, by the row of page_table that belongs to a row of logits."""
    return dsa.topk_indices(
        logits,
        topk,
        starts=row_starts,
        lengths=lengths,
        block_table=page_table,
        page_size=page_size,
        row_to_seq=row_to_batch,
    )


def topk_ragged(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    topk_indices_offset: torch.Tensor,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """int32 [rows, topk]: the same plus the row's offset, where its keys begin among those of all sequences.

    With row_starts the offsets are columns of logits, as row_starts are.
    """
    if row_starts is None:
        indices = dsa.topk_indices(logits, topk, lengths=lengths)
        return torch.where(indices < 0, indices, indices + topk_indices_offset[:, None])
    # The op adds while it writes: row b of this table of pages of one key has the numbers b, b + 1, ... The rows
    # overlap, so the table is a view of as many numbers as two rows of logits have.
    columns = max(logits.shape[1], 1)
    numbers = torch.arange(2 * columns, dtype=torch.int32, device=logits.device)
    sums = numbers.as_strided((columns, columns), (1, 1))
    return topk_paged(logits, lengths, topk, sums, 1, row_starts, topk_indices_offset)


def topk_into(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    page_tables: torch.Tensor | None,
    out_page_indices: torch.Tensor,
    page_size: int,
    out_raw_indices: torch.Tensor | None = None,
) -> None:
    """DeepSeek-V4's selection, written to out_page_indices [rows, k] int32 as cache slots, or without page_tables as
    positions. With out_raw_indices [rows, k] that gets the positions besides."""
    k = out_page_indices.shape[1]
    if page_tables is None:
        dsa.topk_indices(scores, k, lengths=seq_lens, out=out_page_indices)
    elif out_raw_indices is None:
        dsa.topk_indices(
            scores, k, lengths=seq_lens, block_table=page_tables, page_size=page_size, out=out_page_indices
        )
    else:
        dsa.topk_indices(scores, k, lengths=seq_lens, out=out_raw_indices)
        positions = out_raw_indices.clamp(min=0)
        pages = page_tables.gather(1, (positions // page_size).long())
        slots = pages * page_size + positions % page_size
        out_page_indices.copy_(torch.where((out_raw_indices < 0) | (pages < 0), -1, slots))


def sparse_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    *,
    use_legacy: bool = True,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`dsa.flash_mla_sparse_fwd`, with use_legacy as SGLang's: max_logits and lse are in base 2."""
    arguments = q, kv, indices, sm_scale, d_v, attn_sink, topk_length
    out, max_logits, lse = dsa.flash_mla_sparse_fwd(*arguments, enable_batch_invariant=batch_invariant)
    return (out, max_logits * LOG2E, lse * LOG2E) if use_legacy else (out, max_logits, lse)


def sparse_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    head_dim_v: int,
    softmax_scale: float,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`dsa.flash_mla_with_kvcache` over selected keys of a cache of bytes or, which FlashMLA does not take, of q's
    dtype. It plans itself, so SGLang's plans are left out."""
    return dsa.flash_mla_with_kvcache(
        q,
        k_cache,
        None,
        None,
        head_dim_v,
        None,
        softmax_scale=softmax_scale,
        is_fp8_kvcache=k_cache.element_size() == 1,
        indices=indices,
        attn_sink=attn_sink,
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        topk_length=topk_length,
        extra_topk_length=extra_topk_length,
        enable_batch_invariant=batch_invariant,
    )


def no_plan(cache_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(plan [1, 8], num_splits [B + 1]) int32 zeros, which stand where SGLang keeps, slices and copies FlashMLA's plan
    of a batch. Nothing reads them."""
    numbers = cache_seqlens.new_zeros(8 + len(cache_seqlens) + 1)
    return numbers[:8].view(1, 8), numbers[8:]
