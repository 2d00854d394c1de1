"""Attention over a sliding window and selected keys, rotated back and cast to FP8 by groups of heads."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.elementwise.rotary import apply_rotary, check_rotated
from dsa.reference.gemm.fp8_cast import per_token_cast_to_fp8
from dsa.reference.mla.sliding_window_attention import (
    PACKED,
    WINDOW_LIST,
    sliding_window_attention,
    window_sparse_attention,
)
from dsa.runtime.arguments import F32, ROWS, Arguments, Flag, Int, Number, Tensor
from dsa.runtime.checks import FLOATS, INT32, check_memory

GROUP = 128  # channels that share a scale


def _check(
    q: torch.Tensor,
    compressed: torch.Tensor | None,
    indices: torch.Tensor | None,
    cos: torch.Tensor,
    groups: int,
    topk_length: torch.Tensor | None,
) -> None:
    if q.shape[2] % GROUP:
        raise ValueError(f"q: the last dimension must be a multiple of {GROUP}, got shape {list(q.shape)}")
    if q.shape[1] % groups:
        raise ValueError(f"groups: must divide the {q.shape[1]} heads of q, got {groups}")
    check_rotated("q", q, cos)
    if (compressed is None) != (indices is None):
        given, missing = ("compressed", "indices") if indices is None else ("indices", "compressed")
        raise ValueError(f"{missing}: must be given with {given}, got None")
    if topk_length is not None and indices is None:
        raise ValueError("indices: must be given with topk_length, got None")


WINDOW_ATTENTION_CAST_TO_FP8 = Arguments(
    rule=_check,
    **PACKED,
    compressed=Tensor("n 1 d", FLOATS, like="q", mixed=True, optional=True, layout=ROWS),
    indices=Tensor("total_q K", INT32, optional=True),
    cos=Tensor("total_q R/2", F32),
    sin=Tensor("total_q R/2", F32),
    groups=Int(),
    softmax_scale=Number(),
    attn_sink=Tensor("H", F32, optional=True),
    topk_length=Tensor("total_q", INT32, optional=True),
    window_indices=WINDOW_LIST,
    use_ue8m0=Flag(),
)


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
    """out of `window_sparse_attention`, or of `sliding_window_attention` without `compressed`; `apply_rotary` of its
    last channels by the negative angles; and `per_token_cast_to_fp8` of the heads of each of `groups`, group after
    group. Arguments as of `dsa.window_attention_cast_to_fp8`."""
    packed = (q, kv, cu_seqlens_q, cu_seqlens_k, window)
    rest = (cos, sin, groups, softmax_scale, attn_sink, topk_length, window_indices, use_ue8m0)
    WINDOW_ATTENTION_CAST_TO_FP8.check(*packed, compressed, indices, *rest)
    check_memory("q", q)
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
