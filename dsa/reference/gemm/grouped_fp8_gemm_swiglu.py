"""The first half of the experts' MLP: gate and up projection in one grouped product, SwiGLU, and the cast to FP8."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.gemm.fp8_fp4_gemm_nt import grouped_fp8_fp4_gemm_nt
from dsa.reference.gemm.fp8_gemm_nt import grouped_fp8_gemm_nt
from dsa.reference.gemm.swiglu_cast_to_fp8 import swiglu_cast_to_fp8


@torch.no_grad()
@without_autocast
def grouped_fp8_gemm_swiglu(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    ends: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    limit: float | None = None,
    use_ue8m0: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    expected_rows: int | None = None,
    pad_scales: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`swiglu_cast_to_fp8` of the two halves, gate and up, of `grouped_fp8_gemm_nt(a, b, ends, dtype, rows=rows)`.

    Each weight has the rows of gate, then the rows of up. Rows from ends[E - 1] on belong to no expert: their values
    and scales, which the kernels leave undefined, are NaN here. Raises ValueError for invalid ends and rows, as
    `grouped_fp8_gemm_nt` does. `expected_rows` has no effect. Arguments as in `dsa.grouped_fp8_gemm_swiglu`.
    Source: `Expert` of DeepSeek-V3.2's inference code, the limit from DeepSeek-V4's.
    """
    gate_up = grouped_fp8_gemm_nt(a, b, ends, dtype, rows=rows)
    return swiglu_cast_to_fp8(*gate_up.chunk(2, -1), use_ue8m0, limit=limit, pad_scales=pad_scales)


@torch.no_grad()
@without_autocast
def grouped_fp8_fp4_gemm_swiglu(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ends: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    limit: float | None = None,
    use_ue8m0: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    expected_rows: int | None = None,
    pad_scales: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`grouped_fp8_gemm_swiglu` of the FP4 weights after `widen_fp4`, with the same bits.

    Raises ValueError like `grouped_fp8_fp4_gemm_nt`. Arguments as in `dsa.grouped_fp8_fp4_gemm_swiglu`.
    """
    gate_up = grouped_fp8_fp4_gemm_nt(a, b, ends, dtype, rows=rows)
    return swiglu_cast_to_fp8(*gate_up.chunk(2, -1), use_ue8m0, limit=limit, pad_scales=pad_scales)
