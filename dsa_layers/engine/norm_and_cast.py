"""A norm, the cast of its result for the FP8 layers that read it, and before it the sum with a residual stream."""

from collections.abc import Sequence

import torch
from torch import nn

import dsa
from dsa.kernels.elementwise.limits import MAX_NORM_CAST_CHANNELS
from dsa_layers.engine import joint_linear
from dsa_layers.engine.joint_linear import Cast
from dsa_layers.layers.norm import RMSNorm

MOST_CHANNELS = min(MAX_NORM_CAST_CHANNELS.values())  # that the kernels take, whatever the dtype


def norm_and_cast(
    norm: nn.Module, x: torch.Tensor, layers: Sequence[nn.Module], residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, Cast | None]:
    """h = residual + x, or x without a residual -> (h, y = norm(h), the cast of y that `layers` share).

    x, residual [T, D]. The cast is None if the layers share none (`joint_linear.scaling`). With a cast, one kernel on
    the GPU computes h, y and the cast; they have the same bits as the sum, the norm and the cast by themselves
    (`dsa.rms_norm_cast_to_fp8`).
    """
    use_ue8m0 = scaling(norm, x.shape[-1], layers)
    if use_ue8m0 is None:
        h = x if residual is None else residual + x
        return h, norm(h), None
    rest = norm.weight.float(), norm.eps, use_ue8m0
    if residual is None:
        y, *cast = dsa.rms_norm_cast_to_fp8(x, *rest)
        return x, y, tuple(cast)
    h, y, *cast = dsa.add_rms_norm_cast_to_fp8(x, residual, *rest)
    return h, y, tuple(cast)


def scaling(norm: nn.Module, channels: int, layers: Sequence[nn.Module]) -> bool | None:
    """`use_ue8m0` of the cast that `layers` share, if a kernel makes it together with the norm; else None."""
    return joint_linear.scaling(layers) if type(norm) is RMSNorm and channels <= MOST_CHANNELS else None
