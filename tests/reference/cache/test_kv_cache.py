import math
import struct

import pytest
import torch

from dsa.reference import make_v4_cache, read_kv_cache, write_kv_cache
from tests.reference.common import assert_refused
from tests.reference.gemm import e4m3


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


def test_v32_reads_scales_in_full_precision():
    cache = torch.zeros(1, 2, 1, 656, dtype=torch.uint8)
    row = cache[0, 1, 0]
    row[[0, 130, 300, 511]] = torch.tensor([0x38, 0xB8, 0x39, 0x01], dtype=torch.uint8)  # 1, -1, 1.125, 2^-9
    scales = [1.0 + 2.0**-20, 0.3, math.pi, 1e-5]
    row[512:528] = torch.tensor(list(struct.pack("<4f", *scales)), dtype=torch.uint8)
    row[528 + 2 * 63 : 528 + 2 * 64] = torch.tensor(list(bf16_bytes(-1.25)), dtype=torch.uint8)
    got = read_kv_cache(cache, torch.tensor([1]))[0]
    assert got.dtype == torch.float32 and got.shape == (576,)
    f32 = torch.tensor(scales)
    expected = [f32[0], -f32[1], 1.125 * f32[2], 2.0**-9 * f32[3], torch.tensor(-1.25)]
    assert got[[0, 130, 300, 511, 575]].tolist() == torch.stack(expected).tolist()
    assert got.count_nonzero() == 5


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


def test_v4_reads_every_token_of_a_page():
    n = 64
    cache = make_v4_cache(2, n)
    page = torch.as_strided(cache, (n * 584,), (1,), cache.stride(0))
    rows, scales, tokens = page[: n * 576].view(n, 576), page[n * 576 :].view(n, 8), torch.arange(n)
    rows[:, :448], rows[:, 448:450] = 0x38, tokens.bfloat16().view(torch.uint8).view(n, 2)
    scales[:, :7], scales[:, 7] = 127 + tokens[:, None] % 5, 0xFF
    got = read_kv_cache(cache, tokens + n)
    assert torch.equal(got[:, :448], (2.0 ** (tokens % 5))[:, None].expand(n, 448))
    assert torch.equal(got[:, 448], tokens.float()) and got[:, 449:].eq(0).all()


def test_ue8m0_extremes():
    cache = make_v4_cache(1, 1)
    cache.view(-1)[:448] = 0x38
    cache.view(-1)[576:583] = torch.tensor([0, 1, 126, 127, 128, 254, 255], dtype=torch.uint8)
    got = read_kv_cache(cache, torch.tensor([0]))[0, :448:64].tolist()
    assert got[:6] == [2.0**-127, 2.0**-126, 0.5, 1.0, 2.0, 2.0**127] and math.isnan(got[6])


@pytest.mark.parametrize(("page_size", "stride"), [(64, 37440), (2, 1728), (72, 42048), (1, 1152), (256, 149760)])
def test_v4_pages_are_padded_to_multiples_of_576(page_size, stride):
    cache = make_v4_cache(3, page_size)
    assert cache.shape == (3, page_size, 1, 584) and cache.stride() == (stride, 584, 584, 1)
    assert cache.dtype == torch.uint8 and cache.eq(0).all()


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


@pytest.mark.parametrize(("d", "width", "nope", "group"), [(576, 656, 512, 128), (512, 584, 448, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_against_an_exhaustive_search(d, width, nope, group, dtype):
    kv = (torch.randn(3, d) * torch.tensor([[1e-3], [1.0], [100.0]])).to(dtype)
    cache = torch.zeros(2, 3, 1, width, dtype=torch.uint8)
    write_kv_cache(kv, cache, torch.tensor([4, 0, 2]))
    got = read_kv_cache(cache, torch.tensor([4, 0, 2]))
    for t in range(3):
        for first in range(0, nope, group):
            x = kv[t, first : first + group].float().tolist()
            scale = 2.0 ** math.ceil(math.log2(max(max(map(abs, x)), 1e-4) / 448))
            assert got[t, first : first + group].tolist() == [e4m3.encode_value(v / scale) * scale for v in x]
    assert torch.equal(got[:, nope:], kv[:, nope:].bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_float_caches(dtype):
    cache = torch.full((2, 3, 1, 8), math.nan, dtype=dtype)
    kv = torch.randn(3, 8)
    write_kv_cache(kv, cache, torch.tensor([5, -1, 1]))
    assert torch.equal(cache[1, 2, 0], kv[0].to(dtype)) and torch.equal(cache[0, 1, 0], kv[2].to(dtype))
    assert cache.isnan().sum() == 4 * 8
    got = read_kv_cache(cache, torch.tensor([[1, -1], [6, 5]]))
    zero = torch.zeros(8)
    assert torch.equal(got, torch.stack([kv[2].to(dtype).float(), zero, zero, kv[0].to(dtype).float()]).view(2, 2, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
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
def test_slots_outside_the_cache_read_as_zeros(width):
    dtype = torch.float32 if width == 8 else torch.uint8
    cache = torch.full((2, 2, 1, width), math.nan if width == 8 else 0x7F, dtype=dtype)
    got = read_kv_cache(cache, torch.tensor([-1, 4, -(2**31), 2**31 - 1]))
    assert got.eq(0).all() and len(got) == 4
    assert read_kv_cache(cache, torch.tensor([3])).isnan().any()
    assert read_kv_cache(cache[:0], torch.tensor([0, -1])).eq(0).all()
    assert read_kv_cache(cache, torch.tensor([], dtype=torch.int32)).shape[0] == 0


def test_nan_in_a_group_makes_it_nan_only():
    cache = make_v4_cache(1, 1)
    write_kv_cache(latent(512, c70=math.nan, c0=1.0, c500=2.0), cache, torch.tensor([0]))
    got = read_kv_cache(cache, torch.tensor([0]))[0]
    assert got[64:128].isnan().all() and got.isnan().sum() == 64 and got[0] == 1.0 and got[500] == 2.0


V32, V4, FIRST = torch.zeros(1, 2, 1, 656, dtype=torch.uint8), make_v4_cache(1, 2), torch.tensor([0])


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (write_kv_cache, (torch.zeros(1, 576), V32, torch.tensor([2])), r"slots: must be -1 or in \[0, 2\), got 2"),
        (write_kv_cache, (torch.zeros(1, 576), V32, torch.tensor([-2])), r"slots: must be -1 or in \[0, 2\), got -2"),
        (write_kv_cache, (torch.zeros(1, 512), V32, FIRST), r"kv: shape must be \[T, 576\], got \[1, 512\]"),
        (write_kv_cache, (torch.zeros(1, 576), V4, FIRST), r"kv: shape must be \[T, 512\], got \[1, 576\]"),
        (write_kv_cache, (torch.zeros(1, 512), V4, FIRST, False), "use_ue8m0: must be True for the V4 layout"),
        (read_kv_cache, (V32[..., :576], FIRST), "cache: the last dimension of a byte cache must be 656 .* got 576"),
        (read_kv_cache, (V32[:, :, 0], FIRST), r"cache: shape must be \[pages, P, 1, d\], got \[1, 2, 656\]"),
        (read_kv_cache, (V32.int(), FIRST), "cache: dtype must be .* got int32"),
        (read_kv_cache, (V32[..., :584], FIRST), "cache: every page of a V4 cache must be contiguous"),
        (read_kv_cache, (V32, [0]), "slots: must be a torch.Tensor, got list"),
        (make_v4_cache, (1, 0), "page_size: must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(function, arguments, message):
    assert_refused(message, function, *arguments)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.float64, "dtype: must be float32, bfloat16 or float16, got float64"),
        ("float16", r"dtype: must be a torch\.dtype, got str"),
    ],
)
def test_wrong_dtypes_are_named(dtype, message):
    assert_refused(message, read_kv_cache, V32, FIRST, dtype=dtype)
