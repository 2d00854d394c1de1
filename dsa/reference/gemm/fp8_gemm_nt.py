"""Product of FP8 activations, which have one scale per token and 128 channels, with FP8 weights, which have one scale
per 128 x 128 block."""

from collections.abc import Callable
from itertools import pairwise

import torch

from dsa.reference.autocast import without_autocast

BLOCK = 128


@without_autocast
def fp8_gemm_nt(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """y[m, n] = sum_g (sum_{k in block g} q[m, k] w[n, k]) * s[m, g] * ws[n // 128, g], g over blocks of 128 channels.

    Returns [..., M, N]. N and K may be any numbers: the last block of rows or channels may be smaller (the 576 rows of
    `kv_a_proj_with_mqa` have 5 rows of scales, the last for 64 rows). Scales are any fp32 numbers. The products of a
    block are summed in fp32, and the sum is multiplied by the scales. The blocks are added in order of g in fp32, and
    the sum is rounded to out_dtype once. NaN follows IEEE rules. Arguments as in `dsa.fp8_gemm_nt`.
    Source: DeepGEMM's `fp8_gemm_nt`, and `fp8_gemm` of DeepSeek-V3.2's inference code.
    """
    (q, s), (w, ws) = a, b
    rows, groups = len(w), -(-q.shape[-1] // BLOCK)
    leading = q.shape[:-1]
    tokens = q.shape[:-1].numel()
    q, s, w = q.reshape(tokens, q.shape[-1]).float(), s.reshape(tokens, s.shape[-1]), w.float()
    # The last block may be smaller, so the repeated scales are cut to the number of rows.
    row_scale = ws.repeat_interleave(BLOCK, 0)[:rows]
    y = torch.zeros(tokens, rows, dtype=torch.float32, device=q.device)
    for g in range(groups):
        block = slice(g * BLOCK, (g + 1) * BLOCK)
        partial = q[:, block] @ w[:, block].T
        y += partial.mul_(s[:, g, None]).mul_(row_scale[:, g])
    return y.to(out_dtype).reshape(*leading, rows)


@without_autocast
def grouped_fp8_gemm_nt(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    ends: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    rows: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    expected_rows: int | None = None,
) -> torch.Tensor:
    """`fp8_gemm_nt` of each row with one of E weights: weight 0 for rows before ends[0], weight e for rows ends[e - 1]
    to ends[e] - 1.

    Row m of the product uses row rows[m] of `a`, or row m of `a` if `rows` is None. With `weights`, the fp32 sums of
    row m are multiplied by weights[m] before they are rounded. Rows from ends[E - 1] on belong to no expert and are not
    read. Their results, which the kernels leave undefined, are NaN here, so that a use of them is visible. Raises
    ValueError for ends that do not ascend from at least 0 to at most M, and for rows[m] outside `a` in a row m of an
    expert. `expected_rows` has no effect. Arguments as in `dsa.grouped_fp8_gemm_nt`.
    Source: DeepGEMM's `m_grouped_fp8_gemm_nt_contiguous`, which pads the rows of a group and takes an index per row.
    """
    w, ws = b
    return products_by_weight(a, lambda e: (w[e], ws[e]), w.shape[1], ends, out_dtype, rows, weights)


def products_by_weight(
    a: tuple[torch.Tensor, torch.Tensor],
    weight_of: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    columns: int,
    ends: torch.Tensor,
    out_dtype: torch.dtype,
    rows: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """Check the contents of `ends` and `rows`, and compute `grouped_fp8_gemm_nt` with `columns` columns (N).

    weight_of: a function that maps e to (w [N, K], scales). It is called only for experts that have rows.
    """
    q, s = a
    count, limits = len(q if rows is None else rows), [0, *ends.tolist()]
    if limits != sorted(limits) or limits[-1] > count:
        origin = "a[0], without rows" if rows is None else "rows"
        raise ValueError(f"ends: must ascend from at least 0 to at most M={count} (as of {origin}), got {limits[1:]}")
    if rows is not None:
        rows = rows[: limits[-1]]
        outside = ((rows < 0) | (rows >= len(q))).nonzero()
        if len(outside):
            m = outside[0].item()
            raise ValueError(f"rows: must be from 0 to {len(q) - 1}, got {rows[m].item()} at {m}")
        q, s = q.view(torch.uint8)[rows].view(q.dtype), s[rows]
    out = torch.full((count, columns), torch.nan, dtype=out_dtype, device=q.device)
    for e, (begin, end) in enumerate(pairwise(limits)):
        if begin == end:
            continue
        part = slice(begin, end)
        sums = fp8_gemm_nt((q[part], s[part]), weight_of(e), torch.float32)
        out[part] = sums if weights is None else sums * weights[part, None]
    return out
