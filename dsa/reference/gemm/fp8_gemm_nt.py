"""GEMM of FP8 activations with one scale per token and 128 channels and FP8 weights with one per 128 x 128 block."""

from collections.abc import Callable
from itertools import pairwise

import torch

from dsa.reference.autocast import without_autocast
from dsa.runtime.arguments import ALIGNED, F32, ROWS, Arguments, Dtype, Int, Tensor
from dsa.runtime.checks import E4M3, FLOATS, INT32, check_memory, check_pair

BLOCK = 128

FP8_GEMM_NT = Arguments(
    first=("w", "ws"),
    q=Tensor("... K", E4M3, name="a[0]"),
    s=Tensor("... ceil(K/128)", F32, name="a[1]"),
    w=Tensor("N K", E4M3, layout=ROWS, name="b[0]"),
    ws=Tensor("ceil(N/128) ceil(K/128)", F32, name="b[1]"),
    out_dtype=Dtype(FLOATS),
)


def check_rows(
    q: torch.Tensor, rows: torch.Tensor | None, weights: torch.Tensor | None, expected_rows: int | None
) -> None:
    """The rule of grouped products: without `rows`, each row of q has one row of the result."""
    if rows is None and weights is not None and len(weights) != len(q):
        raise ValueError(f"weights: shape must be [{len(q)}], got [{len(weights)}] (sizes as of a[0], without rows)")
    check_expected_rows(q, rows, expected_rows)


def check_expected_rows(q: torch.Tensor, rows: torch.Tensor | None, expected_rows: int | None) -> None:
    """No more rows are expected than there are."""
    count, origin = (len(q), "a[0], without rows") if rows is None else (len(rows), "rows")
    if expected_rows is not None and expected_rows > count:
        raise ValueError(f"expected_rows: must be at most M = {count}, got {expected_rows} (sizes as of {origin})")


GROUPED_FP8_GEMM_NT = Arguments(
    rule=check_rows,
    first=("w", "ws"),
    q=Tensor("A K", E4M3, name="a[0]"),
    s=Tensor("A ceil(K/128)", F32, name="a[1]"),
    w=Tensor("E N K", E4M3, layout=ALIGNED, name="b[0]"),
    ws=Tensor("E ceil(N/128) ceil(K/128)", F32, name="b[1]"),
    ends=Tensor("E", INT32),
    out_dtype=Dtype(FLOATS),
    rows=Tensor("M", INT32, optional=True),
    weights=Tensor("M", F32, optional=True),
    expected_rows=Int(least=0, optional=True),
)


@without_autocast
def fp8_gemm_nt(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """y[m, n] = sum_g (sum_{k in block g} q[m, k] w[n, k]) * s[m, g] * ws[n // 128, g], g over blocks of 128 channels.

    Returns [..., M, N]. N and K may be any number: the last block of rows or channels is then ragged (the 576 rows of
    `kv_a_proj_with_mqa` have 5 scale rows, the last for 64 rows). Scales are any fp32 numbers and multiply. Each
    block's products are summed in fp32, scaled, and the blocks are added in order of g in fp32; the sum is rounded to
    out_dtype once. NaN follows IEEE rules. Arguments as of `dsa.fp8_gemm_nt`.
    Source: DeepGEMM's `fp8_gemm_nt`, and `fp8_gemm` of DeepSeek-V3.2's inference code.
    """
    (q, s), (w, ws) = pair("a", a), pair("b", b)
    FP8_GEMM_NT.check(q, s, w, ws, out_dtype)
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
    """`fp8_gemm_nt` of each row with one of E weights: rows before ends[0] with weight 0, ends[e - 1] to ends[e] - 1
    with weight e.

    Row m is row rows[m] of a, and its fp32 sum is multiplied by weights[m] before it is rounded. Rows from ends[E - 1]
    on are nobody's: nothing is read of them, and their results, undefined in general, are NaN here, which shows where
    they are used. Raises ValueError for ends that do not ascend from at least 0 to at most M, and for other rows
    outside a. `expected_rows` is checked and else means nothing here. Arguments as of `dsa.grouped_fp8_gemm_nt`.
    Source: DeepGEMM's `m_grouped_fp8_gemm_nt_contiguous`, whose groups have padded rows and an index a row.
    """
    (q, s), (w, ws) = pair("a", a), pair("b", b)
    GROUPED_FP8_GEMM_NT.check(q, s, w, ws, ends, out_dtype, rows, weights, expected_rows)
    check_memory("a[0]", q)
    return products_by_weight((q, s), lambda e: (w[e], ws[e]), w.shape[1], ends, out_dtype, rows, weights)


def products_by_weight(
    a: tuple[torch.Tensor, torch.Tensor],
    weight_of: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    columns: int,
    ends: torch.Tensor,
    out_dtype: torch.dtype,
    rows: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """`grouped_fp8_gemm_nt` of arguments that are checked but for their contents. weight_of: e -> (w [N, K], scales),
    of those weights that have rows."""
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


def pair(name: str, value: object) -> tuple:
    """The two tensors of an operand."""
    return check_pair(name, value, "(e4m3 values, fp32 scales)")
