"""FP4 weights: unpacking, exact dequantisation, widening to FP8 without loss, and quantising."""

import re

import pytest
import torch

from dsa import dequantize_per_block
from dsa_layers.checkpoint.fp4 import dequantize_fp4, quantize_fp4, widen_fp4

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
VALUES += [-v for v in VALUES]
SMALLEST, LARGEST = 1, 7  # codes


def pack(codes):
    """[O, I] codes -> [O, I / 2] int8, the low nibble for the even column."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)


def e8m0(exponents):
    return (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def weight(codes, exponents):
    """The weight by the definition, element by element, in fp64."""
    scale = torch.ldexp(torch.ones((), dtype=torch.float64), exponents.double()).repeat_interleave(32, 1)
    return torch.tensor(VALUES, dtype=torch.float64)[codes] * scale


def assert_lossless(codes, exponents):
    q, scale = widen_fp4(pack(codes), e8m0(exponents))
    assert q.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    expected = weight(codes, exponents)
    rows, columns = torch.meshgrid(*(torch.arange(n) // 128 for n in codes.shape), indexing="ij")
    assert torch.equal(q.double() * scale[rows, columns].double(), expected)
    assert torch.equal(q.double().signbit(), expected.signbit())  # of zeros too
    mantissa, _ = torch.frexp(scale)
    assert mantissa.eq(0.5).all()  # powers of two
    return scale


def random_codes(*shape):
    return torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(0))


def test_codes_and_nibbles():
    packed = torch.tensor([[0x21, 0x43, 0x65, 0x87, 0xA9, 0xCB, 0xED, 0x0F, *[0] * 8]], dtype=torch.uint8)
    got = dequantize_fp4(packed, e8m0(torch.tensor([[1]])))
    order = [*range(1, 16), 0]
    assert got[0, :16].tolist() == [2 * VALUES[code] for code in order]
    assert torch.equal(got, dequantize_fp4(packed.view(torch.int8), e8m0(torch.tensor([[1]]))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantises_exactly(dtype):
    codes = random_codes(130, 96)
    exponents = torch.randint(-125, 124, (130, 3), generator=torch.Generator().manual_seed(1))
    got = dequantize_fp4(pack(codes), e8m0(exponents), dtype)
    assert got.dtype == dtype
    assert torch.equal(got.double(), weight(codes, exponents))


@pytest.mark.parametrize("code", range(16))
@pytest.mark.parametrize("offset", range(15))
def test_every_code_at_every_offset(code, offset):
    """A group that lies `offset` below its block's largest scale: each code survives, and beside all others."""
    codes = torch.full((128, 128), code)
    codes[:, 96:] = LARGEST
    exponents = torch.full((128, 4), -3 - offset)
    exponents[:, 3] = -3
    assert assert_lossless(codes, exponents).tolist() == [[2.0**-9]]


def test_all_codes_and_offsets_in_one_block():
    codes = random_codes(128, 128)
    exponents = torch.arange(512).reshape(128, 4) % 15
    assert_lossless(codes, exponents)


def test_every_block_has_its_own_scale():
    codes = random_codes(300, 320)  # ragged both ways: 3 x 3 blocks, the last of 44 rows and 2 groups
    blocks = torch.tensor([[0, 40, -40], [90, -90, 7], [-60, 60, 1]])
    exponents = blocks.repeat_interleave(128, 0)[:300].repeat_interleave(4, 1)[:, :10]
    exponents = exponents + torch.randint(-14, 1, exponents.shape, generator=torch.Generator().manual_seed(2))
    exponents[::128, ::4] = blocks
    codes[::128, ::128] = LARGEST
    assert torch.equal(assert_lossless(codes, exponents), torch.ldexp(torch.ones(3, 3), blocks - 6))


def test_widened_is_what_dequantised_is():
    codes = random_codes(256, 256)
    exponents = torch.randint(-12, 0, (256, 8), generator=torch.Generator().manual_seed(3))
    packed, scale = pack(codes), e8m0(exponents)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(dequantize_per_block(*widen_fp4(packed, scale), dtype), dequantize_fp4(packed, scale, dtype))


@pytest.mark.parametrize("top", [-127, -126, -120, -113, 0, 127])
def test_ends_of_the_scale_range(top):
    """The block's scale stays a normal fp32, whatever the groups' are."""
    codes = random_codes(128, 128)
    codes[0, 0] = LARGEST
    exponents = torch.full((128, 4), top)
    exponents[1::2] = max(top - 14, -127)
    assert assert_lossless(codes, exponents).item() == 2.0 ** max(top - 6, -126)


def test_groups_of_zeros_do_not_count():
    """Quantisers write any scale there."""
    codes = random_codes(128, 256)
    codes[5, 32:64] = 8  # -0
    codes[6, 64:96] = 0
    codes[:, 128:] = 0
    exponents = torch.zeros(128, 8, dtype=torch.int64)
    exponents[5, 1], exponents[6, 2] = -127, 127
    exponents[:, 4:] = -127
    q, scale = widen_fp4(pack(codes), e8m0(exponents))
    assert scale[0].tolist()[0] == 2.0**-6
    assert torch.equal(
        dequantize_per_block(q, scale)[:, :128].double(), weight(codes, exponents.where(exponents == 0, 0))[:, :128]
    )
    assert q[:, 128:].float().eq(0).all()


@pytest.mark.parametrize(("code", "spread"), [(SMALLEST, 14), (3, 14), (2, 15), (4, 16), (6, 17), (LARGEST, 16)])
def test_limit_of_the_spread(code, spread):
    """Exactly what e4m3 cannot hold is refused: 4 lies three steps further from its end than 0.5."""
    codes = torch.full((256, 256), LARGEST)
    codes[200, 160:192] = code
    exponents = torch.zeros(256, 8, dtype=torch.int64)
    exponents[200, 5] = -spread
    assert_lossless(codes, exponents)
    exponents[200, 5] -= 1
    message = (
        f"block [1, 1] of 128 x 128: its groups' scales go from 2^{-spread - 1} to 2^0, a spread of 2^{spread + 1}"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        widen_fp4(pack(codes), e8m0(exponents))


def test_widest_spread_is_refused():
    """Not even a value far below fp32's smallest passes for a zero."""
    codes = torch.full((128, 128), LARGEST)
    exponents = torch.full((128, 4), 127)
    exponents[3, 3] = -127
    with pytest.raises(ValueError, match=re.escape("block [0, 0]") + r".*from 2\^-127 to 2\^127, a spread of 2\^254"):
        widen_fp4(pack(codes), e8m0(exponents))


@pytest.mark.parametrize("function", [widen_fp4, dequantize_fp4])
@pytest.mark.parametrize(
    ("packed", "scale", "message"),
    [
        (
            (4, 24),
            (4, 2),
            "packed: must be a matrix of bytes [O, I / 2] with I a multiple of 32, got torch.int8 [4, 24]",
        ),
        ((64,), (4, 1), "packed: must be a matrix of bytes"),
        ((4, 32), (4, 1), "scale: must be float8_e8m0fnu [4, 2] for packed [4, 32], got torch.float8_e8m0fnu [4, 1]"),
        ((4, 32), (1, 2), "scale: must be float8_e8m0fnu [4, 2]"),
    ],
)
def test_shapes_that_do_not_fit(function, packed, scale, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        function(torch.zeros(packed, dtype=torch.int8), e8m0(torch.zeros(scale)))


def test_dtypes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"packed: must be a matrix of bytes .* got torch.int16 \[4, 32\]"):
        widen_fp4(torch.zeros(4, 32, dtype=torch.int16), e8m0(torch.zeros(4, 2)))
    with pytest.raises(ValueError, match=r"scale: must be float8_e8m0fnu .* got torch.float32 \[4, 2\]"):
        widen_fp4(torch.zeros(4, 32, dtype=torch.int8), torch.ones(4, 2))


def test_nan_scale():
    scale = e8m0(torch.zeros(4, 2))
    scale.view(torch.uint8)[2, 1] = 255
    with pytest.raises(ValueError, match=re.escape("scale[2, 1] is NaN")):
        widen_fp4(torch.zeros(4, 32, dtype=torch.int8), scale)


def test_quantises_to_the_nearest_values():
    """Of all that codes can say under the group's scale, which is the least that reaches its largest magnitude."""
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


def test_quantising_what_fp4_holds_is_exact():
    codes = random_codes(64, 128)
    codes[:, ::32] = LARGEST
    exponents = torch.randint(-120, 120, (64, 4), generator=torch.Generator().manual_seed(6))
    packed, scale = quantize_fp4(weight(codes, exponents).float())
    assert torch.equal(packed, pack(codes)) and torch.equal(scale.view(torch.uint8), e8m0(exponents).view(torch.uint8))


def test_quantising_halves_and_zeros():
    """Halfway between two values the smaller one; a group of zeros has the scale 1."""
    w = torch.zeros(1, 64)
    w[0, :8] = torch.tensor([0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5, 6])
    packed, scale = quantize_fp4(w)
    assert dequantize_fp4(packed, scale)[0, :8].tolist() == [0, 0.5, -1, 1.5, 2, -3, 4, 6]
    assert scale.float().tolist() == [[1, 1]] and dequantize_fp4(packed, scale)[0, 8:].eq(0).all()


@pytest.mark.parametrize("shape", [(4, 40), (32,), (2, 2, 32)])
def test_shapes_that_are_not_quantised(shape):
    message = f"weight: must be a matrix [O, I] with I a multiple of 32, got torch.float32 {list(shape)}"
    with pytest.raises(ValueError, match=re.escape(message)):
        quantize_fp4(torch.zeros(shape))
