"""Root mean square norm and the FP8 cast of the result, optionally after adding a residual stream."""

import torch

from dsa.kernels.elementwise.limits import MAX_NORM_CAST_CHANNELS, MAX_NORM_ROWS
from dsa.kernels.gemm.limits import GROUP
from dsa.reference.elementwise import rms_norm_cast as reference
from dsa.runtime.declare import (
    F32,
    FLOATS,
    ROWS,
    Arguments,
    Flag,
    Number,
    Tensor,
    at_least,
    at_most,
    dtype_name,
    multiple_of,
    op,
    rows_at_16_bytes,
)

__all__ = ["add_rms_norm_cast_to_fp8", "rms_norm_cast_to_fp8"]

_GROUPS = {"D": multiple_of(GROUP)}
LIMITS = {
    "T": at_most(MAX_NORM_ROWS),
    "D": at_least(GROUP),
    "D*itemsize": at_most(2 * MAX_NORM_CAST_CHANNELS["bfloat16"]),
}

_REST = {"weight": Tensor("D", F32, layout=ROWS), "eps": Number(least=0), "use_ue8m0": Flag()}
RMS_NORM_CAST_TO_FP8 = Arguments(limits=_GROUPS, x=Tensor("T D", FLOATS, layout=ROWS), **_REST)
ADD_RMS_NORM_CAST_TO_FP8 = Arguments(
    limits=_GROUPS,
    x=Tensor("T D", FLOATS, layout=ROWS),
    residual=Tensor("T D", FLOATS, like="x", layout=ROWS),
    **_REST,
)


def rms_norm_cast_to_fp8(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, use_ue8m0: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, rounded to x's dtype, and y cast to FP8.

    x          [T, D] bf16, fp16 or fp32, D a multiple of 128
    weight     [D] fp32
    eps        added to the mean of the squares: a finite number, at least 0
    use_ue8m0  True: scales are powers of two; False: they need not be (`dsa.per_token_cast_to_fp8`)

    Returns (y [T, D] in x's dtype, q [T, D] float8_e4m3fn, scale [T, D / 128] fp32), contiguous, for layers that read
    both y and its cast. For D >= 256 the bits are those of `dsa.rms_norm` and then `dsa.per_token_cast_to_fp8`. Not
    differentiable. Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: one kernel that reads x once. D up to 16384 (fp32: 8192); contiguous channels; rows at any multiples of
    16 bytes. Deterministic; a row's results do not depend on the other rows. CUDA-graph safe, no host synchronisation.
    Source: see `dsa.rms_norm` and `dsa.per_token_cast_to_fp8`.
    """
    return _rms_norm_cast_to_fp8(x, weight, eps, use_ue8m0)


def add_rms_norm_cast_to_fp8(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, use_ue8m0: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """total = residual + x, rounded to x's dtype, and `dsa.rms_norm_cast_to_fp8` of total.

    x          [T, D] bf16, fp16 or fp32, D a multiple of 128: a layer's result
    residual   [T, D] in x's dtype: the stream to which x is added
    weight, eps, use_ue8m0  see `dsa.rms_norm_cast_to_fp8`

    Returns (total [T, D], y [T, D], q [T, D] float8_e4m3fn, scale [T, D / 128] fp32), contiguous, total and y in x's
    dtype. On Hopper one kernel reads x and residual once. Errors, limits and everything else are as for
    `dsa.rms_norm_cast_to_fp8`.
    """
    return _add_rms_norm_cast_to_fp8(x, residual, weight, eps, use_ue8m0)


def _cast_results(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, channels = x.shape
    y = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    q = torch.empty(rows, channels, dtype=torch.float8_e4m3fn, device=x.device)
    return y, q, torch.empty(rows, channels // GROUP, dtype=torch.float32, device=x.device)


def _sum_results(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (torch.empty(*x.shape, dtype=x.dtype, device=x.device), *_cast_results(x))


@op(
    arguments=RMS_NORM_CAST_TO_FP8,
    reference=reference.rms_norm_cast_to_fp8,
    results=_cast_results,
    limits=LIMITS,
)
def _rms_norm_cast_to_fp8(
    x: torch.Tensor, weight: torch.Tensor, eps: float, use_ue8m0: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from dsa.kernels.elementwise.rms_norm_sm90 import CAST_CONFIGS, choose_config, compile_rms_norm_cast

    y, q, scale = _cast_results(x)
    if len(x):
        name = dtype_name(x.dtype)
        launch = compile_rms_norm_cast(name, False, use_ue8m0, choose_config(name, x.shape[1], CAST_CONFIGS))
        launch(rows_at_16_bytes(x), None, weight, None, y, q, scale, float(eps))
    return y, q, scale


@op(
    arguments=ADD_RMS_NORM_CAST_TO_FP8,
    reference=reference.add_rms_norm_cast_to_fp8,
    results=_sum_results,
    limits=LIMITS,
)
def _add_rms_norm_cast_to_fp8(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, use_ue8m0: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    from dsa.kernels.elementwise.rms_norm_sm90 import CAST_CONFIGS, choose_config, compile_rms_norm_cast

    total, y, q, scale = _sum_results(x)
    if len(x):
        name = dtype_name(x.dtype)
        launch = compile_rms_norm_cast(name, True, use_ue8m0, choose_config(name, x.shape[1], CAST_CONFIGS))
        launch(rows_at_16_bytes(x), rows_at_16_bytes(residual), weight, total, y, q, scale, float(eps))
    return total, y, q, scale
