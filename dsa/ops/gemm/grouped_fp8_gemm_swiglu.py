"""The first half of the MLP of experts: gate and up projection in one grouped product, SwiGLU, and the cast to FP8."""

import functools
from typing import TYPE_CHECKING

import torch

from dsa.kernels.gemm.limits import GROUP
from dsa.ops.gemm import fp8_fp4_gemm_nt as fp4
from dsa.ops.gemm import fp8_gemm_nt as fp8
from dsa.ops.gemm import swiglu_cast_to_fp8 as cast
from dsa.ops.gemm._operands import (
    SCALES,
    WEIGHT_SCALES,
    check_expected_rows,
    fp4_weight,
    pair,
    scale_columns,
    without_padding,
)
from dsa.ops.gemm.fp8_fp4_gemm_nt import FP4Weights
from dsa.ops.gemm.fp8_gemm_nt import Scaled
from dsa.reference.gemm import grouped_fp8_gemm_swiglu as reference
from dsa.runtime import backends
from dsa.runtime.declare import (
    ALIGNED,
    E4M3,
    F32,
    FLOATS,
    INT32,
    POSITIVE,
    Arguments,
    Dtype,
    Flag,
    Int,
    Number,
    Tensor,
    dtype_name,
    multiple_of,
    op,
)

if TYPE_CHECKING:
    from dsa.kernels.gemm.fp8_gemm_config import Fp8GemmConfig

__all__ = ["grouped_fp8_fp4_gemm_swiglu", "grouped_fp8_gemm_swiglu"]


_OPTIONS = {
    "ends": Tensor("E", INT32),
    "rows": Tensor("M", INT32, optional=True),
    "limit": Number(optional=True),
    "use_ue8m0": Flag(),
    "dtype": Dtype(FLOATS),
    "expected_rows": Int(least=0, optional=True),
    "pad_scales": Flag(),
}
_LIMITS = {"N": multiple_of(2 * GROUP), "limit": POSITIVE}  # N = 2 I: the rows of gate and up
GROUPED_FP8_GEMM_SWIGLU = Arguments(
    limits=_LIMITS,
    rule=check_expected_rows,
    first=("w", "ws"),
    q=Tensor("A K", E4M3, name="a[0]"),
    s=Tensor(SCALES, F32, name="a[1]"),
    w=Tensor("E N K", E4M3, layout=ALIGNED, name="b[0]"),
    ws=Tensor(WEIGHT_SCALES, F32, name="b[1]"),
    **_OPTIONS,
)
GROUPED_FP8_FP4_GEMM_SWIGLU = Arguments(
    limits=_LIMITS,
    rule=check_expected_rows,
    first=("packed", "scale", "block_scale"),
    **fp4.OPERANDS,
    **_OPTIONS,
)


def grouped_fp8_gemm_swiglu(
    a: Scaled,
    b: Scaled,
    ends: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    limit: float | None = None,
    use_ue8m0: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    expected_rows: int | None = None,
    pad_scales: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`swiglu_cast_to_fp8` of gate and up, the two halves of `grouped_fp8_gemm_nt(a, b, ends, dtype, rows=rows)`.

    a              (q [A, K] e4m3, s [A, ceil(K / 128)] fp32): activations and their scales
    b              (w [E, 2 I, K] e4m3, ws [E, 2 I / 128, ceil(K / 128)] fp32): weights and their scales; first the I
                   rows of the gate projection, then those of the up projection; I is a multiple of 128
    ends           int32 [E], ascending from at least 0 to at most M: where the rows of each weight end; any weight may
                   have no rows
    rows           int32 [M]: row m of the result uses row rows[m] of a, from 0 to A - 1; None: the rows of a, M = A
    limit          a finite number above 0: first gate = min(gate, limit) and up = clamp(up, -limit, limit). None: no
                   clamp
    use_ue8m0      True: a scale is max(amax, 1e-4) / 448, rounded up to a power of two; False: it is not rounded up
    dtype          float32, bfloat16 or float16: gate, up and their SwiGLU are rounded to it
    expected_rows  what the caller expects ends[E - 1] to be, from 0 to M. It changes the speed but no bit of the
                   result; ends[E - 1] may differ. None: M
    pad_scales     True: scale has 4 ceil(I / 512) columns, as the down projection reads it without a copy; the added
                   ones are finite

    Returns q [M, I] float8_e4m3fn and scale [M, I / 128] float32, both contiguous: the activations of the down
    projection. A row's result depends on no other row. Rows from ends[E - 1] on belong to no expert: no product is
    computed for them, and their q and scale are undefined (NaN in the reference).
    NaN and infinity have the same effect as in `swiglu_cast_to_fp8`. Not differentiable.
    Raises TypeError or ValueError for other types, dtypes, shapes and devices. The reference also raises ValueError for
    invalid ends and rows, as that of `grouped_fp8_gemm_nt` does. With the kernel, if ends do not ascend, the results of
    rows that belong to no expert are undefined, and no error is raised.
    On Hopper: K and E as for `grouped_fp8_gemm_nt`; the error of the SwiGLU is within the bounds of
    `swiglu_cast_to_fp8`. If there are so few rows that `grouped_fp8_gemm_nt` would run the small-M kernel, the call
    runs that kernel and then a cast, which is faster than one kernel for both.
    CUDA-graph safe, no host synchronisation.
    Source: `Expert` of DeepSeek-V3.2's inference code, the limit from DeepSeek-V4's.
    """
    operands = *pair("a", a), *pair("b", b)
    return _grouped_fp8_gemm_swiglu(*operands, ends, rows, limit, use_ue8m0, dtype, expected_rows, pad_scales)


def grouped_fp8_fp4_gemm_swiglu(
    a: Scaled,
    b: FP4Weights,
    ends: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    limit: float | None = None,
    use_ue8m0: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    expected_rows: int | None = None,
    pad_scales: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`grouped_fp8_gemm_swiglu` with FP4 weights: the same bits as with the weights that `widen_fp4` returns.

    b  (packed [E, 2 I, K / 2] int8 or uint8, scale [E, 2 I, K / 32] float8_e8m0fnu, block_scale
       [E, 2 I / 128, ceil(K / 128)] fp32) as in `grouped_fp8_fp4_gemm_nt`; first the I rows of the gate projection,
       then those of the up projection; I is a multiple of 128, K a multiple of 32

    The other arguments and the results are those of `grouped_fp8_gemm_swiglu`.
    Raises TypeError or ValueError like `grouped_fp8_gemm_swiglu`, and for FP4 weights like `grouped_fp8_fp4_gemm_nt`.
    On Hopper: packed and scale contiguous, starting at a multiple of 16 bytes. Every call copies the scales of a and b
    unless K is a multiple of 512. The product runs the kernels of `grouped_fp8_fp4_gemm_nt` (a small-M kernel for few
    rows if K is a multiple of 128), and a cast follows.
    CUDA-graph safe, no host synchronisation.
    Source: the experts of DeepSeek-V4's checkpoints, and DeepSeek-V4's inference code.
    """
    operands = *pair("a", a), *fp4_weight("b", b)
    return _grouped_fp8_fp4_gemm_swiglu(*operands, ends, rows, limit, use_ue8m0, dtype, expected_rows, pad_scales)


def _results(q: torch.Tensor, w: torch.Tensor, rows: torch.Tensor | None, pad_scales: bool) -> Scaled:
    count, inner = len(q if rows is None else rows), w.shape[1] // 2
    return q.new_empty(count, inner), q.new_empty(count, scale_columns(inner, pad_scales), dtype=torch.float32)


def _fp4_results(q: torch.Tensor, packed: torch.Tensor, rows: torch.Tensor | None, pad_scales: bool) -> Scaled:
    return _results(q, packed, rows, pad_scales)


@op(
    arguments=GROUPED_FP8_GEMM_SWIGLU,
    reference=reference.grouped_fp8_gemm_swiglu,
    results=_results,
    limits=fp8.GROUPED_LIMITS,
)
def _grouped_fp8_gemm_swiglu(
    q: torch.Tensor,
    s: torch.Tensor,
    w: torch.Tensor,
    ws: torch.Tensor,
    ends: torch.Tensor,
    rows: torch.Tensor | None,
    limit: float | None,
    use_ue8m0: bool,
    dtype: torch.dtype,
    expected_rows: int | None,
    pad_scales: bool,
) -> Scaled:
    from dsa.kernels.gemm.fp8_gemm_sm90 import compile_fp8_gemm_swiglu

    out, scale = _results(q, w, rows, pad_scales)
    (matrices, columns), channels, count = w.shape[:2], q.shape[1], len(out)
    if channels == 0 or matrices == 0 or len(q) == 0:
        nothing = torch.zeros(count, columns // 2, dtype=dtype, device=q.device)
        return cast._swiglu_cast_to_fp8.launch_on(q.device, nothing, nothing, use_ue8m0, limit, pad_scales)
    if out.numel() == 0:
        return out, scale
    expected = fp8.rows_to_choose_for(count, expected_rows)
    if fp8.has_few_rows(expected, matrices, rows):
        # The small-M kernel loads the weights faster than the fused kernel, and the cast that follows is short.
        gate_up = fp8._grouped_fp8_gemm_nt.launch_on(q.device, q, s, w, ws, ends, dtype, None, None, expected)
        return cast.cast_of_matrices(gate_up, ends, use_ue8m0, limit, pad_scales)
    q, s, rows = fp8.gathered_rows(q, s, rows, expected)
    sms = backends.num_sms(q.device)
    is_dynamic = rows is None and fp8.schedules_dynamically(expected, matrices)
    config = _choose_config(expected, columns, channels, matrices, sms, is_dynamic)
    kind = dtype_name(dtype), use_ue8m0, limit is not None
    launch = compile_fp8_gemm_swiglu(*kind, config, rows is not None, is_dynamic)
    a = fp8.aligned_rows(q), fp8.aligned_scales(s), rows
    b = w.view(-1, channels), fp8.aligned_scales(ws).permute(1, 2, 0)
    own_scale = without_padding(scale, columns // 2)
    launch(*a, *b, ends.contiguous(), out, own_scale, limit, fp8.tile_counter(q, is_dynamic), sms)
    return out, scale


@functools.lru_cache(4096)
def _choose_config(
    rows: int, columns: int, channels: int, matrices: int, sms: int, is_dynamic: bool
) -> "Fp8GemmConfig":
    from dsa.kernels.gemm.fp8_gemm_config import SWIGLU_CONFIGS, choose_config

    configs = SWIGLU_CONFIGS[-1:] if is_dynamic else SWIGLU_CONFIGS
    return choose_config(rows, columns, channels, matrices, sms, configs)


@op(
    arguments=GROUPED_FP8_FP4_GEMM_SWIGLU,
    reference=reference.grouped_fp8_fp4_gemm_swiglu,
    results=_fp4_results,
    limits=fp4.LIMITS,
)
def _grouped_fp8_fp4_gemm_swiglu(
    q: torch.Tensor,
    s: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    block_scale: torch.Tensor,
    ends: torch.Tensor,
    rows: torch.Tensor | None,
    limit: float | None,
    use_ue8m0: bool,
    dtype: torch.dtype,
    expected_rows: int | None,
    pad_scales: bool,
) -> Scaled:
    # A fused kernel would widen 256 weight rows (gate and up) per 128 rows of a. A product that widens 128 per 256 rows
    # of a, and then a cast, are faster.
    operands = q, s, packed, scale, block_scale, ends, dtype, rows, None, expected_rows
    gate_up = fp4._grouped_fp8_fp4_gemm_nt.launch_on(q.device, *operands)
    return cast.cast_of_matrices(gate_up, ends, use_ue8m0, limit, pad_scales)
