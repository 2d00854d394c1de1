"""Grouped GEMM of FP8 activations and FP4 weights, which is that of the widened weights."""

from collections.abc import Callable

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.gemm.fp4_cast import BYTES, E8M0, check_groups, widen_matrix
from dsa.reference.gemm.fp8_gemm_nt import check_rows, pair, products_by_weight
from dsa.runtime.arguments import ALIGNED, F32, Arguments, Dtype, Int, Tensor
from dsa.runtime.checks import E4M3, FLOATS, INT32, check_memory

OPERANDS = {
    "q": Tensor("A 2*C", E4M3, name="a[0]"),
    "s": Tensor("A ceil(C/64)", F32, name="a[1]"),
    "packed": Tensor("E N C", BYTES, layout=ALIGNED, name="b[0]", rule=check_groups),
    "scale": Tensor("E N ceil(C/16)", E8M0, layout=ALIGNED, name="b[1]"),
    "block_scale": Tensor("E ceil(N/128) ceil(C/64)", F32, name="b[2]"),
}
GROUPED_FP8_FP4_GEMM_NT = Arguments(
    rule=check_rows,
    first=("packed", "scale", "block_scale"),
    **OPERANDS,
    ends=Tensor("E", INT32),
    out_dtype=Dtype(FLOATS),
    rows=Tensor("M", INT32, optional=True),
    weights=Tensor("M", F32, optional=True),
    expected_rows=Int(least=0, optional=True),
)


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
    """`grouped_fp8_gemm_nt(a, widen_fp4(b[0], b[1]), ends, out_dtype, rows=rows, weights=weights)`, bit by bit.

    Only the weights that have rows are widened, and nobody's rows are NaN, as in that. Raises ValueError for ends and
    rows as `grouped_fp8_gemm_nt` does, for a weight that `widen_fp4` refuses, and for b[2] other than
    `fp4_block_scales(b[0], b[1])`. Arguments as of `dsa.grouped_fp8_fp4_gemm_nt`.
    """
    (q, s), (packed, scale, block_scale) = pair("a", a), fp4_weight("b", b)
    GROUPED_FP8_FP4_GEMM_NT.check(q, s, packed, scale, block_scale, ends, out_dtype, rows, weights, expected_rows)
    check_memory("a[0]", q)
    widened = widened_by_weight(packed, scale, block_scale)
    return products_by_weight((q, s), widened, packed.shape[1], ends, out_dtype, rows, weights)


def widened_by_weight(
    packed: torch.Tensor, scale: torch.Tensor, block_scale: torch.Tensor
) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """e -> the weight number e as `widen_fp4` gives it."""

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


def fp4_weight(name: str, value: object) -> tuple:
    """The three tensors of an FP4 weight."""
    if not isinstance(value, (tuple, list)) or len(value) != 3:
        got = f"{len(value)} of them" if isinstance(value, (tuple, list)) else type(value).__name__
        raise TypeError(f"{name}: must be (FP4 values, e8m0 scales, fp32 block scales), got {got}")
    return tuple(value)
