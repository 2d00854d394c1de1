"""The cache of index keys: bytes by hand, pages apart, wrong arguments."""

import struct

import torch

from dsa.reference import read_indexer_cache, write_indexer_cache


def test_bytes_by_hand():
    # Two pages of 2 tokens of 2 numbers. e4m3: 1.0 is 0x38, -1.0 is 0xb8, 2.0 is 0x40, 448 is 0x7e.
    cache = torch.full((2, 2, 1, 6), 0xEE, dtype=torch.uint8)
    k = torch.tensor([[1.0, -1.0], [2.0, 448.0]]).to(torch.float8_e4m3fn)
    write_indexer_cache(k, torch.tensor([1.0, 0.3]), cache, torch.tensor([3, 2], dtype=torch.int32))
    assert cache[0].eq(0xEE).all()
    scales = struct.pack("<2f", 0.3, 1.0)
    assert bytes(cache[1].flatten().tolist()) == bytes([0x40, 0x7E, 0x38, 0xB8]) + scales


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
