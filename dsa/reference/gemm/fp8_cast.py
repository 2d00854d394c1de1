"""Casts between float and FP8 e4m3 with one scale per group: value = q * scale.

All casts share one rule, DeepGEMM's. amax = max(|x|, 1e-4) over the group and scale = amax / 448, or the next power of
two at or above it ("ue8m0"); q = round_to_e4m3(x * (1 / scale)): the reciprocal is rounded to fp32, and so is the
product. Scales are returned as fp32 in both cases.
NaN in a group makes the group's scale and values NaN; infinity makes the scale infinite and the values NaN or 0. Those
groups apart, the bytes are those of DeepGEMM's functions on the same device. Without ue8m0 the device matters: PyTorch
divides by 448 on a CPU, and on a GPU multiplies with 1 / 448, so that a scale's last bit may differ.
Source: `act_quant` of DeepSeek-V3.2's inference code; DeepGEMM's `per_token_cast_to_fp8` and `per_block_cast_to_fp8`.
"""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.gemm.hadamard import hadamard_transform
from dsa.runtime.arguments import ROWS, Arguments, Dtype, Flag, Int, Tensor
from dsa.runtime.checks import E4M3, FLOATS, check_memory

E4M3_MAX = 448.0
AMAX_MIN = 1e-4
SCALES = (torch.float32, torch.float8_e8m0fnu)


def _check_groups(x: torch.Tensor, gran_k: int, hadamard: bool) -> None:
    if x.shape[-1] % gran_k:
        raise ValueError(f"x: the last dimension must be a multiple of gran_k={gran_k}, got {x.shape[-1]}")
    if hadamard and gran_k & (gran_k - 1):
        raise ValueError(f"gran_k: must be a power of two with hadamard, got {gran_k}")


PER_TOKEN_CAST_TO_FP8 = Arguments(
    rule=_check_groups,
    x=Tensor("... K", FLOATS, layout=ROWS, merged=(0, -1)),
    use_ue8m0=Flag(),
    gran_k=Int(),
    hadamard=Flag(),
)
PER_BLOCK_CAST_TO_FP8 = Arguments(w=Tensor("O I", FLOATS), use_ue8m0=Flag(), block=Int())
DEQUANTIZE_PER_BLOCK = Arguments(
    first=("block",),
    q=Tensor("O I", E4M3),
    scale=Tensor("ceil(O/block) ceil(I/block)", SCALES),
    dtype=Dtype((*FLOATS, torch.float64)),
    block=Int(),
)


def ceil_to_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below `scale` (fp32, positive and normal): 2^ceil(log2(scale)), exactly."""
    mantissa, exponent = torch.frexp(scale)
    return torch.where(scale.isfinite(), torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int()), scale)


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
    """One scale per token and `gran_k` channels.

    hadamard=True first transforms every group of gran_k channels, a power of two, rounding the result to x's dtype.
    Arguments as of `dsa.per_token_cast_to_fp8`.
    """
    PER_TOKEN_CAST_TO_FP8.check(x, use_ue8m0, gran_k, hadamard)
    check_memory("x", x)
    groups = x.detach().unflatten(-1, (x.shape[-1] // gran_k, gran_k))
    if hadamard:
        groups = hadamard_transform(groups)
    q, scale = _cast(groups, (-1,), use_ue8m0)
    return q.flatten(-2).contiguous(), scale.squeeze(-1).contiguous()


@without_autocast
def per_row_cast_to_fp8(x: torch.Tensor, use_ue8m0: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale per row, whatever its length. x: [..., K] float. Returns q [..., K] e4m3 and scale [...] fp32."""
    q, scale = _cast(x, (-1,), use_ue8m0)
    return q, scale.squeeze(-1)


@without_autocast
def per_block_cast_to_fp8(
    w: torch.Tensor, use_ue8m0: bool = True, block: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """q = round_to_e4m3(w * (1 / scale)), scale = max(amax(|w|), 1e-4) / 448 over each block x block tile of a weight.

    w          [O, I] fp32, bf16 or fp16
    use_ue8m0  True: scale is the next power of two at or above that number
    block      rows and columns of a tile; the last tiles have as many as are left

    Returns q [O, I] e4m3 and scale [ceil(O / block), ceil(I / block)] fp32; w ~ q * scale (the scale multiplies).
    Raises TypeError or ValueError for other types, dtypes and shapes.
    """
    PER_BLOCK_CAST_TO_FP8.check(w, use_ue8m0, block)
    check_memory("w", w)
    rows, cols = w.shape
    # A block that is larger than the weight is the weight.
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

    q      [O, I] e4m3
    scale  [ceil(O / block), ceil(I / block)] fp32 or e8m0
    dtype  of the result: fp32, bf16, fp16 or float64
    block  rows and columns of a tile; the last tiles have as many as are left

    Returns [O, I] in `dtype`. `per_block_cast_to_fp8` makes such q and scale.
    Raises TypeError or ValueError for other types, dtypes and shapes.
    """
    DEQUANTIZE_PER_BLOCK.check(q, scale, dtype, block)
    check_memory("q", q)
    rows, cols = q.shape
    # Index rather than divide: 576 rows have 5 scale rows, and the last block has 64 rows.
    height, width = (max(1, min(block, size)) for size in (rows, cols))
    full = scale.float().repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :cols]
    return (q.float() * full).to(dtype)
