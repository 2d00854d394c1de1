"""Products of 16-bit numbers with results in fp32."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.runtime.arguments import ROWS, Arguments, Int, Number, Tensor
from dsa.runtime.checks import check_memory

HALVES = (torch.bfloat16, torch.float16)


def _check_scaled(weight: torch.Tensor, scaled_from: int) -> None:
    if scaled_from > weight.shape[0]:
        raise ValueError(f"scaled_from: must be from 0 to the {weight.shape[0]} rows of weight, got {scaled_from}")


LINEAR_FP32 = Arguments(
    rule=_check_scaled,
    x=Tensor("T I", HALVES, layout=ROWS),
    weight=Tensor("O I", HALVES, like="x", layout=ROWS),
    scale=Number(),
    scaled_from=Int(least=0),
)


@without_autocast
def linear_fp32(x: torch.Tensor, weight: torch.Tensor, scale: float = 1.0, *, scaled_from: int = 0) -> torch.Tensor:
    """y[t, o] = s_o sum_k x[t, k] weight[o, k] in fp32, s_o = scale from o = scaled_from on, 1 before.

    Differentiable in x and weight. Arguments as of `dsa.linear_fp32`.
    """
    LINEAR_FP32.check(x, weight, scale, scaled_from)
    check_memory("x", x)
    # A product's last bit on a CPU depends on strides.
    y = torch.nn.functional.linear(x.float().contiguous(), weight.float().contiguous())
    if scaled_from == 0:
        return y * scale
    return torch.cat((y[:, :scaled_from], y[:, scaled_from:] * scale), 1)
