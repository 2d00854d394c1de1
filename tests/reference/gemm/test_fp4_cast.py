"""FP4 weights in FP8: exactly the same weights wherever e4m3 has the range."""

import re

import pytest
import torch

import dsa
from dsa.cases.gemm import check_widened
from dsa.reference import fp4_block_scales, widen_fp4
from tests.reference.common import assert_refused
from tests.reference.gemm.fp4 import LARGEST, SMALLEST, e8m0, pack, random_codes


def assert_lossless(codes, exponents):
    packed, scale = pack(codes), e8m0(exponents)
    q, block_scale = widen_fp4(packed, scale)
    check_widened({"packed": packed, "scale": scale}, (q, block_scale))
    return block_scale


def test_all_codes_at_all_offsets():
    """The scales of groups are up to 2^14 below the largest scale of their block."""
    codes, exponents = random_codes(128, 128), -(torch.arange(512).reshape(128, 4) % 15)
    for offset in range(15):
        assert len(codes.view(128, 4, 32)[exponents == -offset].unique()) == 16
    codes[0, 0] = LARGEST
    assert assert_lossless(codes, exponents - 3).tolist() == [[2.0**-9]]


def test_every_block_has_its_own_scale():
    codes = random_codes(300, 320)  # ragged both ways: 3 x 3 blocks, the last of 44 rows and 2 groups
    blocks = torch.tensor([[0, 40, -40], [90, -90, 7], [-60, 60, 1]])
    exponents = blocks.repeat_interleave(128, 0)[:300].repeat_interleave(4, 1)[:, :10]
    exponents = exponents + torch.randint(-14, 1, exponents.shape, generator=torch.Generator().manual_seed(2))
    exponents[::128, ::4] = blocks
    codes[::128, ::128] = LARGEST
    assert torch.equal(assert_lossless(codes, exponents), torch.ldexp(torch.ones(3, 3), blocks - 6))


@pytest.mark.parametrize("top", [-127, -126, -120, -113, 0, 127])
def test_ends_of_the_scale_range(top):
    """The scale of a block is a normal fp32 number for all scales of groups."""
    codes = random_codes(128, 128)
    codes[0, 0] = LARGEST
    exponents = torch.full((128, 4), top)
    exponents[1::2] = max(top - 14, -127)
    assert assert_lossless(codes, exponents).item() == 2.0 ** max(top - 6, -126)


def test_groups_of_zeros_are_ignored():
    """Quantisers write any scale for them."""
    codes = random_codes(128, 256)
    codes[5, 32:64] = 8  # -0
    codes[6, 64:96] = 0
    codes[:, 128:] = 0
    exponents = torch.zeros(128, 8, dtype=torch.int64)
    exponents[5, 1], exponents[6, 2] = -127, 127
    exponents[:, 4:] = -127
    assert assert_lossless(codes, exponents).tolist() == [[2.0**-6, 2.0**-126]]


@pytest.mark.parametrize("code", [SMALLEST, 2, 3, 4, 6, LARGEST])
def test_limit_of_the_spread(code, spread=14):
    """Also for codes for which e4m3 has more room: the tables of the kernels end where the smallest code does."""
    codes = torch.full((256, 256), LARGEST)
    codes[200, 160:192] = code
    exponents = torch.zeros(256, 8, dtype=torch.int64)
    exponents[200, 5] = -spread
    assert_lossless(codes, exponents)
    exponents[200, 5] -= 1
    message = (
        f"block [1, 1] of 128 x 128: its groups' scales go from 2^{-spread - 1} to 2^0, a spread of 2^{spread + 1}"
    )
    assert_refused(re.escape(message), widen_fp4, pack(codes), e8m0(exponents))


def test_widest_spread_is_refused():
    """A value far below the lowest fp32 number is not taken for a zero."""
    codes = torch.full((128, 128), LARGEST)
    exponents = torch.full((128, 4), 127)
    exponents[3, 3] = -127
    message = r"block \[0, 0\].*from 2\^-127 to 2\^127, a spread of 2\^254"
    assert_refused(message, widen_fp4, pack(codes), e8m0(exponents))


def test_nan_scale():
    scale = e8m0(torch.zeros(4, 2))
    scale.view(torch.uint8)[2, 1] = 255
    packed, scales = torch.zeros(2, 4, 32, dtype=torch.int8), torch.stack((e8m0(torch.zeros(4, 2)), scale))
    assert_refused(r"scale\[2, 1\] is NaN", widen_fp4, packed[0], scale)
    assert_refused(r"scale\[1, 2, 1\] is NaN", fp4_block_scales, packed, scales)


def experts():
    """Weights [2, 3, 140, 160] whose blocks all have different scales."""
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
    strided = packed.view(torch.uint8).transpose(0, 1), scale.transpose(0, 1)
    assert torch.equal(fp4_block_scales(*strided), expected.transpose(0, 1))


def test_the_error_names_the_block_of_an_expert():
    packed, scale, _ = experts()
    packed.view(torch.uint8)[1, 2, 130, 64:80], packed.view(torch.uint8)[1, 2, 131, 64:80] = 0x11, 0x77
    exponents = scale.view(torch.uint8)
    exponents[1, 2, 130, 4], exponents[1, 2, 131, 4] = 100, 121
    message = "block [1, 2, 1, 1] of 128 x 128: its groups' scales go from 2^-27 to 2^"
    assert_refused(re.escape(message), fp4_block_scales, packed, scale)


def test_without_rows_or_channels():
    for shape, blocks in (((0, 64), (0, 1)), ((130, 0), (2, 0)), ((0, 4, 64), (0, 1, 1))):
        packed = torch.zeros(*shape[:-1], shape[-1] // 2, dtype=torch.int8)
        q, block_scale = widen_fp4(packed, e8m0(torch.zeros(*shape[:-1], shape[-1] // 32)))
        assert q.shape == shape and block_scale.shape == blocks


PACKED, SCALE = torch.zeros(4, 32, dtype=torch.int8), e8m0(torch.zeros(4, 2))


@pytest.mark.parametrize("function", [dsa.widen_fp4, dsa.fp4_block_scales])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PACKED, SCALE[:, :1]), "scale: shape must be [4, 2], got [4, 1] (sizes as of packed)"),
        ((PACKED, SCALE[:1]), "scale: shape must be [4, 2], got [1, 2]"),
        ((PACKED[0], SCALE), "packed: must have at least 2 dimensions, got shape [32]"),
        ((PACKED[:, :24], SCALE), "packed: must have a multiple of 32 channels, two a byte, got 48 channels"),
        ((PACKED.short(), SCALE), "packed: dtype must be int8 or uint8, got int16"),
        ((PACKED, SCALE.float()), "scale: dtype must be float8_e8m0fnu, got float32"),
        ((PACKED.to("meta"), SCALE.to("meta")), "packed: must be on a device with memory"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, function):
    assert_refused(re.escape(message), function, *arguments)
