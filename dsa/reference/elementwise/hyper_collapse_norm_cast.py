"""The input of a sublayer with hyper-connections: the weighted sum of the residual streams, its RMS norm, and the FP8
cast."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.elementwise.hyper_connections import hyper_collapse, hyper_collapse_independent
from dsa.reference.elementwise.rms_norm_cast import rms_norm_cast_to_fp8
from dsa.reference.gemm.fp8_cast import per_token_cast_to_fp8

BLOCK = 128


@without_autocast
@torch.no_grad()
def hyper_collapse_norm_cast_to_fp8(
    streams: torch.Tensor,
    mix: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    *,
    iterations: int = 20,
    eps: float = 1e-6,
    hc_eps: float = 1e-6,
    norm_eps: float = 1e-6,
    use_ue8m0: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, post, comb = hyper_collapse(...), and then (y, q, q_scale) = rms_norm_cast_to_fp8(x, ...).

    Returns (y, q, q_scale, post, comb). Arguments as in `dsa.hyper_collapse_norm_cast_to_fp8`.
    """
    x, post, comb = hyper_collapse(streams, mix, base, scale, iterations=iterations, eps=eps, hc_eps=hc_eps)
    return (*rms_norm_cast_to_fp8(x, weight, norm_eps, use_ue8m0), post, comb)


@without_autocast
@torch.no_grad()
def hyper_collapse_independent_norm_cast_to_fp8(
    streams: torch.Tensor,
    mix: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    *,
    magnitude: float = 2.0,
    eps: float = 1e-6,
    hc_eps: float = 1e-6,
    norm_eps: float = 1e-6,
    use_ue8m0: bool = True,
    pad_scales: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, post = hyper_collapse_independent(...), and then (y, q, q_scale) = rms_norm_cast_to_fp8(x, ...).

    Returns (y, q, q_scale, post). Arguments as in `dsa.hyper_collapse_independent_norm_cast_to_fp8`.
    """
    x, post = hyper_collapse_independent(streams, mix, base, scale, magnitude=magnitude, eps=eps, hc_eps=hc_eps)
    y, q, q_scale = rms_norm_cast_to_fp8(x, weight, norm_eps, use_ue8m0)
    if pad_scales:
        _, of_zeros = per_token_cast_to_fp8(torch.zeros_like(y[:, :BLOCK]), use_ue8m0)
        q_scale = torch.cat((q_scale, of_zeros.expand(-1, -q_scale.shape[1] % 4)), 1)
    return y, q, q_scale, post
