"""Root mean square norm."""

import torch

from dsa.reference.arguments import F32, ROWS, Arguments, Number, Tensor
from dsa.reference.autocast import without_autocast
from dsa.reference.checks import FLOATS, check_memory

RMS_NORM = Arguments(
    x=Tensor("... D", FLOATS, layout=ROWS, merged=(0, -2)),
    weight=Tensor("D", F32, optional=True, layout=ROWS),
    eps=Number(least=0),
)


@without_autocast
def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6) -> torch.Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32. Arguments as of `dsa.rms_norm`."""
    RMS_NORM.check(x, weight, eps)
    check_memory("x", x)
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight).to(x.dtype).contiguous()
