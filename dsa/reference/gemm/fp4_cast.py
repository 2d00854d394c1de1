"""FP4 weights as DeepSeek-V4's checkpoints store them, with two e2m1 codes per byte and a power-of-two scale per group
of 32 channels: casts from and to float, and the exact conversion to FP8.

The e2m1 values are 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with either sign; the low nibble of a byte is the even channel.
Hopper's tensor cores do not accept FP4, but every e2m1 value times a power of two from 2^-8 to 2^6 is an e4m3 number.
So each block of 128 x 128 of the FP8 weight gets one scale, 2^-6 times the largest scale of the block's groups. The
e2m1 values of a group are multiplied by the ratio of the group's scale to the block's scale. The products are e4m3
numbers, so nothing is rounded. A block is refused if the scales of two groups differ by more than a factor of 2^14;
groups of zeros do not count.
"""

import torch

from dsa.reference.autocast import without_autocast

GROUP = 32
BLOCK = 128

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float32, device="cpu")
_BYTES = torch.arange(256, device="cpu")
_PAIRS = torch.cat((E2M1, -E2M1))[torch.stack((_BYTES % 16, _BYTES // 16), -1)]

# The ratio of a group's scale to the block's scale is at most 2^6: 6, the largest e2m1 value, times 2^6 is 384, and
# 448 is the largest e4m3 value.
_HEADROOM = 6
# The ratio must be at least 2^-8: 0.5, the smallest positive e2m1 value, times 2^-8 is 2^-9, the smallest positive e4m3
# value. The kernels' tables have the same limit.
_LOWEST_SHIFT = -8
LOWEST_EXPONENT = -126  # the smallest exponent of a normal fp32 number
_NAN = 128  # the exponent of e8m0's NaN

# Per ratio and byte: the byte's two e2m1 values times the ratio, as two bytes of e4m3.
_POWERS = torch.tensor([2.0**i for i in range(_LOWEST_SHIFT, _HEADROOM + 1)], dtype=torch.float32, device="cpu")
_IN_E4M3 = (_PAIRS * _POWERS[:, None, None]).to(torch.float8_e4m3fn).view(torch.int16).flatten()


@without_autocast
def dequantize_fp4(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """w[..., i, j] = e2m1[..., i, j] * scale[..., i, j // 32] in `dtype`, exact if the range of `dtype` includes it.

    packed: [..., N, K / 2] int8 or uint8. scale: [..., N, K / 32] float8_e8m0fnu. Returns [..., N, K].
    """
    return (e2m1_groups(packed) * scale.float()[..., None]).flatten(-2).to(dtype)


@without_autocast
def quantize_fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight [N, K] to FP4. weight: float, finite; K is a multiple of 32.

    Returns (packed [N, K / 2] int8, scale [N, K / 32] float8_e8m0fnu). The scale of a group of 32 columns is the
    smallest power of two s, at least 2^-126, for which 6 * s is at least the group's largest magnitude. The scale of a
    group of zeros is 1. Values are rounded to the nearest FP4 value, and ties to the smaller magnitude.
    """
    groups = weight.float().unflatten(1, (-1, GROUP))
    mantissa, exponent = torch.frexp(groups.abs().amax(-1) / E2M1[-1].item())
    exponent = (exponent - (mantissa == 0.5).int()).clamp_min(LOWEST_EXPONENT)
    middles = ((E2M1[1:] + E2M1[:-1]) / 2).to(weight.device)
    codes = torch.bucketize(groups.abs() / powers_of_two(exponent)[..., None], middles, out_int32=True)
    codes = (codes | groups.signbit().int() << 3).flatten(1).to(torch.uint8)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8)
    return packed, (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


@without_autocast
def fp4_block_scales(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The FP8 scale of each 128 x 128 block of an FP4 weight: 2^-6 times the largest scale of the block's groups, at
    least 2^-126.

    Groups of zeros are ignored; a block in which all codes are zero gets 2^-126. Raises ValueError like `widen_fp4`.
    Arguments as in `dsa.fp4_block_scales`.
    """
    return widen_fp4(packed, scale)[1]


@without_autocast
def widen_fp4(packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An FP4 weight in FP8, exactly: q * s = e2m1 * scale, where s is the block's scale of `fp4_block_scales`.

    Returns (q, s). Raises ValueError for a NaN scale, and for a block whose groups' scales differ by more than a factor
    of 2^14, not counting groups of zeros. Arguments as in `dsa.widen_fp4`.
    """
    *leading, rows, half = packed.shape
    blocks = (-(-rows // BLOCK), -(-2 * half // BLOCK))
    q = torch.empty(*leading, rows, 2 * half, dtype=torch.float8_e4m3fn, device=packed.device)
    block_scale = torch.empty(*leading, *blocks, dtype=torch.float32, device=packed.device)
    if packed.numel() == 0:
        return q, block_scale.fill_(2.0**LOWEST_EXPONENT)
    # One matrix at a time, because the int32 table indices need four times the bytes of the packed matrix.
    for i in range(torch.Size(leading).numel()):
        place = _place(i, leading)
        q[place], block_scale[place] = widen_matrix(packed[place], scale[place], place)
    return q, block_scale


def _place(index: int, leading: list[int]) -> tuple[int, ...]:
    """Convert the flat index of a matrix to one index per leading dimension."""
    place: list[int] = []
    for size in reversed(leading):
        index, own = divmod(index, size)
        place.insert(0, own)
    return tuple(place)


def widen_matrix(
    packed: torch.Tensor, scale: torch.Tensor, place: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `widen_fp4` of one matrix. place: the matrix's index in the leading dimensions, for error messages."""
    exponents = group_exponents(scale)
    if (exponents == _NAN).any():
        where = [*place, *(exponents == _NAN).nonzero()[0].tolist()]
        raise ValueError(f"scale{where} is NaN")
    live = ((_bytes(packed) & 0x77) != 0).any(-1)
    top = _by_block(exponents.where(live, LOWEST_EXPONENT)).amax((1, 3))
    block_exponents = (top - _HEADROOM).clamp_min(LOWEST_EXPONENT)
    shift = _shifts(exponents, block_exponents)
    lost = live & (shift < _LOWEST_SHIFT)
    if lost.any():
        raise ValueError(_describe_loss(lost, exponents, live, place))
    return _in_e4m3(packed, shift.clamp(_LOWEST_SHIFT, _HEADROOM)), powers_of_two(block_exponents)


def e2m1_groups(packed: torch.Tensor) -> torch.Tensor:
    """Convert bytes [..., N, K / 2] to fp32 [..., N, K / 32, 32]."""
    groups = _bytes(packed)
    return _PAIRS.to(packed.device).index_select(0, groups.flatten().int()).view(*groups.shape[:-1], GROUP)


def group_exponents(scale: torch.Tensor) -> torch.Tensor:
    """Return the exponents e of scales 2^e as int32; 128 for NaN."""
    return scale.view(torch.uint8).int() - 127


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2^exponents in fp32, exactly on every device. exponents: int32 in [-126, 127]."""
    return ((exponents + 127) << 23).view(torch.float32)


def _bytes(packed: torch.Tensor) -> torch.Tensor:
    """Return the bytes [..., K / 2] as uint8 [..., K / 32, 16]."""
    return packed.contiguous().view(torch.uint8).view(*packed.shape[:-1], 2 * packed.shape[-1] // GROUP, GROUP // 2)


def _shifts(exponents: torch.Tensor, block_exponents: torch.Tensor) -> torch.Tensor:
    rows, columns = exponents.shape
    per_group = block_exponents.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK // GROUP, 1)[:, :columns]
    return exponents - per_group


def _places(packed: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Return the index in `_IN_E4M3` of each byte of a matrix: int32 [N, K / 32, 16]."""
    return (shift[..., None] - _LOWEST_SHIFT) * len(_BYTES) + _bytes(packed)


def _in_e4m3(packed: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    found = _IN_E4M3.to(packed.device).index_select(0, _places(packed, shift).flatten())
    return found.view(len(packed), -1).view(torch.float8_e4m3fn)


def _by_block(of_groups: torch.Tensor, fill: int = LOWEST_EXPONENT) -> torch.Tensor:
    """Reshape [N, K / 32] to [ceil(N / 128), 128, ceil(K / 128), 4]."""
    rows, columns = of_groups.shape
    each = BLOCK // GROUP
    padded = torch.nn.functional.pad(of_groups, (0, -columns % each, 0, -rows % BLOCK), value=fill)
    return padded.unflatten(1, (-1, each)).unflatten(0, (-1, BLOCK))


def _describe_loss(lost: torch.Tensor, exponents: torch.Tensor, live: torch.Tensor, place: tuple[int, ...]) -> str:
    row, column = (_by_block(lost.int(), 0).amax((1, 3)) > 0).nonzero()[0].tolist()
    rows = slice(row * BLOCK, (row + 1) * BLOCK)
    columns = slice(column * BLOCK // GROUP, (column + 1) * BLOCK // GROUP)
    seen = exponents[rows, columns][live[rows, columns]]
    low, high = seen.min().item(), seen.max().item()
    return (
        f"block {[*place, row, column]} of {BLOCK} x {BLOCK}: its groups' scales go from 2^{low} to 2^{high}, a spread "
        f"of 2^{high - low}; FP8 with one scale a block holds any FP4 up to a spread of 2^14"
    )
