"""SGLang's kernel calls on Hopper, implemented with dsa's ops.

The functions have SGLang's argument names and order, and return what SGLang expects: selections as cache slots,
columns or positions, with -1 for no key, and attention statistics in base 2 if SGLang's FlashMLA returns base 2. No
function synchronises with the host, and all can be captured in a CUDA graph.
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
    """Call `dsa.fp8_mqa_logits` with sgl-deep-gemm's names and defaults.

    If max_seqlen_k is above 0, as for DeepSeek-V4, set scores outside [ks, ke) to -inf. For a query with at most top-k
    keys, SGLang may pass an empty range, because its own top-k does not read these scores. `dsa.topk_indices` does.
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
    """Call `dsa.fp8_paged_mqa_logits` with sgl-deep-gemm's names and defaults, except for `indices`."""
    return dsa.fp8_paged_mqa_logits(
        q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits
    )


def get_paged_mqa_logits_metadata(context_lens: torch.Tensor, block_kv: int, num_sms: int) -> torch.Tensor:
    """Call `dsa.get_paged_mqa_logits_metadata` with sgl-deep-gemm's names, except for `indices`."""
    return dsa.get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms)


def topk(
    logits: torch.Tensor, lengths: torch.Tensor, topk: int, row_starts: torch.Tensor | None = None
) -> torch.Tensor:
    """Return int32 [rows, topk]: the best keys of logits[r, start : start + length], counted from the row's start."""
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
    """Return the selection of `topk` as cache slots. Row r of logits uses row row_to_batch[r] of page_table; row r if
    row_to_batch is None."""
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
    """Return the selection of `topk` plus the row's offset: the position of the sequence's first key among the keys of
    all sequences.

    If row_starts is given, offsets must be columns of logits, like row_starts.
    """
    if row_starts is None:
        indices = dsa.topk_indices(logits, topk, lengths=lengths)
        return torch.where(indices < 0, indices, indices + topk_indices_offset[:, None])
    # With this page table of page size 1, whose row b is b, b + 1, ..., the op itself adds the offset. The table's rows
    # overlap in memory, so 2 * columns numbers are enough.
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
    """Write DeepSeek-V4's selection to out_page_indices [rows, k] int32: as cache slots, or as positions if page_tables
    is None.

    out_raw_indices  None, or int32 [rows, k] that receives the positions; not written if page_tables is None
    """
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
    """Call `dsa.flash_mla_sparse_fwd`. As in SGLang, use_legacy returns max_logits and lse in base 2."""
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
    """Call `dsa.flash_mla_with_kvcache` over selected keys. The cache is FP8 or, unlike in FlashMLA, has q's dtype. The
    op needs no plan, so SGLang's plan is not a parameter."""
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
    """Return (plan [1, 8], num_splits [B + 1]), int32 zeros that SGLang stores, slices and copies in place of
    FlashMLA's plan. No kernel reads them."""
    numbers = cache_seqlens.new_zeros(8 + len(cache_seqlens) + 1)
    return numbers[:8].view(1, 8), numbers[8:]
