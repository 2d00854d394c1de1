"""Product of two 16-bit matrices with an fp32 result."""

import torch

from dsa.reference.autocast import without_autocast


@without_autocast
def linear_fp32(x: torch.Tensor, weight: torch.Tensor, scale: float = 1.0, *, scaled_from: int = 0) -> torch.Tensor:
    """y[t, o] = s_o sum_k x[t, k] weight[o, k] in fp32, where s_o = scale for o >= scaled_from, else 1.

    Differentiable in x and weight. Arguments as in `dsa.linear_fp32`.
    """
    # Contiguous operands, because on a CPU the last bit of a product depends on strides.
    y = torch.nn.functional.linear(x.float().contiguous(), weight.float().contiguous())
    if scaled_from == 0:
        return y * scale
    return torch.cat((y[:, :scaled_from], y[:, scaled_from:] * scale), 1)
