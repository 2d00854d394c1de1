"""DeepGEMM's grouped products of FP8 rows, with one weight per group."""

import torch

from dsa.compat.deep_gemm.arguments import Recipe, check_result, find_recipe, operands, refuse
from dsa.compat.deep_gemm.layout import get_mk_alignment_for_contiguous_layout
from dsa.compat.deep_gemm.product import write
from dsa.ops.gemm import fp8_gemm_nt as bridge
from dsa.ops.gemm.fp8_gemm_nt import Scaled
from dsa.runtime import backends
from dsa.runtime.checks import E4M3, FLOATS, INT32, check_flag, check_int, check_same_device, check_tensor


def m_grouped_fp8_fp4_gemm_nt_contiguous(
    a: Scaled,
    b: Scaled,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    recipe: Recipe = None,
    recipe_a: Recipe = None,
    recipe_b: Recipe = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
    epilogue: object = None,
) -> None:
    """d[m] = a[m] b[g]^T with g the group of row m: `dsa.grouped_fp8_gemm_nt`. The rows of a group are adjacent.

    a                           ([M, K] e4m3, [M, ceil(K / 128)] fp32)
    b                           ([E, N, K] e4m3, [E, ceil(N / 128), ceil(K / 128)] fp32)
    d                           [M, N] bf16, fp32 or fp16; any row stride
    grouped_layout              int32 [M]: the group of each row, ascending except for -1 in rows of padding. DeepGEMM
                                reads the index of every 128th row and accepts groups in any order.
                                With use_psum_layout int32 [E]: the row after the last row of each group. Group 0 begins
                                at row 0, each other group at the previous group's end, rounded up to a multiple of the
                                alignment
    expected_m_for_psum_layout  with use_psum_layout, the expected rows per group, which affect the choice of the kernel
                                but not the result. None: M rows in all groups together

    The alignment is `get_mk_alignment_for_contiguous_layout()`, read at the call. Rows of padding between a group and
    the next multiple of the alignment are multiplied by the group's weight. So a row of zeros gives zeros. The results
    of all other rows of padding are undefined.

    The reference raises an error for indices of E or more and for indices that decrease. With use_psum_layout it raises
    an error for ends that are negative, decrease, or exceed M. A kernel does not check these values. Without
    use_psum_layout, it leaves rows with wrong indices unwritten, or multiplies them by the weight of an earlier row. It
    never accesses memory outside its tensors.
    """
    (q, s), (w, ws) = operands(a, b)
    refuse(epilogue=epilogue)
    find_recipe(recipe, recipe_a, recipe_b)
    check_flag("use_psum_layout", use_psum_layout)
    check_tensor("a[0]", q, E4M3, ("M", "K"))
    check_tensor("b[0]", w, E4M3, ("E", "N", "K"))
    check_tensor("d", d, FLOATS, (len(q), w.shape[1]), "a[0] and b[0]")
    size = len(w) if use_psum_layout else len(q)
    check_tensor("grouped_layout", grouped_layout, INT32, (size,), "a[0] and b[0]")
    check_same_device(("a[0]", q), grouped_layout=grouped_layout)
    check_result(d, q)
    expected = _expected_rows(expected_m_for_psum_layout, use_psum_layout, len(w), len(q))
    op = bridge._grouped_fp8_gemm_nt
    op.check(q, s, w, ws, grouped_layout.new_empty(len(w)), d.dtype, None, None, None)
    if not len(q) or not len(w):
        return
    ends = _aligned(grouped_layout, len(q)) if use_psum_layout else _ends(grouped_layout, len(w))
    if backends.runs_kernel(op.public, q):
        write(d, q, s, w, ws, ends.contiguous(), expected_rows=expected)
    else:
        _check_groups(grouped_layout, len(q) if use_psum_layout else len(w) - 1, use_psum_layout)
        ends[-1] = len(q)  # the last group gets all further rows, because the reference fills rows of no group with NaN
        with torch.no_grad():
            d.copy_(op.reference(q, s, w, ws, ends, d.dtype, None, None, None))


def m_grouped_fp8_fp4_gemm_nt_masked(
    a: Scaled,
    b: Scaled,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: Recipe = None,
    recipe_a: Recipe = None,
    recipe_b: Recipe = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    epilogue: object = None,
) -> None:
    """d[e, m] = a[e, m] b[e]^T for m < masked_m[e]: `dsa.fp8_gemm_nt` of the first masked_m[e] rows of each group.

    a           ([E, max M, K] e4m3, [E, max M, ceil(K / 128)] fp32)
    b           ([E, N, K] e4m3, [E, ceil(N / 128), ceil(K / 128)] fp32)
    d           [E, max M, N] bf16, fp32 or fp16; any strides, with rows contiguous
    masked_m    int32 [E]: the number of valid rows of each group; below 0 means none, above max M means all
    expected_m  at least 1: the expected number of valid rows per group, which affects the choice of the work tile but
                not the result

    Rows after the valid rows are not written. On Hopper there is one launch per group.
    """
    (q, s), (w, ws) = operands(a, b)
    refuse(epilogue=epilogue)
    find_recipe(recipe, recipe_a, recipe_b)
    check_int("expected_m", expected_m, 1)
    check_tensor("a[0]", q, E4M3, ("E", "max M", "K"))
    check_tensor("a[1]", s, (torch.float32,), (*q.shape[:2], "ceil(K/128)"), "a[0]")
    check_tensor("b[0]", w, E4M3, (len(q), "N", "K"), "a[0]")
    check_tensor("d", d, FLOATS, (*q.shape[:2], w.shape[1]), "a[0] and b[0]")
    check_tensor("masked_m", masked_m, INT32, (len(q),), "a[0]")
    check_same_device(("a[0]", q), masked_m=masked_m)
    check_result(d, q)
    if not len(q):
        return
    op = bridge._grouped_fp8_gemm_nt
    op.check(q[0], s[0], w, ws, masked_m, d.dtype, None, None, None)
    if backends.runs_kernel(op.public, q):
        if not q.shape[-1]:
            valid = torch.arange(q.shape[1], device=q.device) < masked_m[:, None]
            d.masked_fill_(valid[..., None], 0)
            return
        s, ws = bridge.aligned_scales(s), bridge.aligned_scales(ws)
        for e in range(len(q)):
            one = slice(e, e + 1)
            write(d[e], q[e], s[e], w[one], ws[one], masked_m[one], expected_rows=min(expected_m, q.shape[1]))
        return
    for e, rows in enumerate(masked_m.clamp(0, q.shape[1]).tolist()):
        d[e, :rows] = bridge._fp8_gemm_nt.reference(q[e, :rows], s[e, :rows], w[e], ws[e], d.dtype)


def _expected_rows(per_group: int | None, use_psum_layout: bool, groups: int, rows: int) -> int | None:
    if per_group is None:
        return None
    if not use_psum_layout:
        raise ValueError(f"expected_m_for_psum_layout: must be None without use_psum_layout, got {per_group}")
    check_int("expected_m_for_psum_layout", per_group, 1)
    return min(per_group * groups, rows)


def _ends(m_indices: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the row after the last row of each of the E groups, int32 [E]. m_indices [M]: the group of each row, or -1
    in a row of padding.

    Rows of padding count as rows of the group before them; rows before the first group count as group 0. But the last
    group ends at the first multiple of the alignment after its last row. In a large buffer most of the later rows can
    be padding, which the kernel need not multiply.
    """
    rows = torch.arange(1, len(m_indices) + 1, dtype=torch.int32, device=m_indices.device)
    used = torch.where(m_indices < 0, 0, rows).amax()
    numbers = torch.arange(groups, dtype=torch.int32, device=m_indices.device)
    ends = torch.searchsorted(m_indices.cummax(0).values, numbers, out_int32=True, right=True)
    return ends.minimum(_aligned(used, len(m_indices)))


def _aligned(ends: torch.Tensor, rows: int) -> torch.Tensor:
    """Round ends up to multiples of the alignment, but at most to the number of rows."""
    alignment = get_mk_alignment_for_contiguous_layout()
    return torch.div(ends + (alignment - 1), alignment, rounding_mode="floor").mul_(alignment).clamp_(max=rows)


def _check_groups(grouped_layout: torch.Tensor, most: int, ends: bool) -> None:
    """Check the values of grouped_layout for the reference. Before a kernel this check would make the host wait for the
    GPU."""
    numbers = grouped_layout if ends else grouped_layout[grouped_layout >= 0]
    if numbers.numel() and (numbers.max() > most or numbers.min() < 0 or (numbers.diff() < 0).any()):
        what = "ends of groups" if ends else "the rows' groups, or -1,"
        got = grouped_layout.tolist()
        raise ValueError(f"grouped_layout: {what} must ascend from at least 0 to at most {most}, got {got}")
