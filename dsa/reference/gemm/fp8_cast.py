"""Casts between float and FP8 e4m3 with one scale per group: value = q * scale.

All casts follow DeepGEMM's rule. amax is the largest |x| of the group, at least 1e-4, and scale = amax / 448, or the
next power of two at or above amax / 448 ("ue8m0"); q = round_to_e4m3(x * (1 / scale)), where the reciprocal and the
product are each rounded to fp32. Scales are returned as fp32 in both cases.

NaN in a group makes the group's scale and values NaN; infinity makes the scale infinite and the values NaN or 0. In all
other groups the bytes equal those of DeepGEMM's functions on the same device. Without ue8m0 the device matters: PyTorch
divides by 448 on a CPU and multiplies by 1 / 448 on a GPU, so a scale's last bit may differ.

Source: `act_quant` of DeepSeek-V3.2's inference code; DeepGEMM's `per_token_cast_to_fp8` and `per_block_cast_to_fp8`.
"""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.gemm.hadamard import hadamard_transform

E4M3_MAX = 448.0
AMAX_MIN = 1e-4
MANTISSA = (1 << 23) - 1  # the mantissa bits of an fp32 number


def ceil_to_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """2^ceil(log2(scale)), exactly: the smallest power of two that is at least `scale` (fp32, positive and normal). NaN
    and infinity are returned unchanged."""
    # torch.ldexp reads out of bounds on a GPU that is not the current one (pytorch#189567).
    rounded_up = (scale.view(torch.int32) + MANTISSA) & ~MANTISSA
    return torch.where(scale.isfinite(), rounded_up.view(torch.float32), scale)


@torch.no_grad()
def _cast(x: torch.Tensor, dims: tuple[int, ...], use_ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.float()
    scale = x.abs().amax(dim=dims, keepdim=True).clamp_min(AMAX_MIN) / E4M3_MAX
    if use_ue8m0:
        scale = ceil_to_ue8m0(scale)
    return (x * (1.0 / scale)).to(torch.float8_e4m3fn), scale


@without_autocast
def per_token_cast_to_fp8(
    x: torch.Tensor, use_ue8m0: bool = True, gran_k: int = 128, *, hadamard: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast with one scale per token and `gran_k` channels.

    hadamard=True first applies the Hadamard transform to every group of gran_k channels, where gran_k is a power of
    two, and rounds the result to x's dtype. Arguments as in `dsa.per_token_cast_to_fp8`.
    """
    groups = x.detach().unflatten(-1, (x.shape[-1] // gran_k, gran_k))
    if hadamard:
        groups = hadamard_transform(groups)
    q, scale = _cast(groups, (-1,), use_ue8m0)
    return q.flatten(-2).contiguous(), scale.squeeze(-1).contiguous()


@without_autocast
def per_row_cast_to_fp8(x: torch.Tensor, use_ue8m0: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast with one scale per row of any length. x: [..., K] float. Returns q [..., K] e4m3 and scale [...] fp32."""
    q, scale = _cast(x, (-1,), use_ue8m0)
    return q, scale.squeeze(-1)


@without_autocast
def per_block_cast_to_fp8(
    w: torch.Tensor, use_ue8m0: bool = True, block: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast a weight with one scale per block x block tile. Arguments as in `dsa.per_block_cast_to_fp8`."""
    rows, cols = w.shape
    height, width = (max(1, min(block, size)) for size in (rows, cols))
    padded = torch.nn.functional.pad(w.float(), (0, -cols % width, 0, -rows % height))
    tiles = padded.view(-(-rows // height), height, -(-cols // width), width)
    q, scale = _cast(tiles, (1, 3), use_ue8m0)
    return q.flatten(2, 3).flatten(0, 1)[:rows, :cols].contiguous(), scale[:, 0, :, 0]


@without_autocast
def dequantize_per_token(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """x = q * scale. q: [..., K] e4m3, scale: [..., G] fp32 with K a multiple of G. Returns [..., K] in `dtype`."""
    return (q.float().unflatten(-1, (scale.shape[-1], -1)) * scale.float().unsqueeze(-1)).flatten(-2).to(dtype)


@without_autocast
def dequantize_per_block(
    q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32, block: int = 128
) -> torch.Tensor:
    """w[i, j] = q[i, j] * scale[i // block, j // block], computed in fp32 and rounded to `dtype`.

    Arguments as in `dsa.dequantize_per_block`.
    """
    rows, cols = q.shape
    # The last block may be smaller, so the repeated scales are cut to the size of q.
    height, width = (max(1, min(block, size)) for size in (rows, cols))
    full = scale.float().repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :cols]
    return (q.float() * full).to(dtype)
