"""Attention over sequences that lie one after another, on Hopper, for the ops that need its output and LSE."""

import functools
import math
from collections.abc import Callable
from types import ModuleType

import torch

from dsa import backends
from dsa.kernels.training.limits import DENSE_CHANNELS, DENSE_DTYPES
from dsa.ops._kernel_arguments import dtype_name
from dsa.ops._tma_rows import tma_rows
from dsa.ops.declaration import Kernels
from dsa.ops.training._uncovered_rows import fill_uncovered
from dsa.reference.checks import check_same_device

KERNELS = Kernels("attention_forward", {"sm_90": "dsa.kernels.training.attention_forward_sm90"})
DTYPES = tuple(getattr(torch, name) for name in DENSE_DTYPES)
LOG2E = math.log2(math.e)
L2_BYTES = 16 << 20  # of keys and values that are read at a time, so that they come from the L2 cache


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out[t, h] = sum_j softmax_j(softmax_scale * q[t, h] . k[j, h']) v[j, h'], h' = h // (H / Hk), over the keys j
    that t sees: its sequence's n_k, or if `causal` of these the ones with j - n_k <= t - n_q, of n_q queries.

    q             [Tq, H, d], k [Tk, Hk, d], v [Tk, Hk, dv], bf16 or fp16; (d, dv): (64, 64), (128, 128) or (192, 128)
    cu_seqlens_*  int32 [B + 1], ascending from at least 0 to at most T*, as `make_plan` gives them: sequence b is rows
                  cu_seqlens[b] to cu_seqlens[b + 1] - 1
    max_seqlen_*  at least the longest sequence's length; what they say decides the order of work only

    Returns out [Tq, H, dv] and lse [H, Tq] fp32 (natural log). A row without keys gives 0 and +inf, and so does
    one of no sequence. Rows of k and v that belong to no sequence may hold anything.
    Raises TypeError or ValueError for other types, dtypes, shapes and devices.
    Deterministic. CUDA-graph safe.
    """
    check(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale)
    check_same_device(("q", q), k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    (tokens, heads, dim), (keys, kv_heads, value_dim) = q.shape, v.shape
    out = q.new_empty(tokens, heads, value_dim)
    lse = q.new_empty(heads, tokens, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    if keys == 0 or len(cu_seqlens_q) == 1:
        return out.zero_(), lse.fill_(math.inf)
    key_bytes = max(max_seqlen_k, 1) * (dim + value_dim) * k.element_size()
    group = max(1, min(kv_heads, L2_BYTES // key_bytes)) * (heads // kv_heads)
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    launch = _kernel(KERNELS.modules(backends.arch_of(q.device)), q.dtype, dim, value_dim)
    with backends.on_device(q):
        launch(
            *(tma_rows(x) for x in (q, k, v)),
            *(x.contiguous() for x in (cu_seqlens_q, cu_seqlens_k)),
            *(out, lse, counter, softmax_scale * LOG2E, int(causal), group, backends.num_sms(q.device)),
        )
    fill_uncovered(cu_seqlens_q, (out, 0.0), (lse.T, math.inf))
    return out, lse


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float,
) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(f"{name}: must be [tokens, heads, channels], got shape {list(x.shape)}")
        if x.dtype not in DTYPES or x.dtype != q.dtype:
            raise TypeError(f"{name}: must be bfloat16 or float16, and all the same, got {x.dtype}")
    if (q.shape[2], v.shape[2]) not in DENSE_CHANNELS or k.shape[2] != q.shape[2]:
        raise ValueError(
            f"q, k, v: channels (d, d, dv) must be of (d, dv) in {DENSE_CHANNELS}, got {q.shape[2]}, {k.shape[2]}, "
            f"{v.shape[2]}"
        )
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"v: must have k's tokens and heads {list(k.shape[:2])}, got {list(v.shape[:2])}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q: heads must be a multiple of k's {k.shape[1]}, got {q.shape[1]}")
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if x.dtype != torch.int32:
            raise TypeError(f"{name}: must be int32, got {x.dtype}")
        if x.dim() != 1 or len(x) == 0 or len(x) != len(cu_seqlens_q):
            raise ValueError(f"{name}: must be [B + 1], the same B for queries and keys, got shape {list(x.shape)}")
    if not 0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale: must be positive and finite, got {softmax_scale}")


@functools.cache
def _kernel(kernels: ModuleType, dtype: torch.dtype, dim: int, value_dim: int) -> Callable[..., None]:
    return kernels.compile_attention_forward(dtype_name(dtype), kernels.CONFIGS[dim, value_dim])
