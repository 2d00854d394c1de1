"""Attention to a sliding window and selected keys, followed by inverse rope and the FP8 cast for the next product."""

import math

import torch

from dsa.kernels.gemm.limits import GROUP
from dsa.kernels.mla.limits import HEAD_DIM_V, ROTATED_BACK, TILE_M
from dsa.ops.elementwise.rotary import check_rotated
from dsa.ops.mla._sparse_attention import (
    DTYPES,
    Selection,
    aligned,
    inner_contiguous,
    list_arguments,
    sink_arguments,
    stream_k,
)
from dsa.ops.mla._window_selections import PACKED, WINDOW_LIST, window_selections
from dsa.reference.mla import window_attention_cast as reference
from dsa.runtime import backends
from dsa.runtime.declare import (
    F32,
    FLOATS,
    INT32,
    POSITIVE,
    ROWS,
    Arguments,
    Flag,
    Int,
    Number,
    Tensor,
    dtype_name,
    multiple_of,
    op,
)

__all__ = ["window_attention_cast_to_fp8"]


def _check(
    q: torch.Tensor,
    compressed: torch.Tensor | None,
    indices: torch.Tensor | None,
    cos: torch.Tensor,
    groups: int,
    topk_length: torch.Tensor | None,
) -> None:
    if q.shape[1] % groups:
        raise ValueError(f"groups: must divide the {q.shape[1]} heads of q, got {groups}")
    check_rotated("q", q, cos)
    if (compressed is None) != (indices is None):
        given, missing = ("compressed", "indices") if indices is None else ("indices", "compressed")
        raise ValueError(f"{missing}: must be given with {given}, got None")
    if topk_length is not None and indices is None:
        raise ValueError("indices: must be given with topk_length, got None")


WINDOW_ATTENTION_CAST_TO_FP8 = Arguments(
    limits={"d": multiple_of(GROUP)},
    rule=_check,
    **PACKED,
    compressed=Tensor("n 1 d", FLOATS, like="q", optional=True, layout=ROWS),
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
    """Return the input of V4's wo_a: row g * T + t is the FP8 cast of R(-t) o[t, h] for the heads h of group g.

    o is the attention of query t to its window and its selected entries (`window_sparse_attention`), rounded to q's
    dtype. R(-t), the inverse of rope, rotates the last R channels of each head as pairs of adjacent channels, (a, b) ->
    (a cos + b sin, b cos - a sin) in fp32, rounded to q's dtype. Then each 128 channels get a scale as in
    `per_token_cast_to_fp8`. The T rows of a group are adjacent, and each row concatenates the channels of the group's
    heads. So the results are activations for `grouped_fp8_gemm_nt` with ends T, 2 T, ..., groups * T.

    q             [T, H, d] bf16 or fp16, the sequences one after another, d a multiple of 128; fp32 runs the PyTorch
                  reference, with a warning on Hopper
    kv, cu_seqlens_q, cu_seqlens_k, window, softmax_scale, attn_sink, window_indices
                  see `window_sparse_attention`; a value is all d channels of its key
    compressed, indices, topk_length  see `window_sparse_attention`, or None: attention to the window alone
    cos, sin      [T, R / 2] fp32: cos and sin of the angles by which rope rotates keys at the tokens' positions; R at
                  most d
    groups        number of groups, each of H / groups adjacent heads; divides H
    use_ue8m0     True: a scale is max(amax, 1e-4) / 448, rounded up to a power of two; False: it is not rounded up

    Returns q [groups * T, H / groups * d] float8_e4m3fn and scale [groups * T, H / groups * d / 128] fp32, contiguous.
    Not differentiable. Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices, and if only
    one of compressed and indices is given.
    On Hopper: d = 512, R = 64, any number of heads (in tiles of 64), rows of keys at multiples of 16 bytes,
    softmax_scale above 0; one kernel, or two without window_indices. The bits are those of `window_sparse_attention`
    (with more than 32 heads), `apply_rotary` and the cast in sequence. Compared with `window_sparse_attention` followed
    by `rotary_cast_to_fp8`, the op saves writing and reading o: 2 bytes per channel each. Deterministic, and a query's
    result does not depend on the other queries. CUDA-graph safe, no host synchronisation.
    Source: `Attention` of DeepSeek-V4's inference code, from attention to wo_a.
    """
    packed = (q, kv, cu_seqlens_q, cu_seqlens_k, window)
    rest = (cos, sin, groups, softmax_scale, attn_sink, topk_length, window_indices, use_ue8m0)
    return _window_attention_cast_to_fp8(*packed, compressed, indices, *rest)


def _results(q: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, channels = groups * len(q), q.shape[1] // groups * q.shape[2]
    out = torch.empty((rows, channels), dtype=torch.float8_e4m3fn, device=q.device)
    return out, torch.empty((rows, channels // GROUP), dtype=torch.float32, device=q.device)


@op(
    arguments=WINDOW_ATTENTION_CAST_TO_FP8,
    reference=reference.window_attention_cast_to_fp8,
    results=_results,
    limits={"d": (HEAD_DIM_V,), "softmax_scale": POSITIVE, "R/2": (ROTATED_BACK // 2,)},
    dtypes=DTYPES,
)
def _window_attention_cast_to_fp8(
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
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    window_indices: torch.Tensor | None,
    use_ue8m0: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    from dsa.kernels.mla.sparse_mla_cast_sm90 import compile_sparse_mla_cast

    out, scale = _results(q, groups)
    queries, heads, _ = q.shape
    if out.numel() == 0:
        return out, scale
    selected = None if compressed is None else (compressed, indices, topk_length)
    selections = window_selections((q, kv, cu_seqlens_q, cu_seqlens_k, window), window_indices, selected)
    if not selections:  # neither kv nor compressed has keys: pass one key that no query selects
        nothing = torch.full((queries, 1), -1, dtype=torch.int32, device=q.device)
        selections = [Selection(q.new_zeros(1, 1, HEAD_DIM_V), nothing, None)]
    sink = None if attn_sink is None else inner_contiguous(attn_sink)
    workers, full_waves, _ = stream_k(queries, -(-heads // TILE_M), 1, backends.num_sms(q.device), may_split=False)
    launch = compile_sparse_mla_cast(dtype_name(q.dtype), len(selections), use_ue8m0)
    launch(
        *(aligned(q).unsqueeze(1), *list_arguments(selections, q.device), *sink_arguments(sink, q.device)),
        *(inner_contiguous(cos), inner_contiguous(sin)),
        *(x.view(groups, queries, heads // groups, -1) for x in (out, scale)),
        *(softmax_scale * math.log2(math.e), workers, full_waves),
    )
    return out, scale
