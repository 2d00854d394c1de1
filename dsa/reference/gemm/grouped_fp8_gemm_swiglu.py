"""The first half of a mixture's experts: gate and up projection in one grouped product, SwiGLU, and the cast to FP8."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.gemm import fp8_fp4_gemm_nt as fp4
from dsa.reference.gemm.fp4_cast import BYTES, check_groups
from dsa.reference.gemm.fp8_gemm_nt import BLOCK, check_expected_rows, grouped_fp8_gemm_nt, pair
from dsa.reference.gemm.swiglu_cast_to_fp8 import check_limit, swiglu_cast_to_fp8
from dsa.runtime.arguments import ALIGNED, F32, Arguments, Dtype, Flag, Int, Number, Tensor
from dsa.runtime.checks import E4M3, FLOATS, INT32, check_memory


def _check_halves(name: str, weight: torch.Tensor) -> None:
    if weight.shape[1] % (2 * BLOCK):
        raise ValueError(
            f"{name}: must have 2 I rows, of gate and up, with I a multiple of {BLOCK}, got N={weight.shape[1]}"
        )


def _check_packed(name: str, packed: torch.Tensor) -> None:
    check_groups(name, packed)
    _check_halves(name, packed)


def _check_options(q: torch.Tensor, rows: torch.Tensor | None, limit: float | None, expected_rows: int | None) -> None:
    check_limit(limit)
    check_expected_rows(q, rows, expected_rows)


_OPTIONS = {
    "ends": Tensor("E", INT32),
    "rows": Tensor("M", INT32, optional=True),
    "limit": Number(optional=True),
    "use_ue8m0": Flag(),
    "dtype": Dtype(FLOATS),
    "expected_rows": Int(least=0, optional=True),
}
GROUPED_FP8_GEMM_SWIGLU = Arguments(
    rule=_check_options,
    first=("w", "ws"),
    q=Tensor("A K", E4M3, name="a[0]"),
    s=Tensor("A ceil(K/128)", F32, name="a[1]"),
    w=Tensor("E N K", E4M3, layout=ALIGNED, name="b[0]", rule=_check_halves),
    ws=Tensor("E ceil(N/128) ceil(K/128)", F32, name="b[1]"),
    **_OPTIONS,
)
GROUPED_FP8_FP4_GEMM_SWIGLU = Arguments(
    rule=_check_options,
    first=("packed", "scale", "block_scale"),
    **{**fp4.OPERANDS, "packed": Tensor("E N C", BYTES, layout=ALIGNED, name="b[0]", rule=_check_packed)},
    **_OPTIONS,
)


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """`swiglu_cast_to_fp8(gate, up, use_ue8m0, limit=limit)` of the halves of grouped_fp8_gemm_nt(a, b, ends, dtype,
    rows=rows), bit by bit.

    b's rows are those of gate and then those of up, of each weight. Rows from ends[E - 1] on are nobody's: values and
    scales, undefined in general, are NaN there, as the cast makes them of NaN. Arguments as of
    `dsa.grouped_fp8_gemm_swiglu`.
    Source: `Expert` of DeepSeek-V3.2's inference code, the limit from DeepSeek-V4's.
    """
    (q, s), (w, ws) = pair("a", a), pair("b", b)
    GROUPED_FP8_GEMM_SWIGLU.check(q, s, w, ws, ends, rows, limit, use_ue8m0, dtype, expected_rows)
    check_memory("a[0]", q)
    gate_up = grouped_fp8_gemm_nt((q, s), (w, ws), ends, dtype, rows=rows)
    return swiglu_cast_to_fp8(*gate_up.chunk(2, -1), use_ue8m0, limit=limit)


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """`grouped_fp8_gemm_swiglu` of the widened weights, bit by bit. Raises ValueError as `grouped_fp8_fp4_gemm_nt`
    does. Arguments as of `dsa.grouped_fp8_fp4_gemm_swiglu`."""
    (q, s), (packed, scale, block_scale) = pair("a", a), fp4.fp4_weight("b", b)
    GROUPED_FP8_FP4_GEMM_SWIGLU.check(
        q, s, packed, scale, block_scale, ends, rows, limit, use_ue8m0, dtype, expected_rows
    )
    check_memory("a[0]", q)
    gate_up = fp4.grouped_fp8_fp4_gemm_nt((q, s), (packed, scale, block_scale), ends, dtype, rows=rows)
    return swiglu_cast_to_fp8(*gate_up.chunk(2, -1), use_ue8m0, limit=limit)
