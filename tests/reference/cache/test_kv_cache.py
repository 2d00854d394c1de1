"""The reference of the MLA cache: expected bytes by hand, extreme scales, strides, roundings, and NaN."""

import struct

import pytest
import torch

from dsa.reference import make_v4_cache, read_kv_cache, write_kv_cache
from tests.reference.common import BF16, BYTE, E4M3, F16, F32, NAN, zeros

FIRST = torch.tensor([0])


def bf16_bytes(x):
    """Return the bytes of x in bf16, which are the upper half of the bytes in fp32. x must be exact in bf16."""
    return struct.pack("<f", x)[2:]


def latent(d, **values):
    kv = zeros(1, d)
    for channel, value in values.items():
        kv[0, int(channel[1:])] = value
    return kv


def bytes_of(size, parts):
    expected = bytearray(size)
    for at, part in parts.items():
        expected[at : at + len(part)] = part
    return list(expected)


def test_v32_bytes_by_hand():
    cache = torch.full((2, 2, 1, 656), 0xEE, dtype=BYTE)
    kv = latent(576, c0=448.0, c1=1.0, c127=-2.0, c128=900.0, c129=1.0, c384=0.0, c512=1.0, c575=-0.5)
    write_kv_cache(kv, cache, torch.tensor([2]))
    assert cache[0].eq(0xEE).all() and cache[1, 1].eq(0xEE).all()
    # The first group has scale 1: values 448, 1, -2. The second has scale 4: values 900 / 4 = 225, which rounds to 224,
    # and 1 / 4. The other two groups are zeros, so their scale is the lower limit 2^-22.
    parts = {0: b"\x7e\x38", 127: b"\xc0", 128: b"\x76\x28", 528: bf16_bytes(1.0), 654: bf16_bytes(-0.5)}
    parts[512] = struct.pack("<4f", 1.0, 4.0, 2.0**-22, 2.0**-22)
    assert cache[1, 0, 0].tolist() == bytes_of(656, parts)


def test_v32_exact_scales_by_hand():
    cache = zeros(1, 1, 1, 656, dtype=BYTE)
    write_kv_cache(latent(576, c0=3.0, c1=1.5, c511=-448.0), cache, FIRST.int(), False)
    scales = struct.unpack("<4f", bytes(cache[0, 0, 0, 512:528].tolist()))
    assert scales == pytest.approx((3 / 448, 1e-4 / 448, 1e-4 / 448, 1.0), rel=1e-6)
    assert cache[0, 0, 0, [0, 1, 511]].tolist() == [0x7E, 0x76, 0xFE]  # 448, 224, -448


def test_v4_bytes_by_hand():
    """Pages of 2 tokens: 2 rows of 576 bytes, then 2 x 8 scale bytes."""
    cache = torch.full((2, 2, 1, 584), 0xEE, dtype=BYTE)
    kv = latent(512, c0=448.0, c63=1.0, c64=900.0, c447=-3.5, c448=1.0, c511=-0.5)
    write_kv_cache(kv, cache, torch.tensor([3]))
    page = cache[1].flatten()
    assert cache[0].eq(0xEE).all() and page[:576].eq(0xEE).all() and page[1152:1160].eq(0xEE).all()
    # e4m3 values: 448 and 1 (scale 1); 225, which rounds to 224 (scale 4); -448 (scale 2^-7).
    parts = {0: b"\x7e", 63: b"\x38\x76", 447: b"\xfe", 448: bf16_bytes(1.0), 574: bf16_bytes(-0.5)}
    assert page[576:1152].tolist() == bytes_of(576, parts)
    # Scales: 1, 4, the lower limit 2^-22 four times, and 3.5 / 448 = 2^-7 for the last group; the pad byte is 0.
    assert page[1160:].tolist() == [127, 129, 105, 105, 105, 105, 120, 0]


def test_extreme_ue8m0_scales():
    cache = make_v4_cache(1, 1)
    cache.view(-1)[:448] = 0x38
    cache.view(-1)[576:583] = torch.tensor([0, 1, 126, 127, 128, 254, 255], dtype=BYTE)
    got = read_kv_cache(cache, FIRST)[0, :448:64]
    assert got[:6].tolist() == [2.0**-127, 2.0**-126, 0.5, 1.0, 2.0, 2.0**127] and got[6].isnan()


@pytest.mark.parametrize("dtype", [BYTE, torch.int8, E4M3])
def test_v4_pages_may_have_a_stride_and_three_dtypes(dtype):
    kv, slots = torch.randn(5, 512), torch.tensor([11, 0, -1, 5, 6])
    cache, plain = make_v4_cache(3, 4).view(dtype), zeros(3, 4, 1, 584, dtype=BYTE)
    buffer = torch.as_strided(cache.view(BYTE), (3, cache.stride(0)), (cache.stride(0), 1))
    buffer[:, 4 * 584 :] = 0xAB
    for target in (cache, plain):
        write_kv_cache(kv, target, slots)
    assert buffer[:, 4 * 584 :].eq(0xAB).all() and torch.equal(plain.view(3, -1), buffer[:, : 4 * 584])
    assert torch.equal(read_kv_cache(cache, slots), read_kv_cache(plain, slots))


EXACT = 1 + 2.0**-8 + 2.0**-20


@pytest.mark.parametrize(("dtype", "expected"), [(F32, EXACT), (F16, 1 + 2.0**-8), (BF16, 1 + 2.0**-7)])
def test_reads_are_rounded_once(dtype, expected):
    """In bf16, 1 + 2^-8 + 2^-20 rounds up. If it were rounded to fp16 first, it would be a tie in bf16 and round
    down."""
    cache = zeros(1, 1, 1, 656, dtype=BYTE)
    cache[0, 0, 0, 0], cache[0, 0, 0, 512:516] = 0x38, torch.tensor([EXACT]).view(BYTE)
    got = read_kv_cache(cache, torch.tensor([[0, -1]]), dtype=dtype)
    assert got.dtype == dtype and got.shape == (1, 2, 576)
    assert got[0, 0, 0].item() == expected and got.count_nonzero() == 1


@pytest.mark.parametrize(("width", "dtype", "nan"), [(656, BYTE, 0x7F), (584, BYTE, 0x7F), (8, F32, NAN)])
def test_nan_does_not_reach_slots_outside_the_cache(width, dtype, nan):
    cache = torch.full((2, 2, 1, width), nan, dtype=dtype)
    assert read_kv_cache(cache, torch.tensor([-1, 4, -(2**31), 2**31 - 1])).eq(0).all()
    assert read_kv_cache(cache, torch.tensor([3])).isnan().any()
    assert read_kv_cache(cache[:0], torch.tensor([0, -1])).eq(0).all()


def test_nan_stays_in_its_group():
    cache = make_v4_cache(1, 1)
    write_kv_cache(latent(512, c70=NAN, c0=1.0, c500=2.0), cache, FIRST)
    got = read_kv_cache(cache, FIRST)[0]
    assert got[64:128].isnan().all() and got.isnan().sum() == 64 and got[0] == 1.0 and got[500] == 2.0
