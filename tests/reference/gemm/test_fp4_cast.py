"""The references that convert FP4 weights. From and to float: exact, and rounded to the nearest value. To FP8: the
result is exact, or an error is raised if e4m3's range does not suffice."""

import re

import pytest
import torch

from dsa.cases.gemm import check_widened
from dsa.reference import dequantize_fp4, fp4_block_scales, quantize_fp4, widen_fp4
from tests.reference.common import BYTE, assert_refused
from tests.reference.gemm.fp4 import LARGEST, SMALLEST, VALUES, e8m0, pack, random_codes, weight

SPREAD = 14  # the largest accepted difference between the exponents of a block's groups


def test_the_low_nibble_is_the_even_column():
    packed = torch.tensor([[0x21, 0x43, 0x65, 0x87, 0xA9, 0xCB, 0xED, 0x0F, *[0] * 8]], dtype=torch.uint8)
    got = dequantize_fp4(packed, e8m0(torch.tensor([[1]])))
    order = [*range(1, 16), 0]
    assert got[0, :16].tolist() == [2 * VALUES[code] for code in order]
    assert torch.equal(got, dequantize_fp4(packed.view(torch.int8), e8m0(torch.tensor([[1]]))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantize_fp4_is_exact(dtype):
    codes = random_codes(130, 96)
    exponents = torch.randint(-125, 124, (130, 3), generator=torch.Generator().manual_seed(1))
    got = dequantize_fp4(pack(codes), e8m0(exponents), dtype)
    assert got.dtype == dtype
    assert torch.equal(got.double(), weight(codes, exponents))


def test_quantize_fp4_rounds_to_the_nearest_value_under_the_least_scale():
    w = torch.randn(130, 96, generator=torch.Generator().manual_seed(4))
    w = w * torch.exp2(torch.randint(-40, 40, (130, 1), generator=torch.Generator().manual_seed(5)))
    packed, scale = quantize_fp4(w)
    assert (packed.dtype, packed.shape) == (torch.int8, (130, 48))
    assert (scale.dtype, scale.shape) == (torch.float8_e8m0fnu, (130, 3))
    largest, power = w.unflatten(1, (-1, 32)).abs().amax(-1), scale.float()
    assert (largest <= 6 * power).all() and (largest > 3 * power).all()
    reachable = torch.tensor(VALUES) * power.repeat_interleave(32, 1)[..., None]
    least = (reachable - w[..., None]).abs().amin(-1)
    assert torch.equal((dequantize_fp4(packed, scale) - w).abs(), least)


def test_quantize_fp4_rounds_ties_to_the_smaller_magnitude_and_zeros_have_the_scale_1():
    w = torch.zeros(1, 64)
    w[0, :8] = torch.tensor([0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5, 6])
    packed, scale = quantize_fp4(w)
    assert dequantize_fp4(packed, scale)[0, :8].tolist() == [0, 0.5, -1, 1.5, 2, -3, 4, 6]
    assert scale.float().tolist() == [[1, 1]] and dequantize_fp4(packed, scale)[0, 8:].eq(0).all()


def assert_lossless(codes, exponents):
    packed, scale = pack(codes), e8m0(exponents)
    q, block_scale = widen_fp4(packed, scale)
    check_widened({"packed": packed, "scale": scale}, (q, block_scale))
    return block_scale


def test_all_codes_at_all_offsets():
    """The scales of groups are 2^0 to 2^-14 times the largest scale of their block."""
    codes, exponents = torch.arange(128 * 128).view(128, 128) % 16, -(torch.arange(512).view(128, 4) % 15)
    assert assert_lossless(codes, exponents - 3).tolist() == [[2.0**-9]]


def test_every_block_has_its_scale():
    codes = random_codes(300, 320)  # 3 x 3 blocks; the last blocks have only 44 rows or only 64 columns
    blocks = torch.tensor([[0, 40, -40], [90, -90, 7], [-60, 60, 1]])
    exponents = blocks.repeat_interleave(128, 0)[:300].repeat_interleave(4, 1)[:, :10]
    exponents = exponents + torch.randint(-14, 1, exponents.shape, generator=torch.Generator().manual_seed(2))
    exponents[::128, ::4] = blocks
    codes[::128, ::128] = LARGEST
    assert torch.equal(assert_lossless(codes, exponents), torch.ldexp(torch.ones(3, 3), blocks - 6))


@pytest.mark.parametrize("top", [-127, -126, -120, -113, 0, 127])
def test_ends_of_the_scale_range(top):
    """For any scales of the groups, the scale of the block is a normal fp32 number."""
    codes = random_codes(128, 128)
    codes[0, 0] = LARGEST
    exponents = torch.full((128, 4), top)
    exponents[1::2] = max(top - SPREAD, -127)
    assert assert_lossless(codes, exponents).item() == 2.0 ** max(top - 6, -126)


def test_groups_of_zeros_are_ignored():
    """Quantisers can write any scale for groups of zeros."""
    codes = random_codes(128, 256)
    codes[5, 32:64] = 8  # the code of -0
    codes[6, 64:96] = codes[:, 128:] = 0
    exponents = torch.zeros(128, 8, dtype=torch.int64)
    exponents[5, 1], exponents[6, 2], exponents[:, 4:] = -127, 127, -127
    assert assert_lossless(codes, exponents).tolist() == [[2.0**-6, 2.0**-126]]


@pytest.mark.parametrize("code", [SMALLEST, 2, 3, 4, 6, LARGEST])
def test_the_largest_spread_is_exact(code):
    codes, exponents = torch.full((256, 256), LARGEST), torch.zeros(256, 8, dtype=torch.int64)
    codes[200, 160:192], exponents[200, 5] = code, -SPREAD
    assert_lossless(codes, exponents)


def spread_out(rows, row, group, exponent, top=0, code=LARGEST):
    """Return (packed, scale) of a rows x rows weight. All codes are the largest one and all groups have the exponent
    `top`, except group `group` of row `row`."""
    codes, exponents = torch.full((rows, rows), LARGEST), torch.full((rows, rows // 32), top)
    codes[row, 32 * group : 32 * group + 32], exponents[row, group] = code, exponent
    return pack(codes), e8m0(exponents)


@pytest.mark.parametrize(
    ("weight", "block", "exponents", "spread"),
    [
        # At 2^-15 e4m3 cannot represent code 1. All codes are refused, because the kernels have a table for an exponent
        # only if e4m3 can represent all codes.
        *((spread_out(256, 200, 5, -15, code=code), "[1, 1]", "2^-15 to 2^0", 15) for code in range(1, 8)),
        # In fp32 the ratio of these scales, 2^-254, is 0. The group must not be treated as zeros.
        (spread_out(128, 3, 3, -127, 127), "[0, 0]", "2^-127 to 2^127", 254),
    ],
)
def test_a_larger_spread_is_refused(weight, block, exponents, spread):
    message = f"block {block} of 128 x 128: its groups' scales go from {exponents}, a spread of 2^{spread}"
    assert_refused(re.escape(message), widen_fp4, *weight)


def test_nan_scales_are_refused():
    packed, scales = torch.zeros(2, 4, 32, dtype=torch.int8), e8m0(torch.zeros(2, 4, 2))
    scales.view(BYTE)[1, 2, 1] = 255
    assert_refused(r"scale\[2, 1\] is NaN", widen_fp4, packed[1], scales[1])
    assert_refused(r"scale\[1, 2, 1\] is NaN", fp4_block_scales, packed, scales)


def experts():
    """Return (packed weights [2, 3, 140, 80], scales of groups, expected scales of blocks, which all differ)."""
    codes = random_codes(2, 3, 140, 160)
    blocks = torch.arange(2 * 3 * 2 * 2).view(2, 3, 2, 2) - 12
    exponents = blocks.repeat_interleave(128, 2)[:, :, :140].repeat_interleave(4, 3)[..., :5]
    codes[..., 0::32] = LARGEST
    return pack(codes), e8m0(exponents), torch.ldexp(torch.ones(2, 3, 2, 2), blocks - 6)


def test_leading_dimensions():
    packed, scale, expected = experts()
    found = widen_fp4(packed, scale)
    check_widened({"packed": packed, "scale": scale}, found)
    assert found[0].shape == (2, 3, 140, 160) and torch.equal(found[1], expected)
    strided = packed.view(BYTE).transpose(0, 1), scale.transpose(0, 1)
    assert torch.equal(fp4_block_scales(*strided), expected.transpose(0, 1))


def test_the_error_names_the_block_of_an_expert():
    packed, scale, _ = experts()
    packed.view(BYTE)[1, 2, 130, 64:80], packed.view(BYTE)[1, 2, 131, 64:80] = 0x11, 0x77
    scale.view(BYTE)[1, 2, 130, 4], scale.view(BYTE)[1, 2, 131, 4] = 100, 121
    message = "block [1, 2, 1, 1] of 128 x 128: its groups' scales go from 2^-27 to 2^"
    assert_refused(re.escape(message), fp4_block_scales, packed, scale)


@pytest.mark.parametrize(("shape", "blocks"), [((0, 64), (0, 1)), ((130, 0), (2, 0)), ((0, 4, 64), (0, 1, 1))])
def test_without_rows_or_channels(shape, blocks):
    packed = torch.zeros(*shape[:-1], shape[-1] // 2, dtype=torch.int8)
    q, block_scale = widen_fp4(packed, e8m0(torch.zeros(*shape[:-1], shape[-1] // 32)))
    assert q.shape == shape and block_scale.shape == blocks
