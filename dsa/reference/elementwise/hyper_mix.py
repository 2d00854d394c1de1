"""DeepSeek-V4's hyper-connections: the fp32 projection of a token's residual streams, by a matrix of bf16 parts."""

import torch

from dsa.reference.autocast import without_autocast


@without_autocast
def hyper_mix(streams: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """mix[t, c] = sum_k W[c, k] v[t, k] in fp32. v is the vector of a token's n streams, W the sum of the three parts.

    Gradients flow to both. Arguments: see `dsa.hyper_mix`.
    Source: DeepSeek-V4's inference code; arXiv 2606.19348, section 2.2.
    """
    # On a CPU the last bit of a product depends on strides.
    high, middle, low = parts.float().contiguous()
    return torch.nn.functional.linear(streams.flatten(1).float().contiguous(), high + (middle + low))
