"""FP4 weights of checkpoints as float weights, and float weights in FP4 or FP8. `dsa.widen_fp4` explains the format."""

import torch

from dsa import per_block_cast_to_fp8
from dsa.ops.gemm.fp8_fp4_gemm_nt import FP4_WEIGHT
from dsa.reference.gemm.fp4_cast import E2M1, GROUP, LOWEST_EXPONENT, e2m1_groups, powers_of_two

__all__ = ["GROUP", "dequantize_fp4", "quantize", "quantize_fp4"]


def quantize(values: torch.Tensor, kind: str, *, use_ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(quantised weight, scale). kind: "FP4" or "FP8"; use_ue8m0: FP8 scales are powers of two."""
    return quantize_fp4(values) if kind == "FP4" else per_block_cast_to_fp8(values, use_ue8m0)


def dequantize_fp4(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """w[..., i, j] = e2m1[..., i, j] * scale[..., i, j // 32], in `dtype`: exact in any that has the range.

    packed: [..., O, I / 2] int8 or uint8; scale: [..., O, I / 32] float8_e8m0fnu. Returns [..., O, I].
    Raises ValueError for shapes and dtypes that do not belong together.
    """
    FP4_WEIGHT.check(packed, scale)
    return (e2m1_groups(packed) * scale.float()[..., None]).flatten(-2).to(dtype)


def quantize_fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed [O, I / 2] int8, scale [O, I / 32] float8_e8m0fnu): `dequantize_fp4` gives the values nearest to weight.

    weight: float [O, I], finite. A group's scale is the least power of two with which 6 reaches its largest magnitude,
    1 if all are zero; halfway between two values the smaller magnitude is taken.
    Raises ValueError unless `weight` is a matrix with I a multiple of 32.
    """
    if weight.dim() != 2 or weight.shape[1] % GROUP:
        raise ValueError(
            f"weight: must be a matrix [O, I] with I a multiple of {GROUP}, got {weight.dtype} {list(weight.shape)}"
        )
    groups = weight.float().unflatten(1, (-1, GROUP))
    mantissa, exponent = torch.frexp(groups.abs().amax(-1) / E2M1[-1].item())
    exponent = (exponent - (mantissa == 0.5).int()).clamp_min(LOWEST_EXPONENT)
    middles = ((E2M1[1:] + E2M1[:-1]) / 2).to(weight.device)
    codes = torch.bucketize(groups.abs() / powers_of_two(exponent)[..., None], middles, out_int32=True)
    codes = (codes | groups.signbit().int() << 3).flatten(1).to(torch.uint8)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8)
    return packed, (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
