"""Hooks that replace SGLang's functions. A hook gets the original function, followed by that function's arguments.

The arguments have SGLang's names and order. If dsa does not serve a call, for example because another model in the same
process has a cache with another layout, the hook calls the original function.
"""

from collections.abc import Callable
from typing import Any

import torch

from dsa.kernels.indexer.limits import NEXT_N
from dsa_engines.sglang import adapters
from dsa_engines.sglang.layouts import V4_BYTES, mla_layout

Original = Callable[..., Any]


def resolver(adapter: Callable[..., torch.Tensor]) -> Callable[[Original], Callable[..., torch.Tensor]]:
    """Return the hook of a function that takes no arguments and returns the implementation to call."""
    return lambda original: adapter


def paged_mqa_schedule_2d_ctx_lens(
    original: Original,
    backend: Any,
    forward_mode: Any,
    cache_seqlens_int32: torch.Tensor,
    seqlens_expanded: torch.Tensor,
    batch_size: int,
) -> torch.Tensor:
    """In a verify pass with 2 to 4 draft tokens, return the context lengths as int32 [B, next_n]. The draft tokens of a
    sequence are then scored together, which reads the keys once. On Hopper, SGLang itself scores each token as a
    separate sequence."""
    next_n = backend.speculative_num_draft_tokens
    together = forward_mode.is_target_verify() and next_n in NEXT_N and next_n > 1
    if together and seqlens_expanded.numel() == batch_size * next_n:
        return seqlens_expanded.reshape(batch_size, next_n).contiguous()
    return original(backend, forward_mode, cache_seqlens_int32, seqlens_expanded, batch_size)


def topk_transform(is_fused: Callable[[], bool]) -> Callable[..., torch.Tensor]:
    """Return the hook of `DSATopKBackend.topk_transform`, for every top-k kernel of SGLang.

    is_fused  returns whether selections are cache slots (PAGED) or rows of the gathered keys (RAGGED); otherwise they
              are positions in the sequence
    """

    def hook(
        original: Original,
        backend: Any,
        logits: torch.Tensor,
        lengths: torch.Tensor,
        topk: int,
        topk_transform_method: Any,
        attn_metadata: Any,
        cu_seqlens_q_topk: torch.Tensor | None = None,
        topk_indices_offset: torch.Tensor | None = None,
        row_starts: torch.Tensor | None = None,
        batch_idx_list: torch.Tensor | None = None,
        force_unfused_topk: bool = False,
    ) -> torch.Tensor:
        if force_unfused_topk or not is_fused():
            return adapters.topk(logits, lengths, topk, row_starts)
        if topk_transform_method.name == "RAGGED":
            if topk_indices_offset is None:
                raise ValueError("topk_indices_offset: must be int32 [rows] for RAGGED selections, got None")
            return adapters.topk_ragged(logits, lengths, topk, topk_indices_offset, row_starts)
        # In prefill, logits have a row per token and the table has a row per request: token_to_batch_idx maps the rows,
        # or batch_idx_list the rows of a chunk. Otherwise both are None, and row r of logits uses row r of the table.
        row_to_batch = attn_metadata.token_to_batch_idx if batch_idx_list is None else batch_idx_list
        table, page_size = attn_metadata.real_page_table, attn_metadata.page_size
        return adapters.topk_paged(logits, lengths, topk, table, page_size, row_starts, row_to_batch)

    return hook


def forward_flashmla_sparse(
    original: Original,
    backend: Any,
    q_all: torch.Tensor,
    kv_cache: torch.Tensor,
    v_head_dim: int,
    page_table_1: torch.Tensor,
    sm_scale: float,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention over selected rows of a bf16 array, without padding to 64 heads."""
    if mla_layout(backend.token_to_kv_pool) is None:
        return original(backend, q_all, kv_cache, v_head_dim, page_table_1, sm_scale, topk_length, attn_sink)
    lengths = _of_rows(topk_length, q_all)
    arguments = q_all, kv_cache, page_table_1.unsqueeze(1), sm_scale, v_head_dim, attn_sink, lengths
    return adapters.sparse_prefill(*arguments, use_legacy=False, batch_invariant=_is_deterministic(backend))[0]


def forward_flashmla_kv(
    original: Original,
    backend: Any,
    q_all: torch.Tensor,
    kv_cache: torch.Tensor,
    v_head_dim: int,
    sm_scale: float,
    layer: Any,
    metadata: Any,
    page_table_1: torch.Tensor,
) -> torch.Tensor:
    """Return [tokens, 1, heads, v_head_dim]: attention over selected keys of the paged cache. Unlike SGLang's function,
    do not pad to 64 or 128 heads, and read a bf16 cache without quantising it first."""
    if mla_layout(backend.token_to_kv_pool) is None:
        return original(backend, q_all, kv_cache, v_head_dim, sm_scale, layer, metadata, page_table_1)
    q = q_all.view(-1, 1, layer.tp_q_head_num, layer.head_dim)
    cache = kv_cache.view(-1, backend.physical_page_size, 1, backend.kv_cache_dim)
    lengths = _of_rows(metadata.dsa_cache_seqlens_int32, q)
    arguments = q, cache, page_table_1.unsqueeze(1), v_head_dim, sm_scale, lengths
    return adapters.sparse_decode(*arguments, batch_invariant=_is_deterministic(backend))[0]


def compute_flashmla_metadata(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return the hook of `_compute_flashmla_metadata`. make: the class of the result."""

    def hook(original: Original, backend: Any, cache_seqlens: torch.Tensor, seq_len_q: int) -> Any:
        if mla_layout(backend.token_to_kv_pool) is None:
            return original(backend, cache_seqlens, seq_len_q)
        plan, num_splits = adapters.no_plan(cache_seqlens)
        return make(flashmla_metadata=plan, num_splits=num_splits)

    return hook


def _is_deterministic(backend: Any) -> bool:
    """Return whether SGLang runs in deterministic mode, which sets num_splits to 1."""
    return backend.num_splits == 1


def _of_rows(lengths: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
    """Return `lengths` if it has one entry per row, else None. With None, attention reads all indices except -1."""
    return lengths if lengths is not None and len(lengths) == len(rows) else None


def fp8_mqa_logits(
    original: Original,
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    clean_logits: bool = False,
    max_seqlen_k: int = 0,
) -> torch.Tensor:
    return adapters.fp8_mqa_logits(q, kv, weights, ks, ke, clean_logits, max_seqlen_k)


def fp8_paged_mqa_logits(
    original: Original,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    arguments = q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits
    return adapters.fp8_paged_mqa_logits(*arguments) if indices is None else original(*arguments, indices)


def get_paged_mqa_logits_metadata(
    original: Original,
    context_lens: torch.Tensor,
    block_kv: int,
    num_sms: int,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    arguments = context_lens, block_kv, num_sms
    return adapters.get_paged_mqa_logits_metadata(*arguments) if indices is None else original(*arguments, indices)


def sglangs_paged_mqa_logits_metadata(
    original: Original, seq_lens: torch.Tensor, page_size: int, num_sm: int
) -> torch.Tensor:
    """Replace SGLang's own kernel for DeepGEMM's plan."""
    return adapters.get_paged_mqa_logits_metadata(seq_lens, page_size, num_sm)


def topk_transform_paged(
    original: Original,
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    page_tables: torch.Tensor,
    out_page_indices: torch.Tensor,
    page_size: int,
    out_raw_indices: torch.Tensor | None = None,
) -> None:
    adapters.topk_into(scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices)


def topk_transform_paged_v2(
    original: Original,
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    page_tables: torch.Tensor | None,
    out_page_indices: torch.Tensor,
    page_size: int,
    metadata: torch.Tensor,
    out_raw_indices: torch.Tensor | None = None,
) -> None:
    adapters.topk_into(scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices)


def kernel_num_heads(original: Original, attention: Any, num_tokens: int) -> int:
    """Return the number of heads of the queries passed to attention: that of this GPU, without padding to 64."""
    return attention.n_local_heads


def flash_mla_with_kvcache(is_deterministic: Callable[[], bool]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return the hook of DeepSeek-V4's attention over windows and compressed entries in caches with 584 bytes per key.

    is_deterministic  returns whether SGLang runs in deterministic mode; the call's arguments do not show it
    """

    def hook(
        original: Original,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        block_table: torch.Tensor | None,
        cache_seqlens: torch.Tensor | None,
        head_dim_v: int,
        tile_scheduler_metadata: Any,
        num_splits: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        descale_q: torch.Tensor | None = None,
        descale_k: torch.Tensor | None = None,
        is_fp8_kvcache: bool = False,
        indices: torch.Tensor | None = None,
        attn_sink: torch.Tensor | None = None,
        extra_k_cache: torch.Tensor | None = None,
        extra_indices_in_kvcache: torch.Tensor | None = None,
        topk_length: torch.Tensor | None = None,
        extra_topk_length: torch.Tensor | None = None,
        kv_format: str | None = None,
        *,
        use_legacy: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        caches = [k_cache] if extra_k_cache is None else [k_cache, extra_k_cache]
        if indices is None or any(cache.shape[-1] != V4_BYTES for cache in caches):
            plan = tile_scheduler_metadata, num_splits
            options = softmax_scale, causal, descale_q, descale_k, is_fp8_kvcache
            selections = indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length
            arguments = q, k_cache, block_table, cache_seqlens, head_dim_v, *plan, *options, *selections, kv_format
            return original(*arguments, use_legacy=use_legacy)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        extra = extra_k_cache, extra_indices_in_kvcache, extra_topk_length
        arguments = q, k_cache, indices, head_dim_v, scale, topk_length, attn_sink, *extra
        return adapters.sparse_decode(*arguments, batch_invariant=is_deterministic())

    return hook


def flash_mla_sparse_fwd(is_deterministic: Callable[[], bool]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return the hook of DeepSeek-V4's attention in prefill. is_deterministic: as for `flash_mla_with_kvcache`."""

    def hook(
        original: Original,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        sm_scale: float,
        d_v: int = 512,
        attn_sink: torch.Tensor | None = None,
        topk_length: torch.Tensor | None = None,
        *,
        use_legacy: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        arguments = q, kv, indices, sm_scale, d_v, attn_sink, topk_length
        return adapters.sparse_prefill(*arguments, use_legacy=use_legacy, batch_invariant=is_deterministic())

    return hook
