"""Hadamard transform of the last dimension."""

import torch

from dsa.reference.autocast import without_autocast


@without_autocast
def hadamard_transform(x: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """y = scale * H x along the last dimension, H the Sylvester matrix H[i, j] = (-1)^popcount(i & j).

    x: [..., N], any float dtype. Raises ValueError unless N is a power of two. scale defaults to N^-0.5, which makes
    the transform orthogonal and its own inverse. Returns [..., N] in x's dtype.

    The butterflies run in fp32 with strides 1, 2, 4, ... N/2, followed by one multiplication by the fp32 scale. The
    kernels use the same order, so that kernel and reference give the same bits.
    Source: `rotate_activation` of DeepSeek-V3.2's inference code.
    """
    n = x.shape[-1]
    if n == 0 or n & (n - 1):
        raise ValueError(f"x: the last dimension must be a power of two, got {n}")
    y = x.float()
    stride = 1
    while stride < n:
        a, b = y.unflatten(-1, (n // (2 * stride), 2, stride)).unbind(-2)
        y = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        stride *= 2
    return (y * (n**-0.5 if scale is None else scale)).to(x.dtype)
