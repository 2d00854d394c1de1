"""Attention over a sliding window and selected keys, the inverse rotation of the result, and the cast of groups of
heads to FP8."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.elementwise.rotary import apply_rotary
from dsa.reference.gemm.fp8_cast import per_token_cast_to_fp8
from dsa.reference.mla.sliding_window_attention import sliding_window_attention, window_sparse_attention


@without_autocast
@torch.no_grad()
def window_attention_cast_to_fp8(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    window: int,
    compressed: torch.Tensor | None,
    indices: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    groups: int,
    softmax_scale: float,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    *,
    window_indices: torch.Tensor | None = None,
    use_ue8m0: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a window, and over selected keys if `compressed` is given; inverse rotation; and the cast to FP8.

    The attention is `window_sparse_attention`, or `sliding_window_attention` if `compressed` is None. `apply_rotary`
    rotates the last channels of the attention's result by the negative angles. `per_token_cast_to_fp8` casts the
    channels of each group of heads: row g * T + t of the result is group g of query t. Raises ValueError like
    `sliding_window_attention`. Arguments as in `dsa.window_attention_cast_to_fp8`.
    """
    packed = (q, kv, cu_seqlens_q, cu_seqlens_k, window)
    softmax = (softmax_scale, q.shape[2], attn_sink)
    if compressed is None:
        out, _ = sliding_window_attention(*packed, *softmax, indices=window_indices)
    else:
        out, _ = window_sparse_attention(
            *packed, compressed, indices, *softmax, topk_length, window_indices=window_indices
        )
    out = apply_rotary(out, cos, -sin, interleaved=True, dims="last")
    rows = out.unflatten(1, (groups, q.shape[1] // groups)).transpose(0, 1).flatten(2).flatten(0, 1)
    return per_token_cast_to_fp8(rows, use_ue8m0)
