"""The MLA cache: bytes by hand, extremes, dtypes and strides, wrong arguments."""

import math
import struct

import pytest
import torch

from dsa.cases import cases_of
from dsa.reference import make_v4_cache, read_kv_cache, write_kv_cache

WRITE, READ = (next(x for x in cases_of("kv_cache") if x.op == op) for op in ("write_kv_cache", "read_kv_cache"))
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", ["float32", "bfloat16", "float16", "v32", "v4"])
def test_against_float64(layout, dtype):
    kind = {"layout": layout, "dtype": dtype, "pages": 4, "page_size": 7}
    for use_ue8m0 in (True, False) if layout == "v32" else (True,):
        WRITE.verify(tokens=20, use_ue8m0=use_ue8m0, **kind)
    READ.verify(shape=(2, 9), slot_dtype=torch.int32, **kind)


def bf16_bytes(x):
    """A bf16 is the upper half of an fp32; x must be exact in it."""
    return struct.pack("<f", x)[2:]


def latent(d, **values):
    kv = torch.zeros(1, d)
    for channel, value in values.items():
        kv[0, int(channel[1:])] = value
    return kv


def test_v32_bytes_by_hand():
    cache = torch.full((2, 2, 1, 656), 0xEE, dtype=torch.uint8)
    kv = latent(576, c0=448.0, c1=1.0, c127=-2.0, c128=900.0, c129=1.0, c384=0.0, c512=1.0, c575=-0.5)
    write_kv_cache(kv, cache, torch.tensor([2]))
    assert cache[0].eq(0xEE).all() and cache[1, 1].eq(0xEE).all()
    expected = bytearray(656)
    expected[0], expected[1], expected[127] = 0x7E, 0x38, 0xC0  # 448, 1, -2 at scale 1
    expected[128], expected[129] = 0x76, 0x28  # 900 / 4 = 225 -> 224, 1 / 4
    expected[512:528] = struct.pack("<4f", 1.0, 4.0, 2.0**-22, 2.0**-22)
    expected[528:530], expected[654:656] = bf16_bytes(1.0), bf16_bytes(-0.5)
    assert bytes(cache[1, 0, 0].tolist()) == bytes(expected)


def test_v32_exact_scales_by_hand():
    cache = torch.zeros(1, 1, 1, 656, dtype=torch.uint8)
    write_kv_cache(latent(576, c0=3.0, c1=1.5, c511=-448.0), cache, torch.tensor([0], dtype=torch.int32), False)
    scales = struct.unpack("<4f", bytes(cache[0, 0, 0, 512:528].tolist()))
    assert scales == pytest.approx((3 / 448, 1e-4 / 448, 1e-4 / 448, 1.0), rel=1e-6)
    assert cache[0, 0, 0, [0, 1, 511]].tolist() == [0x7E, 0x76, 0xFE]  # 448, 224, -448


def test_v4_bytes_by_hand():
    # Pages of 2 tokens: 2 rows of 576 bytes, then 2 x 8 scale bytes.
    cache = torch.full((2, 2, 1, 584), 0xEE, dtype=torch.uint8)
    kv = latent(512, c0=448.0, c63=1.0, c64=900.0, c447=-3.5, c448=1.0, c511=-0.5)
    write_kv_cache(kv, cache, torch.tensor([3]))
    assert cache[0].eq(0xEE).all()
    page = bytes(cache[1].flatten().tolist())
    assert set(page[:576]) == {0xEE} and set(page[1152:1160]) == {0xEE}
    row = bytearray(576)
    row[0], row[63], row[64], row[447] = 0x7E, 0x38, 0x76, 0xFE  # 448, 1, 225 -> 224, -448
    row[448:450], row[574:576] = bf16_bytes(1.0), bf16_bytes(-0.5)
    assert page[576:1152] == bytes(row)
    # 1, 4, five floors of 2^-22 but the last group's 3.5 / 448 = 2^-7; the pad is 0
    assert list(page[1160:]) == [127, 129, 105, 105, 105, 105, 120, 0]


def test_ue8m0_extremes():
    cache = make_v4_cache(1, 1)
    cache.view(-1)[:448] = 0x38
    cache.view(-1)[576:583] = torch.tensor([0, 1, 126, 127, 128, 254, 255], dtype=torch.uint8)
    got = read_kv_cache(cache, torch.tensor([0]))[0, :448:64].tolist()
    assert got[:6] == [2.0**-127, 2.0**-126, 0.5, 1.0, 2.0, 2.0**127] and math.isnan(got[6])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_v4_strided_pages_and_byte_dtypes(dtype):
    kv = torch.randn(5, 512)
    cache = make_v4_cache(3, 4).view(dtype)
    buffer = torch.as_strided(cache.view(torch.uint8), (3, cache.stride(0)), (cache.stride(0), 1))
    buffer[:, 4 * 584 :] = 0xAB
    slots = torch.tensor([11, 0, -1, 5, 6])
    write_kv_cache(kv, cache, slots)
    assert buffer[:, 4 * 584 :].eq(0xAB).all()
    plain = torch.zeros(3, 4, 1, 584, dtype=torch.uint8)
    write_kv_cache(kv, plain, slots)
    assert torch.equal(plain.view(3, -1), buffer[:, : 4 * 584])
    assert torch.equal(read_kv_cache(cache, slots), read_kv_cache(plain, slots))


@pytest.mark.parametrize("dtype", FLOATS)
def test_reads_are_rounded_once(dtype):
    cache = torch.zeros(1, 1, 1, 656, dtype=torch.uint8)
    # 1 + 2^-8 + 2^-20: to nearest it is up in bf16; through fp16 it would be a tie, and down.
    cache[0, 0, 0, 0] = 0x38
    cache[0, 0, 0, 512:516] = torch.tensor(list(struct.pack("<f", 1 + 2.0**-8 + 2.0**-20)), dtype=torch.uint8)
    got = read_kv_cache(cache, torch.tensor([[0, -1]]), dtype=dtype)
    assert got.dtype == dtype and got.shape == (1, 2, 576)
    expected = {torch.float32: 1 + 2.0**-8 + 2.0**-20, torch.float16: 1 + 2.0**-8, torch.bfloat16: 1 + 2.0**-7}
    assert got[0, 0, 0].item() == expected[dtype] and got.count_nonzero() == 1


@pytest.mark.parametrize("width", [656, 584, 8])
def test_nan_does_not_reach_slots_outside_the_cache(width):
    dtype = torch.float32 if width == 8 else torch.uint8
    cache = torch.full((2, 2, 1, width), math.nan if width == 8 else 0x7F, dtype=dtype)
    assert read_kv_cache(cache, torch.tensor([-1, 4, -(2**31), 2**31 - 1])).eq(0).all()
    assert read_kv_cache(cache, torch.tensor([3])).isnan().any()
    assert read_kv_cache(cache[:0], torch.tensor([0, -1])).eq(0).all()


def test_nan_in_a_group_makes_it_nan_only():
    cache = make_v4_cache(1, 1)
    write_kv_cache(latent(512, c70=math.nan, c0=1.0, c500=2.0), cache, torch.tensor([0]))
    got = read_kv_cache(cache, torch.tensor([0]))[0]
    assert got[64:128].isnan().all() and got.isnan().sum() == 64 and got[0] == 1.0 and got[500] == 2.0
