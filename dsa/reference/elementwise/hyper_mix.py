"""DeepSeek-V4's hyper-connections: the projection of a token's residual streams, in fp32 from bf16 parts."""

import torch

from dsa.reference.autocast import without_autocast


@without_autocast
def hyper_mix(streams: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """mix[t, c] = sum_k W[c, k] v[t, k] in fp32, v a token's n streams as one vector, W the sum of the three parts.

    Gradients flow to both. Arguments as of `dsa.hyper_mix`.
    Source: DeepSeek-V4's inference code; arXiv 2606.19348, section 2.2.
    """
    # A product's last bit on a CPU depends on strides.
    high, middle, low = parts.float().contiguous()
    return torch.nn.functional.linear(streams.flatten(1).float().contiguous(), high + (middle + low))
