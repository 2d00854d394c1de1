"""RMS norm and the FP8 cast of the result, optionally after adding a residual stream."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.elementwise.rms_norm import rms_norm
from dsa.reference.gemm.fp8_cast import per_token_cast_to_fp8


@without_autocast
@torch.no_grad()
def rms_norm_cast_to_fp8(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, use_ue8m0: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y = rms_norm(x, weight, eps) and (q, scale) = per_token_cast_to_fp8(y, use_ue8m0): returns (y, q, scale).

    Arguments as in `dsa.rms_norm_cast_to_fp8`.
    """
    y = rms_norm(x, weight, eps)
    return (y, *per_token_cast_to_fp8(y, use_ue8m0))


@without_autocast
@torch.no_grad()
def add_rms_norm_cast_to_fp8(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, use_ue8m0: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """total = residual + x, rounded to their dtype, and (y, q, scale) = rms_norm_cast_to_fp8(total, ...).

    Returns (total, y, q, scale). Arguments as in `dsa.add_rms_norm_cast_to_fp8`.
    """
    total = (residual + x).contiguous()
    return (total, *rms_norm_cast_to_fp8(total, weight, eps, use_ue8m0))
