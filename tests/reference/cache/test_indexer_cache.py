"""The reference of the cache of index keys: expected bytes by hand, invalid slots, and pages that are not adjacent."""

import struct

import torch

from dsa.reference import read_indexer_cache, write_indexer_cache
from tests.reference.common import BYTE, E4M3, assert_same_bits, i32


def test_bytes_by_hand():
    """In e4m3, 1.0 is 0x38, -1.0 is 0xb8, 2.0 is 0x40, 448 is 0x7e."""
    cache = torch.full((2, 2, 1, 6), 0xEE, dtype=BYTE)
    k = torch.tensor([[1.0, -1.0], [2.0, 448.0]]).to(E4M3)
    write_indexer_cache(k, torch.tensor([1.0, 0.3]), cache, i32([3, 2]))
    assert cache[0].eq(0xEE).all()
    scales = struct.pack("<2f", 0.3, 1.0)
    assert bytes(cache[1].flatten().tolist()) == bytes([0x40, 0x7E, 0x38, 0xB8]) + scales


def test_skipped_slots_and_page_stride():
    wide = torch.full((3, 100), 0x11, dtype=BYTE)
    cache = wide[:, : 4 * 20].unflatten(1, (4, 1, 20))  # D = 16, pages 100 bytes apart
    k, scale = torch.randn(3, 16).to(E4M3), torch.tensor([0.7, 1.3, 2.9])
    write_indexer_cache(k, scale, cache, torch.tensor([9, -1, 0]))
    assert wide[1].eq(0x11).all() and wide[:, 80:].eq(0x11).all()
    assert torch.equal(wide[2, 16:32], k[0].view(BYTE))
    assert bytes(wide[2, 68:72].tolist()) == struct.pack("<f", scale[0].item())
    assert_same_bits(read_indexer_cache(cache, torch.tensor([0, 9])), (k.view(BYTE)[[2, 0]].view(E4M3), scale[[2, 0]]))
