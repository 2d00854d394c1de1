"""vLLM's calls of its kernels, with its names, parameters and buffers, as calls of the ops of dsa.

Nothing here imports vLLM. Index scores over contiguous and paged keys and their plan need no function of their own:
vLLM calls DeepGEMM's, which `dsa.compat.deep_gemm` has. Errors are those of the ops.
"""

import functools
from collections.abc import Callable

import torch

import dsa
from dsa.kernels.indexer.limits import NEXT_N

HEAD_DIM_V = 512
# For so many heads a GPU the engine's kernel that makes V4's queries is compiled; fewer are padded up to one of these.
V4_HEADS = (8, 16, 32, 64, 128)


def schedule_slots(num_sms: int, next_n: int) -> int:
    """How many parts a plan of paged scores has: one for each multiprocessor, for any number of queries a sequence.
    The engine halves them for 4 queries, since two of its CTAs then share a task."""
    return num_sms


def native_next_n_supported(next_n: int) -> bool:
    """Whether paged scores take so many queries of a sequence at once, which then share the reads of its keys."""
    return next_n in NEXT_N


def gather_keys(
    kv_cache: torch.Tensor,
    dst_k: torch.Tensor,
    dst_scale: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
) -> None:
    """The index keys of several sequences, from their pages into one row after the other.

    kv_cache     [pages, P, D + 4] uint8: P x D e4m3 and then P fp32 scales a page
    dst_k        [N, D] e4m3 or bytes, from a multiple of 16 bytes on: where they go, and 0 behind the last sequence
    dst_scale    [N, 4] bytes of fp32, from a multiple of 4 bytes on: the same of their scales
    block_table  [B, max_pages] int32
    cu_seq_lens  [B + 1] int32: where each sequence's keys begin among the N rows
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
    """raw_topk_indices [num_rows, topk_tokens], rows any distance apart: the best columns of logits from
    cu_seqlen_ks[t] up to cu_seqlen_ke[t], counted from the first, -1 where there are fewer."""
    lengths = cu_seqlen_ke - cu_seqlen_ks
    dsa.topk_indices(logits, topk_tokens, starts=cu_seqlen_ks, lengths=lengths, out=raw_topk_indices)


def topk_decode(
    logits: torch.Tensor, seq_lens: torch.Tensor, next_n: int, topk_indices: torch.Tensor, topk_tokens: int
) -> None:
    """topk_indices [B * next_n, topk_tokens], rows any distance apart: the best of each row's keys, -1 where there are
    fewer. seq_lens [B, next_n]: the keys of each query; or [B] or [B, 1]: those of a sequence, of whose queries each
    sees one key more than the one before it."""
    dsa.topk_indices(logits, topk_tokens, lengths=row_lengths(seq_lens, next_n, len(logits)), out=topk_indices)


def row_lengths(seq_lens: torch.Tensor, next_n: int, rows: int) -> torch.Tensor:
    """int32 [rows]: how many keys each row of scores has."""
    if seq_lens.numel() == rows:
        return seq_lens.reshape(-1)
    steps = torch.arange(1 - next_n, 1, dtype=torch.int32, device=seq_lens.device)
    return (seq_lens.reshape(-1, 1) + steps).clamp_(min=0).reshape(-1)


def topk_forward(original: Callable[..., None]) -> Callable[..., None]:
    """`SparseIndexerTopk.forward`: `topk_decode`, unless the user chose one of the engine's kernels by name."""

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
    """(out [B, s_q, H, 512], lse [B, H, s_q]) of q [B, s_q, H, 576] over the selected keys of pages of bytes.

    cache    [pages, P, 656] of any dtype of one byte
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
    """(out [T, heads, 512], lse [T, heads]) of the first heads of q [T, at least heads, d] over selected rows.

    kv           [.., d] bf16, rows
    indices      [T, K] int32: rows of kv; -1 is no key
    topk_length  [T] int32 or None: only the first topk_length[t] indices count
    out          [T, at least heads, 512], of which the first heads are written, or None
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
    """`flash_mla_with_kvcache` over V4's window and compressed entries. What plans the engine's kernel is left unused
    and unchanged: of selected keys dsa needs no plan."""
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
    """`flash_mla_sparse_fwd`. The engine's batch-invariant mode does not admit its sparse attention."""
    return dsa.flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, out)


def v4_heads(num_heads: int) -> int:
    """The heads of V4's queries that the engine allocates and its kernel fills: the fewest that it can."""
    found = next((heads for heads in V4_HEADS if num_heads <= heads), None)
    if found is None:
        raise ValueError(f"num_heads: a GPU can have at most {V4_HEADS[-1]}, got {num_heads}")
    return found
