"""FP4 weights as published, and the same weights in FP8: two e2m1 codes a byte, a power-of-two scale for 32 channels.

e2m1 holds 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with either sign; the low nibble of a byte is the even channel. Hopper's tensor
cores do not take FP4, but every e2m1 value times a power of two from 2^-8 to 2^6 is an e4m3 number. So a block of
128 x 128 gets one scale, 2^-6 times its largest group's, and the powers of two between a group's scale and its block's
go into the e4m3 values: nothing is rounded.
"""

import torch

from dsa.reference.autocast import without_autocast
from dsa.runtime.arguments import Arguments, Tensor
from dsa.runtime.checks import check_memory

GROUP = 32
BLOCK = 128

BYTES = (torch.int8, torch.uint8)
E8M0 = (torch.float8_e8m0fnu,)

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float32, device="cpu")
_BYTES = torch.arange(256, device="cpu")
_PAIRS = torch.cat((E2M1, -E2M1))[torch.stack((_BYTES % 16, _BYTES // 16), -1)]

# The largest e2m1 value, 6, times 2^6 is the last that e4m3 (up to 448) holds.
_HEADROOM = 6
# e4m3's steps end at 2^-9. Below -8 the smallest e2m1 values are lost, from -16 on all of them.
_EXACT_SHIFT, _LOWEST_SHIFT = -8, -16
LOWEST_EXPONENT = -126  # of an fp32 that is not subnormal
_NAN = 128  # where E8M0's exponents end

# [shift, byte]: the two e4m3 values of a byte's codes times 2^shift, and whether one of them is not exactly that.
_POWERS = torch.tensor([2.0**i for i in range(_LOWEST_SHIFT, _HEADROOM + 1)], dtype=torch.float32, device="cpu")
_SHIFTED = _PAIRS * _POWERS[:, None, None]
_IN_E4M3 = _SHIFTED.to(torch.float8_e4m3fn)
_LOST = (_IN_E4M3.float() != _SHIFTED).any(-1).flatten()
_IN_E4M3 = _IN_E4M3.view(torch.int16).flatten()


def check_groups(name: str, packed: torch.Tensor) -> None:
    """The rule of packed weights: channels are whole groups."""
    channels = 2 * packed.shape[-1]
    if channels % GROUP:
        raise ValueError(f"{name}: must have a multiple of {GROUP} channels, two a byte, got {channels} channels")


FP4_WEIGHT = Arguments(
    packed=Tensor("... N C", BYTES, rule=check_groups),
    scale=Tensor("... N ceil(C/16)", E8M0),
)


@without_autocast
def fp4_block_scales(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The FP8 scale of each 128 x 128 block of an FP4 weight: 2^-6 times the largest scale of the block's groups.

    packed  [..., N, K / 2] int8 or uint8: two e2m1 codes a byte, the low nibble the even channel; K a multiple of 32
    scale   [..., N, K / 32] float8_e8m0fnu: of 32 channels of a row

    Groups of zeros have no say; a block that has nothing else gets 2^-126, the least there is. Returns
    [..., ceil(N / 128), ceil(K / 128)] fp32, the scale of `widen_fp4` and what `grouped_fp8_fp4_gemm_nt` takes beside
    the weight. The last blocks of rows and channels may be smaller.
    Raises TypeError or ValueError for other types, dtypes and shapes, for a NaN scale, and for a block whose groups'
    scales lie too far apart for e4m3 with one scale, which is more than 2^14 where the smaller groups hold the
    smallest values: the message has the block and the spread.
    """
    return widen_fp4(packed, scale)[1]


@without_autocast
def widen_fp4(packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An FP4 weight in FP8, exactly: q * s = e2m1 * scale, where s is 2^-6 times the largest scale of a block's groups.

    packed  [..., N, K / 2] int8 or uint8: two e2m1 codes a byte, the low nibble the even channel; K a multiple of 32
    scale   [..., N, K / 32] float8_e8m0fnu: of 32 channels of a row

    Returns q [..., N, K] float8_e4m3fn and s [..., ceil(N / 128), ceil(K / 128)] fp32, the `fp4_block_scales`: a weight
    of `fp8_gemm_nt` and `grouped_fp8_gemm_nt`.
    Raises TypeError or ValueError as `fp4_block_scales` does.
    """
    FP4_WEIGHT.check(packed, scale)
    check_memory("packed", packed)
    *leading, rows, half = packed.shape
    blocks = (-(-rows // BLOCK), -(-2 * half // BLOCK))
    q = torch.empty(*leading, rows, 2 * half, dtype=torch.float8_e4m3fn, device=packed.device)
    block_scale = torch.empty(*leading, *blocks, dtype=torch.float32, device=packed.device)
    if packed.numel() == 0:
        return q, block_scale.fill_(2.0**LOWEST_EXPONENT)
    # One matrix at a time: its places in the tables are four times its bytes.
    for i in range(torch.Size(leading).numel()):
        place = _place(i, leading)
        q[place], block_scale[place] = widen_matrix(packed[place], scale[place], place)
    return q, block_scale


def _place(index: int, leading: list[int]) -> tuple[int, ...]:
    """The index into `leading` dimensions of their matrix number `index`."""
    place: list[int] = []
    for size in reversed(leading):
        index, own = divmod(index, size)
        place.insert(0, own)
    return tuple(place)


def widen_matrix(
    packed: torch.Tensor, scale: torch.Tensor, place: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`widen_fp4` of a matrix. place: its indices among others, for messages."""
    exponents = group_exponents(scale)
    if (exponents == _NAN).any():
        where = [*place, *(exponents == _NAN).nonzero()[0].tolist()]
        raise ValueError(f"scale{where} is NaN")
    live = ((_bytes(packed) & 0x77) != 0).any(-1)
    top = _by_block(exponents.where(live, LOWEST_EXPONENT)).amax((1, 3))
    block_exponents = (top - _HEADROOM).clamp_min(LOWEST_EXPONENT)
    shift = _shifts(exponents, block_exponents)
    if (shift < _EXACT_SHIFT).any():
        lost = _LOST.to(packed.device)[_places(packed, shift)].any(-1)
        if lost.any():
            raise ValueError(_describe_loss(lost, exponents, live, place))
    return _in_e4m3(packed, shift), powers_of_two(block_exponents)


def e2m1_groups(packed: torch.Tensor) -> torch.Tensor:
    """The e2m1 values of bytes [..., N, K / 2] as fp32 [..., N, K / 32, 32]."""
    groups = _bytes(packed)
    return _PAIRS.to(packed.device).index_select(0, groups.flatten().int()).view(*groups.shape[:-1], GROUP)


def group_exponents(scale: torch.Tensor) -> torch.Tensor:
    """e of scales 2^e, int32; 128 where the scale is NaN."""
    return scale.view(torch.uint8).int() - 127


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """2^exponents in fp32, by its bits: no device rounds that. exponents: int32 in [-126, 127]."""
    return ((exponents + 127) << 23).view(torch.float32)


def _bytes(packed: torch.Tensor) -> torch.Tensor:
    """[..., K / 2] -> uint8 [..., K / 32, 16]"""
    return packed.contiguous().view(torch.uint8).view(*packed.shape[:-1], 2 * packed.shape[-1] // GROUP, GROUP // 2)


def _shifts(exponents: torch.Tensor, block_exponents: torch.Tensor) -> torch.Tensor:
    """What the powers of two of groups [N, K / 32] are over those of their blocks, as far as it makes a difference."""
    rows, columns = exponents.shape
    per_group = block_exponents.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK // GROUP, 1)[:, :columns]
    return (exponents - per_group).clamp(_LOWEST_SHIFT, _HEADROOM)


def _places(packed: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Where the tables have the bytes of a matrix: int32 [N, K / 32, 16]."""
    return (shift[..., None] - _LOWEST_SHIFT) * len(_BYTES) + _bytes(packed)


def _in_e4m3(packed: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """[N, K] e4m3"""
    found = _IN_E4M3.to(packed.device).index_select(0, _places(packed, shift).flatten())
    return found.view(len(packed), -1).view(torch.float8_e4m3fn)


def _by_block(of_groups: torch.Tensor, fill: int = LOWEST_EXPONENT) -> torch.Tensor:
    """[N, K / 32] -> [ceil(N / 128), 128, ceil(K / 128), 4]; ragged blocks are filled up."""
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
