"""DeepGEMM's FP8 products and index scores, by its names and with its signatures.

`import dsa.compat.deep_gemm as deep_gemm` stands for `import deep_gemm` (2.8.1, or a build before it) where an engine
multiplies FP8 on Hopper, or scores keys there, whose functions are written in `_deep_gemm_logits`. The products are
those of `dsa.fp8_gemm_nt` and `dsa.grouped_fp8_gemm_nt`. As there
- a and b are (e4m3 values, fp32 scales), a scale for each row and 128 channels and for each 128 x 128 block of a
  weight, and both row-major; scales may be laid out row by row or column by column (`get_mn_major_tma_aligned_tensor`);
- the caller gives the result d, [.., N] in rows at any stride, and nothing is returned;
- nothing is copied to the host and nothing waits for the GPU: calls can be captured into a CUDA graph.

What DeepGEMM takes on Hopper, and this does not: `c` (accumulation, its fp32 kernel for gradients of weights) and the
recipe (1, 1, 128) of the same kernel. What it does not take there either is refused too: FP4 values, scales packed
four to an int32, `alpha` and epilogues. Beyond DeepGEMM: d may be fp32 or fp16, too, N any multiple of 8 and K of 16,
and groups may begin at any row. `compiled_dims`, `disable_ue8m0_cast` and `ensure_zero_padding` change nothing here:
no row of padding is zeroed, whatever the last one says.
A row's bits are those of `dsa.fp8_gemm_nt`, whatever else is in the call.

Errors are those of the ops, in their names for the arguments, "a[1]: ..."; ValueError or TypeError, before a launch.
Source: DeepGEMM's csrc/apis/gemm.hpp and its tests of FP8 products.
"""

from collections.abc import Sequence

import torch

from dsa import backends
from dsa.compat._deep_gemm_logits import (
    fp8_fp4_mqa_logits,
    fp8_fp4_paged_mqa_logits,
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    get_num_sms,
    get_paged_mqa_logits_metadata,
)
from dsa.ops._aligned import rows_at_16_bytes
from dsa.ops.declaration import Op
from dsa.ops.gemm import fp8_gemm_nt as bridge
from dsa.ops.gemm.fp8_gemm_nt import Scaled
from dsa.reference.checks import (
    E4M3,
    FLOATS,
    INT32,
    check_int,
    check_pair,
    check_same_device,
    check_tensor,
    check_writable,
    shape_of,
)

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_gemm_nt",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_mn_major_tma_aligned_tensor",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
    "get_tma_aligned_size",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
]

ALIGNMENT = 128  # of a group's first row, where ends say where the groups are
_RECIPE, _RECIPE_A, _RECIPE_B = (1, 128, 128), (1, 128), (128, 128)


def get_tma_aligned_size(x: int, element_size: int) -> int:
    """x elements of so many bytes, rounded up to a multiple of 16 bytes."""
    check_int("x", x, 0)
    check_int("element_size", element_size, 1, 16)
    return -(-x * element_size // 16) * 16 // element_size


def get_mn_major_tma_aligned_tensor(sf: torch.Tensor) -> torch.Tensor:
    """fp32 scales [M, n] or [E, M, n] column by column, each column at a multiple of 16 bytes: a tensor of the same
    shape and numbers, sf itself where it lies so already. One of the two layouts that the products take."""
    shape = shape_of(sf)
    check_tensor("sf", sf, (torch.float32,), ("M", "n") if len(shape) < 3 else ("E", "M", "n"))
    *groups, rows, columns = shape
    column = get_tma_aligned_size(rows, sf.element_size())
    strides = (*(columns * column for _ in groups), 1, column)
    if sf.stride() == strides:
        return sf
    return torch.empty_strided(shape, strides, dtype=sf.dtype, device=sf.device).copy_(sf)


def fp8_gemm_nt(
    a: Scaled,
    b: Scaled,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Sequence[int] | None = None,
    recipe_a: Sequence[int] | None = None,
    recipe_b: Sequence[int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    alpha: float | None = None,
    epilogue: object = None,
) -> None:
    """d = a b^T, both with their scales: `dsa.fp8_gemm_nt`, written to d.

    a  ([M, K] e4m3, [M, ceil(K / 128)] fp32)
    b  ([N, K] e4m3, [ceil(N / 128), ceil(K / 128)] fp32)
    d  [M, N] bf16, fp32 or fp16; rows at any stride
    """
    _refuse(recipe, recipe_a, recipe_b, c=c, alpha=alpha, epilogue=epilogue)
    (q, s), (w, ws) = _pairs(a, b)
    check_tensor("a[0]", q, E4M3, ("M", "K"))
    check_tensor("b[0]", w, E4M3, ("N", "K"))
    check_tensor("d", d, FLOATS, (len(q), len(w)), "a[0] and b[0]")
    op = bridge._fp8_gemm_nt
    op.check(q, s, w, ws, d.dtype)
    _check_result(d, q)
    if backends.runs_kernel(op.public, q):
        _write(op, d, q, s, w, ws)
    else:
        d.copy_(op.reference(q, s, w, ws, d.dtype))


def m_grouped_fp8_gemm_nt_contiguous(
    a: Scaled,
    b: Scaled,
    d: torch.Tensor,
    m_indices: torch.Tensor,
    recipe: Sequence[int] | None = None,
    recipe_a: Sequence[int] | None = None,
    recipe_b: Sequence[int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
    epilogue: object = None,
) -> None:
    """d[m] = a[m] b[m_indices[m]]^T: `dsa.grouped_fp8_gemm_nt` with groups one after the other in the rows.

    a          ([M, K] e4m3, [M, ceil(K / 128)] fp32)
    b          ([E, N, K] e4m3, [E, ceil(N / 128), ceil(K / 128)] fp32)
    d          [M, N] bf16, fp32 or fp16; rows at any stride
    m_indices  int32 [M]: each row's group, ascending but for -1 in rows of padding, which go with the group before
               them. DeepGEMM reads the index of every 128th row, and lets these be in any order: here the groups
               ascend, as those of its callers do. With use_psum_layout int32 [E]: where the groups end; the first
               begins at row 0, each other at the next multiple of 128 behind the end of the one before it

    What d has in rows of padding is undefined. Indices of E and more, and decreasing ones, are an error where the
    reference runs; a kernel leaves the rows to no group or to that of a row before them, and stays inside its tensors.
    `expected_m_for_psum_layout` changes nothing.
    """
    _refuse(recipe, recipe_a, recipe_b, epilogue=epilogue)
    (q, s), (w, ws) = _pairs(a, b)
    check_tensor("a[0]", q, E4M3, ("M", "K"))
    check_tensor("b[0]", w, E4M3, ("E", "N", "K"))
    check_tensor("d", d, FLOATS, (len(q), w.shape[1]), "a[0] and b[0]")
    check_tensor("m_indices", m_indices, INT32, (len(w) if use_psum_layout else len(q),), "a[0] and b[0]")
    check_same_device(("a[0]", q), m_indices=m_indices)
    _check_result(d, q)
    op = bridge._grouped_fp8_gemm_nt
    op.check(q, s, w, ws, m_indices.new_empty(len(w)), d.dtype, None, None, None)
    if not len(q) or not len(w):
        return
    ends = _ends_with_padding(m_indices, len(q)) if use_psum_layout else _ends(m_indices, len(w))
    if backends.runs_kernel(op.public, q):
        _write(op, d, q, s, w, ws, ends.contiguous())
    else:
        _check_groups(m_indices, len(q) if use_psum_layout else len(w) - 1, use_psum_layout)
        ends[-1] = len(q)  # rows that are no group's get some numbers: a reference would fill them with NaN
        d.copy_(op.reference(q, s, w, ws, ends, d.dtype, None, None, None))


def m_grouped_fp8_gemm_nt_masked(
    a: Scaled,
    b: Scaled,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: Sequence[int] | None = None,
    recipe_a: Sequence[int] | None = None,
    recipe_b: Sequence[int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    epilogue: object = None,
) -> None:
    """d[e, m] = a[e, m] b[e]^T for m < masked_m[e]: `dsa.fp8_gemm_nt` of the first rows of each group.

    a           ([E, max M, K] e4m3, [E, max M, ceil(K / 128)] fp32)
    b           ([E, N, K] e4m3, [E, ceil(N / 128), ceil(K / 128)] fp32)
    d           [E, max M, N] bf16, fp32 or fp16; any strides, with rows contiguous
    masked_m    int32 [E]: how many rows of each group count; fewer than 0 are none, more than max M are all
    expected_m  at least 1: how many rows of a group are expected to count, which changes no result

    Rows behind these are not written. A launch a group.
    """
    _refuse(recipe, recipe_a, recipe_b, epilogue=epilogue)
    check_int("expected_m", expected_m, 1)
    (q, s), (w, ws) = _pairs(a, b)
    check_tensor("a[0]", q, E4M3, ("E", "max M", "K"))
    check_tensor("a[1]", s, (torch.float32,), (*q.shape[:2], "ceil(K/128)"), "a[0]")
    check_tensor("b[0]", w, E4M3, (len(q), "N", "K"), "a[0]")
    check_tensor("d", d, FLOATS, (*q.shape[:2], w.shape[1]), "a[0] and b[0]")
    check_tensor("masked_m", masked_m, INT32, (len(q),), "a[0]")
    check_same_device(("a[0]", q), masked_m=masked_m)
    _check_result(d, q)
    if not len(q):
        return
    op = bridge._grouped_fp8_gemm_nt
    op.check(q[0], s[0], w, ws, masked_m, d.dtype, None, None, None)
    if backends.runs_kernel(op.public, q):
        if not q.shape[-1]:
            own = torch.arange(q.shape[1], device=q.device) < masked_m[:, None]
            d.masked_fill_(own[..., None], 0)
            return
        s, ws = bridge.aligned_scales(s), bridge.aligned_scales(ws)
        for e in range(len(q)):
            one = slice(e, e + 1)
            _write(op, d[e], q[e], s[e], w[one], ws[one], masked_m[one], expected_rows=min(expected_m, q.shape[1]))
        return
    for e, rows in enumerate(masked_m.clamp(0, q.shape[1]).tolist()):
        d[e, :rows] = bridge._fp8_gemm_nt.reference(q[e, :rows], s[e, :rows], w[e], ws[e], d.dtype)


def _write(op: Op, d: torch.Tensor, *operands: torch.Tensor, expected_rows: int | None = None) -> None:
    """d = the products of operands, which are checked, by the op's kernels."""
    kernels = op.kernels.modules(backends.arch_of(d.device))
    out = rows_at_16_bytes(d)
    # A copy has d's numbers in the rows that no group has.
    written = d.clone(memory_format=torch.contiguous_format) if out is None else out
    q, s, w, ws, *ends = operands
    with backends.on_device(d):
        if ends:
            bridge.write_grouped_product(kernels, q, s, w, ws, *ends, written, expected_rows=expected_rows)
        else:
            bridge.write_product(kernels, q, s, w, ws, written)
    if out is None:
        d.copy_(written)


def _ends(m_indices: torch.Tensor, groups: int) -> torch.Tensor:
    """m_indices [M] -> int32 [E]: behind which row each group ends. Padding goes with the group before it, with the
    first where there is none, and with no group behind the last row of all groups: of a buffer for any number of rows
    that may be the most of it."""
    rows = torch.arange(1, len(m_indices) + 1, dtype=torch.int32, device=m_indices.device)
    used = torch.where(m_indices < 0, 0, rows).amax()
    numbers = torch.arange(groups, dtype=torch.int32, device=m_indices.device)
    ends = torch.searchsorted(m_indices.cummax(0).values, numbers, out_int32=True, right=True)
    return ends.minimum(used)


def _ends_with_padding(ends: torch.Tensor, rows: int) -> torch.Tensor:
    """The ends of groups that begin at multiples of ALIGNMENT, each with the rows of padding behind it."""
    return torch.div(ends + (ALIGNMENT - 1), ALIGNMENT, rounding_mode="floor").mul_(ALIGNMENT).clamp_(max=rows)


def _check_groups(m_indices: torch.Tensor, most: int, ends: bool) -> None:
    """What a reference asks of the numbers; a kernel does not see them in time."""
    numbers = m_indices if ends else m_indices[m_indices >= 0]
    if numbers.numel() and (numbers.max() > most or numbers.min() < 0 or (numbers.diff() < 0).any()):
        what = "ends of groups" if ends else "the rows' groups, or -1,"
        raise ValueError(f"m_indices: {what} must ascend from at least 0 to at most {most}, got {m_indices.tolist()}")


def _pairs(a: Scaled, b: Scaled) -> tuple[Scaled, Scaled]:
    return tuple(check_pair(name, value, "(e4m3 values, fp32 scales)") for name, value in (("a", a), ("b", b)))


def _check_result(d: torch.Tensor, q: torch.Tensor) -> None:
    """d, of the right dtype and shape, is one that can be written where a[0] is."""
    check_same_device(("a[0]", q), d=d)
    check_writable("d", d)
    if d.shape[-1] > 1 and d.stride(-1) != 1:
        raise ValueError(f"d: the last dimension must be contiguous, got strides {list(d.stride())}")


def _refuse(
    recipe: Sequence[int] | None, recipe_a: Sequence[int] | None, recipe_b: Sequence[int] | None, **others: object
) -> None:
    """Raises ValueError for what DeepGEMM's signatures have and Hopper's kernels here have not."""
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{name}: must be None on Hopper, got {type(value).__name__}")
    takes = {"recipe": (recipe, _RECIPE), "recipe_a": (recipe_a, _RECIPE_A), "recipe_b": (recipe_b, _RECIPE_B)}
    for name, (value, only) in takes.items():
        if value is not None and tuple(value) != only:
            raise ValueError(f"{name}: must be None or {only} on Hopper, got {tuple(value)}")
