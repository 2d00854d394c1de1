"""Casts between float and FP8 e4m3 with one scale per group: value = q * scale.

All casts share one rule. amax = max(|x|, 1e-4) over the group and scale = amax / 448, or the next power of two at or
above it ("ue8m0"); q = round_to_e4m3(clamp(x / scale, -448, 448)). Scales are returned as fp32 in both cases.
NaN in a group makes the group's scale and values NaN; infinity makes the scale infinite and the values NaN or 0.
Source: `act_quant` of DeepSeek-V3.2's inference code; DeepGEMM's `per_token_cast_to_fp8` and `per_block_cast_to_fp8`.
"""

import torch

from .hadamard import hadamard_transform

E4M3_MAX = 448.0
AMAX_MIN = 1e-4


def ceil_to_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below `scale` (fp32, positive and normal): 2^ceil(log2(scale)), exactly."""
    mantissa, exponent = torch.frexp(scale)
    return torch.where(scale.isfinite(), torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int()), scale)


def _cast(x: torch.Tensor, dims: tuple[int, ...], use_ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.float()
    scale = x.abs().amax(dim=dims, keepdim=True).clamp_min(AMAX_MIN) / E4M3_MAX
    if use_ue8m0:
        scale = ceil_to_ue8m0(scale)
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def per_token_cast_to_fp8(
    x: torch.Tensor, use_ue8m0: bool = True, gran_k: int = 128, *, hadamard: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale per token and `gran_k` channels.

    x: [..., K] float, K a multiple of gran_k. Returns q [..., K] e4m3 and scale [..., K / gran_k] fp32.
    hadamard=True first transforms every group of gran_k channels, rounding the result to x's dtype.
    """
    if x.shape[-1] % gran_k:
        raise ValueError(f"x: the last dimension must be a multiple of gran_k={gran_k}, got {x.shape[-1]}")
    groups = x.unflatten(-1, (x.shape[-1] // gran_k, gran_k))
    if hadamard:
        groups = hadamard_transform(groups)
    q, scale = _cast(groups, (-1,), use_ue8m0)
    return q.flatten(-2), scale.squeeze(-1)


def per_row_cast_to_fp8(x: torch.Tensor, use_ue8m0: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale per row, whatever its length. x: [..., K] float. Returns q [..., K] e4m3 and scale [...] fp32."""
    q, scale = _cast(x, (-1,), use_ue8m0)
    return q, scale.squeeze(-1)


def per_block_cast_to_fp8(
    w: torch.Tensor, use_ue8m0: bool = True, block: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale per block x block tile of a weight; the last tiles may be ragged.

    w: [O, I] float. Returns q [O, I] e4m3 and scale [ceil(O / block), ceil(I / block)] fp32.
    """
    rows, cols = w.shape
    padded = torch.nn.functional.pad(w.float(), (0, -cols % block, 0, -rows % block))
    tiles = padded.unflatten(1, (-1, block)).unflatten(0, (-1, block))
    q, scale = _cast(tiles, (1, 3), use_ue8m0)
    return q.flatten(2, 3).flatten(0, 1)[:rows, :cols].contiguous(), scale[:, 0, :, 0]


def dequantize_per_token(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """x = q * scale. q: [..., K] e4m3, scale: [..., G] fp32 with K a multiple of G. Returns [..., K] in `dtype`."""
    return (q.float().unflatten(-1, (scale.shape[-1], -1)) * scale.float().unsqueeze(-1)).flatten(-2).to(dtype)


def dequantize_per_block(
    q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32, block: int = 128
) -> torch.Tensor:
    """w[i, j] = q[i, j] * scale[i // block, j // block], in `dtype`; the last tiles may be ragged."""
    rows, cols = q.shape
    expected = (-(-rows // block), -(-cols // block))
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"scale: must be {list(expected)} for a weight of {rows} x {cols} in {block} x {block} blocks, "
            f"got {list(scale.shape)}"
        )
    # Index rather than divide: 576 rows have 5 scale rows, and the last block has 64 rows.
    full = scale.float().repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :cols]
    return (q.float() * full).to(dtype)
