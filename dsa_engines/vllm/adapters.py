"""vLLM's kernel calls with its names, parameters and buffers, implemented with dsa's ops.

This module does not import vLLM. It has no index scores and plans: vLLM calls DeepGEMM's functions for them, which
`dsa.compat.deep_gemm` has. The functions raise the errors of the ops.
"""

import functools
from collections.abc import Callable

import torch

import dsa
from dsa.kernels.indexer.limits import NEXT_N

HEAD_DIM_V = 512
# Numbers of heads per GPU for which vLLM's kernel for V4's queries is compiled. Others are padded to the next of these.
V4_HEADS = (8, 16, 32, 64, 128)


def schedule_slots(num_sms: int, next_n: int) -> int:
    """Return the number of tasks in a plan of paged scores: one per SM, for any next_n. For next_n 4, vLLM's own
    function returns half, because its kernel then runs a task on two CTAs."""
    return num_sms


def native_next_n_supported(next_n: int) -> bool:
    """Return whether paged scores support next_n queries per sequence, which then share the reads of its keys."""
    return next_n in NEXT_N


def gather_keys(
    kv_cache: torch.Tensor,
    dst_k: torch.Tensor,
    dst_scale: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
) -> None:
    """Copy the index keys of several sequences from their pages to consecutive rows.

    kv_cache     [pages, P, D + 4] uint8: a page has P x D e4m3, then P fp32 scales
    dst_k        [N, D] e4m3 or bytes, at a multiple of 16 bytes: receives the keys; rows after the last sequence are 0
    dst_scale    [N, 4] bytes of fp32, at a multiple of 4 bytes: receives the scales in the same way
    block_table  [B, max_pages] int32
    cu_seq_lens  [B + 1] int32: first row of each sequence's keys
    """
    slots = dsa.slot_mapping(block_table, cu_seq_lens, None, len(dst_k), kv_cache.shape[1])
    k, k_scale = dst_k.view(torch.float8_e4m3fn), dst_scale.view(torch.float32).squeeze(1)
    dsa.read_indexer_cache(kv_cache.unsqueeze(2), slots, k, k_scale)


def topk_prefill(
    logits: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    raw_topk_indices: torch.Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    topk_tokens: int,
) -> None:
    """Write to raw_topk_indices [num_rows, topk_tokens], with any row stride, the best of the columns
    [cu_seqlen_ks[t], cu_seqlen_ke[t]) of logits. Indices are relative to cu_seqlen_ks[t]; missing ones are -1."""
    lengths = cu_seqlen_ke - cu_seqlen_ks
    dsa.topk_indices(logits, topk_tokens, starts=cu_seqlen_ks, lengths=lengths, out=raw_topk_indices)


def topk_decode(
    logits: torch.Tensor, seq_lens: torch.Tensor, next_n: int, topk_indices: torch.Tensor, topk_tokens: int
) -> None:
    """Write to topk_indices [B * next_n, topk_tokens], with any row stride, the best keys of each row; missing ones are
    -1.

    seq_lens  [B, next_n]: keys per query. Or [B] or [B, 1]: keys of a sequence's last query; each earlier query has
              one key less than the next
    """
    dsa.topk_indices(logits, topk_tokens, lengths=row_lengths(seq_lens, next_n, len(logits)), out=topk_indices)


def row_lengths(seq_lens: torch.Tensor, next_n: int, rows: int) -> torch.Tensor:
    """Return int32 [rows]: the number of keys per row of scores."""
    if seq_lens.numel() == rows:
        return seq_lens.reshape(-1)
    steps = torch.arange(1 - next_n, 1, dtype=torch.int32, device=seq_lens.device)
    return (seq_lens.reshape(-1, 1) + steps).clamp_(min=0).reshape(-1)


def topk_forward(original: Callable[..., None]) -> Callable[..., None]:
    """Return a `SparseIndexerTopk.forward` that calls `topk_decode`, unless the user named one of vLLM's kernels."""

    @functools.wraps(original)
    def forward(
        self,
        logits: torch.Tensor,
        seq_lens: torch.Tensor,
        next_n: int,
        topk_indices: torch.Tensor,
        topk_tokens: int,
        max_seq_len: int,
    ) -> None:
        if self._backend != "auto":
            return original(self, logits, seq_lens, next_n, topk_indices, topk_tokens, max_seq_len)
        topk_decode(logits, seq_lens, next_n, topk_indices, topk_tokens)

    return forward


def fp8_attention(
    q: torch.Tensor, cache: torch.Tensor, indices: torch.Tensor, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out [B, s_q, H, 512], lse [B, H, s_q]) of q [B, s_q, H, 576] over the selected keys of an FP8 cache.

    cache    [pages, P, 656], any one-byte dtype
    indices  [B, s_q, K] int32, page * P + offset; -1 is no key
    """
    return dsa.flash_mla_with_kvcache(
        q,
        cache.view(torch.uint8).unsqueeze(-2),
        None,
        None,
        HEAD_DIM_V,
        None,
        softmax_scale=softmax_scale,
        is_fp8_kvcache=True,
        indices=indices,
    )


def bf16_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    topk_length: torch.Tensor | None,
    heads: int,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out [T, heads, 512], lse [T, heads]) of the first `heads` heads of q [T, H, d] over the selected rows.

    kv           [..., d] bf16
    indices      [T, K] int32: rows of kv; -1 is no key
    topk_length  [T] int32 or None: only the first topk_length[t] indices count
    out          [T, H, 512], whose first `heads` heads are written, or None
    """
    out, _, lse = dsa.flash_mla_sparse_fwd(
        q[:, :heads],
        kv.view(-1, 1, kv.shape[-1]),
        indices.view(len(q), 1, -1),
        softmax_scale,
        topk_length=topk_length,
        out=None if out is None else out[:, :heads],
    )
    return out, lse


def v4_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: object,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    **sparse: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call `dsa.flash_mla_with_kvcache` over V4's window and compressed entries. vLLM's plan is neither read nor
    written, because dsa needs no plan for selected keys."""
    return dsa.flash_mla_with_kvcache(
        *(q, k_cache, block_table, cache_seqlens, head_dim_v, None, num_splits, softmax_scale, causal, is_fp8_kvcache),
        **sparse,
    )


def v4_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = HEAD_DIM_V,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Call `dsa.flash_mla_sparse_fwd`, never batch-invariant: vLLM's batch-invariant mode excludes sparse attention."""
    return dsa.flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, out)


def v4_heads(num_heads: int) -> int:
    """Return the number of heads to which V4's queries are padded: the smallest that vLLM's kernel supports."""
    found = next((heads for heads in V4_HEADS if num_heads <= heads), None)
    if found is None:
        raise ValueError(f"num_heads: a GPU can have at most {V4_HEADS[-1]}, got {num_heads}")
    return found
