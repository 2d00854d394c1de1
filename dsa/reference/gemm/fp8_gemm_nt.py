"""GEMM of FP8 activations with one scale per token and 128 channels and FP8 weights with one per 128 x 128 block."""

from itertools import pairwise

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.checks import FLOATS, check_dtype, check_memory, check_pair, check_same_device, check_tensor

BLOCK = 128
_E4M3 = (torch.float8_e4m3fn,)
_F32 = (torch.float32,)


@without_autocast
def fp8_gemm_nt(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """y[m, n] = sum_g (sum_{k in block g} q[m, k] w[n, k]) * s[m, g] * ws[n // 128, g], g over blocks of 128 channels.

    a          (q [..., M, K] e4m3, s [..., M, ceil(K / 128)] fp32): the activations and their scales
    b          (w [N, K] e4m3, ws [ceil(N / 128), ceil(K / 128)] fp32): the weight, row-major, and its scales
    out_dtype  float32, bfloat16 or float16

    Returns [..., M, N]. N and K may be any number: the last block of rows or channels is then ragged (the 576 rows of
    `kv_a_proj_with_mqa` have 5 scale rows, the last for 64 rows). Scales are any fp32 numbers and multiply. Each
    block's products are summed in fp32, scaled, and the blocks are added in order of g in fp32; the sum is rounded to
    out_dtype once. No rows or no channels: an empty or a zero result. NaN follows IEEE rules.
    Raises TypeError or ValueError for other types, dtypes and shapes.
    Source: DeepGEMM's `fp8_gemm_nt`, and `fp8_gemm` of DeepSeek-V3.2's inference code.
    """
    check(a, b, out_dtype)
    (q, s), (w, ws) = a, b
    check_memory("a[0]", q)
    rows, groups = len(w), ws.shape[1]
    leading = q.shape[:-1]
    tokens = q.shape[:-1].numel()
    q, s, w = q.reshape(tokens, q.shape[-1]).float(), s.reshape(tokens, groups), w.float()
    # One scale per weight row, by repeating rather than by dividing: the last block may be ragged.
    row_scale = ws.repeat_interleave(BLOCK, 0)[:rows]
    y = torch.zeros(tokens, rows, dtype=torch.float32, device=q.device)
    for g in range(groups):
        block = slice(g * BLOCK, (g + 1) * BLOCK)
        partial = q[:, block] @ w[:, block].T
        y += partial.mul_(s[:, g, None]).mul_(row_scale[:, g])
    return y.to(out_dtype).reshape(*leading, rows)


def check(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor], out_dtype: torch.dtype) -> None:
    """Types, dtypes and shapes of `fp8_gemm_nt`."""
    (q, s), (w, ws) = pair("a", a), pair("b", b)
    check_tensor("b[0]", w, _E4M3, ("N", "K"))
    rows, k = w.shape
    groups = -(-k // BLOCK)
    check_tensor("b[1]", ws, _F32, (-(-rows // BLOCK), groups), "b[0]")
    leading = tuple(q.shape[:-1]) if isinstance(q, torch.Tensor) and q.dim() else ("M",)
    check_tensor("a[0]", q, _E4M3, (*leading, k), "b[0]")
    check_tensor("a[1]", s, _F32, (*leading, groups), "a[0]")
    check_dtype("out_dtype", out_dtype, FLOATS)
    check_same_device(("a[0]", q), **{"a[1]": s, "b[0]": w, "b[1]": ws})


@without_autocast
def grouped_fp8_gemm_nt(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    ends: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """`fp8_gemm_nt` of each row with one of E weights: rows ends[e - 1] to ends[e] - 1 with weight e, ends[-1] being 0.

    a          (q [M, K] e4m3, s [M, ceil(K / 128)] fp32)
    b          (w [E, N, K] e4m3, ws [E, ceil(N / 128), ceil(K / 128)] fp32)
    ends       int32 [E], ascending from at least 0 to M: a weight's rows may be none
    out_dtype  float32, bfloat16 or float16

    Returns [M, N]; a row's result depends on no other row. Raises as `fp8_gemm_nt`, and ValueError for ends that are
    not so.
    Source: DeepGEMM's `m_grouped_fp8_gemm_nt_contiguous`, whose groups have padded rows and an index a row.
    """
    check_grouped(a, b, ends, out_dtype)
    (q, s), (w, ws) = a, b
    check_memory("a[0]", q)
    limits = [0, *ends.tolist()]
    if limits != sorted(limits) or limits[-1] != len(q):
        raise ValueError(f"ends: must ascend from at least 0 to M={len(q)}, got {limits[1:]}")
    parts = [slice(begin, end) for begin, end in pairwise(limits)]
    out = torch.empty(len(q), w.shape[1], dtype=out_dtype, device=q.device)
    for part, weight, scale in zip(parts, w, ws):
        out[part] = fp8_gemm_nt((q[part], s[part]), (weight, scale), out_dtype)
    return out


def check_grouped(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    ends: torch.Tensor,
    out_dtype: torch.dtype,
) -> None:
    """Types, dtypes and shapes of `grouped_fp8_gemm_nt`."""
    (q, s), (w, ws) = pair("a", a), pair("b", b)
    check_tensor("b[0]", w, _E4M3, ("E", "N", "K"))
    matrices, rows, k = w.shape
    groups = -(-k // BLOCK)
    check_tensor("b[1]", ws, _F32, (matrices, -(-rows // BLOCK), groups), "b[0]")
    check_tensor("a[0]", q, _E4M3, ("M", k), "b[0]")
    check_tensor("a[1]", s, _F32, (len(q), groups), "a[0]")
    check_tensor("ends", ends, (torch.int32,), (matrices,), "b[0]")
    check_dtype("out_dtype", out_dtype, FLOATS)
    check_same_device(("a[0]", q), **{"a[1]": s, "b[0]": w, "b[1]": ws, "ends": ends})


def pair(name: str, value: object) -> tuple:
    """The two tensors of an operand."""
    return check_pair(name, value, "(e4m3 values, fp32 scales)")
