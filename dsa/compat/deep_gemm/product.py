"""DeepGEMM's product of two FP8 matrices."""

import torch

from dsa.compat.deep_gemm.arguments import (
    BLOCK_SCALES,
    ROW_SCALES,
    Recipe,
    check_result,
    find_recipe,
    operands,
    refuse,
)
from dsa.compat.deep_gemm.gradients import write_gradient
from dsa.ops.gemm import fp8_gemm_nt as bridge
from dsa.ops.gemm.fp8_gemm_nt import Scaled
from dsa.runtime import backends
from dsa.runtime.checks import E4M3, FLOATS, check_tensor, rows_at_16_bytes


def fp8_fp4_gemm_nt(
    a: Scaled,
    b: Scaled,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: Recipe = None,
    recipe_a: Recipe = None,
    recipe_b: Recipe = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    alpha: float | None = None,
    epilogue: object = None,
) -> None:
    """d = a b^T with the scales of both operands: `dsa.fp8_gemm_nt`, written to d.

    a       ([M, K] e4m3, [M, ceil(K / 128)] fp32)
    b       ([N, K] e4m3, [ceil(N / 128), ceil(K / 128)] fp32)
    d       [M, N] bf16, fp32 or fp16; any row stride
    c       must be None
    recipe  None or (1, 128, 128), which mean the same; or the pair recipe_a = (1, 128), recipe_b = (128, 128)

    With recipe (1, 1, 128), or the pair (1, 128) and (1, 128), d = c + a b^T. The scales of b are then [N, ceil(K /
    128)], and d and c are fp32 [M, N]. c may be d itself; None: 0. PyTorch computes this product in fp32 (`gradients`).
    """
    (q, s), (w, ws) = operands(a, b)
    refuse(alpha=alpha, epilogue=epilogue)
    if find_recipe(recipe, recipe_a, recipe_b, (BLOCK_SCALES, ROW_SCALES)) == ROW_SCALES:
        write_gradient(d, c, (q, s), (w, ws))
        return
    if c is not None:
        raise ValueError(f"c: must be None with recipe {BLOCK_SCALES} on Hopper, got {type(c).__name__}")
    check_tensor("a[0]", q, E4M3, ("M", "K"))
    check_tensor("b[0]", w, E4M3, ("N", "K"))
    check_tensor("d", d, FLOATS, (len(q), len(w)), "a[0] and b[0]")
    op = bridge._fp8_gemm_nt
    op.check(q, s, w, ws, d.dtype)
    check_result(d, q)
    if backends.runs_kernel(op.public, q):
        write(d, q, s, w, ws)
    else:
        with torch.no_grad():
            d.copy_(op.reference(q, s, w, ws, d.dtype))


def write(
    d: torch.Tensor,
    q: torch.Tensor,
    s: torch.Tensor,
    w: torch.Tensor,
    ws: torch.Tensor,
    ends: torch.Tensor | None = None,
    expected_rows: int | None = None,
) -> None:
    """Write the product to d. Without `ends`, w [N, K] multiplies all rows of q. With `ends` [E], w is [E, N, K]. Then
    w[e] multiplies the rows of group e, whose last row is ends[e] - 1."""
    out = rows_at_16_bytes(d)
    # If the rows of d are not at multiples of 16 bytes, kernels write to a contiguous copy. The copy contains the
    # values of d, because kernels do not write rows that belong to no group.
    written = d.clone(memory_format=torch.contiguous_format) if out is None else out
    with backends.on_device(d):
        if ends is None:
            bridge.write_product(q, s, w, ws, written)
        else:
            bridge.write_grouped_product(q, s, w, ws, ends, written, expected_rows=expected_rows)
    if out is None:
        d.copy_(written)
