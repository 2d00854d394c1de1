"""DeepSeek-V4's hyper-connections: the projection of a token's residual streams, in fp32 from bf16 parts."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.runtime.arguments import ALIGNED, ROWS, Arguments, Tensor
from dsa.runtime.checks import check_memory

BF16 = (torch.bfloat16,)


def check_sizes(streams: torch.Tensor, parts: torch.Tensor) -> None:
    if 0 in streams.shape[1:]:
        raise ValueError(f"streams: must have at least one stream and one channel, got shape {list(streams.shape)}")
    if 0 in parts.shape:
        raise ValueError(f"parts: must have at least one row, got shape {list(parts.shape)}")


HYPER_MIX = Arguments(
    rule=check_sizes,
    streams=Tensor("T n D", BF16, layout=ROWS),
    parts=Tensor("3 C n*D", BF16, layout=ALIGNED),
)


@without_autocast
def hyper_mix(streams: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """mix[t, c] = sum_k W[c, k] v[t, k] in fp32, v a token's n streams as one vector, W the sum of the three parts.

    Gradients flow to both. Arguments as of `dsa.hyper_mix`.
    Source: DeepSeek-V4's inference code; arXiv 2606.19348, section 2.2.
    """
    HYPER_MIX.check(streams, parts)
    check_memory("streams", streams)
    # A product's last bit on a CPU depends on strides.
    high, middle, low = parts.float().contiguous()
    return torch.nn.functional.linear(streams.flatten(1).float().contiguous(), high + (middle + low))
