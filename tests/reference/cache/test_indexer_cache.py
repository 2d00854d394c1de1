import struct

import pytest
import torch

from dsa.reference import read_indexer_cache, write_indexer_cache


def e4m3(*bytes_):
    return torch.tensor(bytes_, dtype=torch.uint8).view(torch.float8_e4m3fn)


def test_bytes_by_hand():
    # Two pages of 2 tokens of 2 numbers. e4m3: 1.0 is 0x38, -1.0 is 0xb8, 2.0 is 0x40, 448 is 0x7e.
    cache = torch.full((2, 2, 1, 6), 0xEE, dtype=torch.uint8)
    k = torch.tensor([[1.0, -1.0], [2.0, 448.0]]).to(torch.float8_e4m3fn)
    write_indexer_cache(k, torch.tensor([1.0, 0.3]), cache, torch.tensor([3, 2], dtype=torch.int32))
    assert cache[0].eq(0xEE).all()
    one, third = struct.pack("<f", 1.0), struct.pack("<f", 0.3)
    assert one == b"\x00\x00\x80\x3f"
    assert bytes(cache[1].flatten().tolist()) == bytes([0x40, 0x7E, 0x38, 0xB8]) + third + one


def test_scales_are_behind_all_values_of_the_page():
    page_size, d = 64, 128
    cache = torch.zeros(3, page_size, 1, d + 4, dtype=torch.uint8)
    raw = cache.view(3, -1)
    for token in range(page_size):
        raw[1, token * d : (token + 1) * d] = token
        raw[1, page_size * d + 4 * token : page_size * d + 4 * token + 4] = torch.tensor(
            list(struct.pack("<f", token + 0.1)), dtype=torch.uint8
        )
    slots = torch.tensor([64, 127, 100, -1, 192, 10**6])
    k, scale = read_indexer_cache(cache, slots)
    assert k.view(torch.uint8)[:, 0].tolist() == [0, 63, 36, 0, 0, 0]
    assert k.view(torch.uint8)[1].eq(63).all()
    torch.testing.assert_close(scale, torch.tensor([0.1, 63.1, 36.1, 0.0, 0.0, 0.0]), rtol=1e-7, atol=0)


def test_skipped_slots_and_page_stride():
    wide = torch.full((3, 100), 0x11, dtype=torch.uint8)
    cache = wide[:, : 4 * 20].unflatten(1, (4, 1, 20))  # D = 16, pages 100 bytes apart
    k = torch.randn(3, 16).to(torch.float8_e4m3fn)
    scale = torch.tensor([0.7, 1.3, 2.9])
    write_indexer_cache(k, scale, cache, torch.tensor([9, -1, 0]))
    assert wide[1].eq(0x11).all() and wide[:, 80:].eq(0x11).all()
    assert torch.equal(wide[2, 16:32], k[0].view(torch.uint8))
    assert bytes(wide[2, 68:72].tolist()) == struct.pack("<f", scale[0].item())
    got, got_scale = read_indexer_cache(cache, torch.tensor([0, 9]))
    assert torch.equal(got.view(torch.uint8), k[[2, 0]].view(torch.uint8)) and torch.equal(got_scale, scale[[2, 0]])


def test_nothing():
    cache = torch.zeros(0, 64, 1, 132, dtype=torch.uint8)
    write_indexer_cache(
        torch.zeros(0, 128).to(torch.float8_e4m3fn), torch.zeros(0), cache, torch.zeros(0, dtype=torch.long)
    )
    k, scale = read_indexer_cache(cache, torch.tensor([0, -1]))
    assert k.float().eq(0).all() and scale.tolist() == [0.0, 0.0]


def test_refuses_bad_arguments():
    cache = torch.zeros(2, 4, 1, 20, dtype=torch.uint8)
    k, scale = torch.zeros(1, 16).to(torch.float8_e4m3fn), torch.ones(1)
    for slot in (8, -2):
        with pytest.raises(ValueError, match=rf"slots: must be -1 or in \[0, 8\), got {slot}"):
            write_indexer_cache(k, scale, cache, torch.tensor([slot]))
    with pytest.raises(ValueError, match=r"k: shape must be \[T, 32\], got \[1, 16\] \(sizes as of cache\)"):
        write_indexer_cache(k, scale, torch.zeros(2, 4, 1, 36, dtype=torch.uint8), torch.tensor([0]))
    with pytest.raises(ValueError, match="cache: every page must be contiguous"):
        read_indexer_cache(torch.zeros(2, 5, 1, 40, dtype=torch.uint8)[..., :20], torch.tensor([0]))
    for shape in ((2, 4, 1, 4), (2, 0, 1, 20)):
        with pytest.raises(ValueError, match=r"cache: shape must be \[pages, P >= 1, 1, D \+ 4 >= 5\], got"):
            read_indexer_cache(torch.zeros(shape, dtype=torch.uint8), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"cache: must have D \+ 4 entries, got shape \[2, 4, 1, 3\]"):
        read_indexer_cache(torch.zeros(2, 4, 1, 3, dtype=torch.uint8), torch.tensor([0]))
    with pytest.raises(ValueError, match="k: dtype must be float8_e4m3fn, got float32"):
        write_indexer_cache(k.float(), scale, cache, torch.tensor([0]))
    with pytest.raises(ValueError, match="slots: dtype must be int32 or int64, got float32"):
        read_indexer_cache(cache, torch.tensor([0.0]))
