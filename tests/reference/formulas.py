"""Formulas that several references compute, in float64."""

import torch


def rms_normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    y = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight.double()


def rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = True, dims: str = "last"
) -> torch.Tensor:
    """x [T, ..., D] with its first or last R channels rotated, as complex numbers; cos and sin [T, R / 2]."""
    out, channels = x.double().clone(), 2 * cos.shape[1]
    part = out[..., :channels] if dims == "first" else out[..., out.shape[-1] - channels :]
    real, imaginary = part.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else part.chunk(2, -1)
    factor = torch.complex(cos.double(), sin.double()).view(len(x), *[1] * (x.dim() - 2), cos.shape[1])
    z = torch.complex(real.contiguous(), imaginary.contiguous()) * factor
    part[:] = torch.stack((z.real, z.imag), -1 if interleaved else -2).flatten(-2)
    return out
