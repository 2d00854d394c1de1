"""DeepSeek-V4's hyper-connections: the fp32 projection of a token's residual streams, with a matrix that is the sum of
three bf16 matrices."""

import torch

from dsa.reference.autocast import without_autocast


@without_autocast
def hyper_mix(streams: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """mix[t, c] = sum_k W[c, k] v[t, k] in fp32. v is the concatenation of a token's n streams, W the sum of the parts.

    Gradients flow to streams and parts. Arguments as in `dsa.hyper_mix`.
    Source: DeepSeek-V4's inference code; arXiv 2606.19348, section 2.2.
    """
    # Contiguous operands, because on a CPU the last bit of a product depends on strides.
    high, middle, low = parts.float().contiguous()
    return torch.nn.functional.linear(streams.flatten(1).float().contiguous(), high + (middle + low))
