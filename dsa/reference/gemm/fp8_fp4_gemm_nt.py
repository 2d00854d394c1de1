"""Grouped product of FP8 activations with FP4 weights, which are first converted to FP8."""

from collections.abc import Callable

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.gemm.fp4_cast import widen_matrix
from dsa.reference.gemm.fp8_gemm_nt import products_by_weight


@without_autocast
def grouped_fp8_fp4_gemm_nt(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ends: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    rows: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    expected_rows: int | None = None,
) -> torch.Tensor:
    """`grouped_fp8_gemm_nt(a, widen_fp4(b[0], b[1]), ends, out_dtype, rows=rows, weights=weights)`, with the same bits.

    Only weights of experts that have rows are widened and checked. Rows from ends[E - 1] on are NaN. Raises ValueError
    for invalid ends and rows, as `grouped_fp8_gemm_nt` does, for a weight that `widen_fp4` refuses, and for a weight
    whose b[2] is not `fp4_block_scales(b[0], b[1])`. `expected_rows` has no effect. Arguments as in
    `dsa.grouped_fp8_fp4_gemm_nt`.
    """
    packed, scale, block_scale = b
    widened = widened_by_weight(packed, scale, block_scale)
    return products_by_weight(a, widened, packed.shape[1], ends, out_dtype, rows, weights)


def widened_by_weight(
    packed: torch.Tensor, scale: torch.Tensor, block_scale: torch.Tensor
) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Return a function that maps e to `widen_fp4` of weight e. It raises ValueError if `widen_fp4` does, or if the
    block scales are not block_scale[e]."""

    def weight_of(e: int) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            q, expected = widen_matrix(packed[e], scale[e], (e,))
        except ValueError as error:
            raise ValueError(f"b: {error}") from None
        if not torch.equal(block_scale[e], expected):
            row, column = (block_scale[e] != expected).nonzero()[0].tolist()
            raise ValueError(
                f"b[2]: must be fp4_block_scales(b[0], b[1]), {expected[row, column].item()} at {[e, row, column]}, "
                f"got {block_scale[e, row, column].item()}"
            )
        return q, expected

    return weight_of
