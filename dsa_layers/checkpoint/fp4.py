"""FP4 weights as published: two e2m1 codes a byte, one power-of-two scale for every 32 columns of a row.

e2m1 holds 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with either sign; the low nibble of a byte is the even column. Hopper cannot
multiply FP4, so a weight is widened to FP8 or dequantised when it is loaded.
"""

import torch

GROUP = 32
BLOCK = 128

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float32, device="cpu")
_BYTES = torch.arange(256, device="cpu")
_PAIRS = torch.cat((_E2M1, -_E2M1))[torch.stack((_BYTES % 16, _BYTES // 16), -1)]

# The largest e2m1 value, 6, times 2^6 is the last that e4m3 (up to 448) holds.
_HEADROOM = 6
# e4m3's steps end at 2^-9. Below -8 even the smallest e2m1 value is lost; further down it makes no difference.
_LOWEST_SHIFT = -16
_LOWEST_EXPONENT = -126  # of an fp32 that is not subnormal
_NAN = 128  # where E8M0's exponents end


def dequantize_fp4(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """w[i, j] = e2m1[i, j] * scale[i, j // 32], in `dtype`: exact in any that has the range.

    packed: [O, I / 2], one byte each; scale: [O, I / 32] float8_e8m0fnu. Returns [O, I].
    Raises ValueError for shapes that do not belong together.
    """
    return (_groups(packed, scale) * scale.float()[..., None]).flatten(1).to(dtype)


def widen_fp4(packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same weight in FP8: (q [O, I] float8_e4m3fn, block scale [ceil(O / 128), ceil(I / 128)] fp32).

    q * block scale is exactly e2m1 * scale. A block's scale is 2^-6 times its largest group's, and the powers of two
    between a group's scale and its block's go into q. Groups that are all zero have no say in it.
    Raises ValueError, naming the first such block, where the groups' scales lie too far apart for e4m3: more than 2^14
    where the smaller groups hold the smallest values. Also for shapes that do not belong together, and a NaN scale.
    """
    groups = _groups(packed, scale)
    exponents = scale.view(torch.uint8).int() - 127
    if (exponents == _NAN).any():
        row, column = (exponents == _NAN).nonzero()[0].tolist()
        raise ValueError(f"scale[{row}, {column}] is NaN")
    live = (groups != 0).any(-1)
    top = _by_block(exponents.where(live, _LOWEST_EXPONENT)).amax((1, 3))
    block_exponents = (top - _HEADROOM).clamp_min(_LOWEST_EXPONENT)
    rows, columns = exponents.shape
    per_group = block_exponents.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK // GROUP, 1)[:, :columns]
    shift = (exponents - per_group).clamp(_LOWEST_SHIFT, _HEADROOM)
    values = groups * _powers_of_two(shift)[..., None]
    q = values.to(torch.float8_e4m3fn)
    lost = (q.float() != values).any(-1)
    if lost.any():
        raise ValueError(_describe_loss(lost, exponents, live))
    return q.flatten(1), _powers_of_two(block_exponents)


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
    mantissa, exponent = torch.frexp(groups.abs().amax(-1) / _E2M1[-1].item())
    exponent = (exponent - (mantissa == 0.5).int()).clamp_min(_LOWEST_EXPONENT)
    middles = ((_E2M1[1:] + _E2M1[:-1]) / 2).to(weight.device)
    codes = torch.bucketize(groups.abs() / _powers_of_two(exponent)[..., None], middles, out_int32=True)
    codes = (codes | groups.signbit().int() << 3).flatten(1).to(torch.uint8)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8)
    return packed, (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def _groups(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The e2m1 values as fp32 [O, I / 32, 32]."""
    if packed.dim() != 2 or packed.element_size() != 1 or (2 * packed.shape[1]) % GROUP:
        raise ValueError(
            f"packed: must be a matrix of bytes [O, I / 2] with I a multiple of {GROUP}, "
            f"got {packed.dtype} {list(packed.shape)}"
        )
    expected = (packed.shape[0], 2 * packed.shape[1] // GROUP)
    if scale.dtype != torch.float8_e8m0fnu or tuple(scale.shape) != expected:
        raise ValueError(
            f"scale: must be float8_e8m0fnu {list(expected)} for packed {list(packed.shape)}, "
            f"got {scale.dtype} {list(scale.shape)}"
        )
    pairs = _PAIRS.to(packed.device).index_select(0, packed.view(torch.uint8).flatten().int())
    return pairs.view(*expected, GROUP)


def _powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """2^exponents in fp32, by its bits: no device rounds that. exponents: int32 in [-126, 127]."""
    return ((exponents + 127) << 23).view(torch.float32)


def _by_block(of_groups: torch.Tensor, fill: int = _LOWEST_EXPONENT) -> torch.Tensor:
    """[O, I / 32] -> [ceil(O / 128), 128, ceil(I / 128), 4]; ragged blocks are filled up."""
    rows, columns = of_groups.shape
    each = BLOCK // GROUP
    padded = torch.nn.functional.pad(of_groups, (0, -columns % each, 0, -rows % BLOCK), value=fill)
    return padded.unflatten(1, (-1, each)).unflatten(0, (-1, BLOCK))


def _describe_loss(lost: torch.Tensor, exponents: torch.Tensor, live: torch.Tensor) -> str:
    row, column = (_by_block(lost.int(), 0).amax((1, 3)) > 0).nonzero()[0].tolist()
    rows = slice(row * BLOCK, (row + 1) * BLOCK)
    columns = slice(column * BLOCK // GROUP, (column + 1) * BLOCK // GROUP)
    seen = exponents[rows, columns][live[rows, columns]]
    low, high = seen.min().item(), seen.max().item()
    return (
        f"block [{row}, {column}] of {BLOCK} x {BLOCK}: its groups' scales go from 2^{low} to 2^{high}, a spread of "
        f"2^{high - low}; FP8 with one scale a block holds any FP4 up to a spread of 2^14"
    )
