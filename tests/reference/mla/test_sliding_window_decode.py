"""Decoding over a window against float64: pages and rings, floats and bytes."""

import math

import pytest
import torch

from dsa.reference import sliding_window_decode
from dsa.reference.cache import kv_cache
from tests.reference.common import assert_refused, i32
from tests.reference.mla.attention_oracle import assert_near, attend_rows

INF = math.inf
LENGTHS = [0, 1, 2, 7, 20, 23]
PAGE = 6


def empty_cache(d, pages, page, width=None):
    """Of NaN."""
    if width == 584:
        return kv_cache.make_v4_cache(pages, page).fill_(0xFF)
    if width:
        return torch.full((pages, page, 1, width), 0xFF, dtype=torch.uint8)
    return torch.full((pages, page, 1, d), math.nan)


def cached(d, s_q, window, ring=False, width=None):
    """A cache with nothing but what the windows hold, its table, and each query's keys."""
    page = window + s_q if ring else PAGE
    table = None if ring else torch.randperm(40)[: 4 * len(LENGTHS)].view(-1, 4).int()
    cache, keys = empty_cache(d, 41, page, width), []
    for b, length in enumerate(LENGTHS):
        at = [s for s in range(length) if s > length - s_q - window]
        pages = [b if ring else int(table[b, s // page]) for s in at]
        slots = torch.tensor([p * page + s % page for p, s in zip(pages, at)], dtype=torch.int64)
        kv_cache.write_kv_cache(torch.randn(len(at), d), cache, slots)
        rows = dict(zip(at, kv_cache.read_kv_cache(cache, slots)))
        for i in range(s_q):
            p = length - s_q + i
            seen = [rows[s] for s in range(max(0, p - window + 1), p + 1)]
            keys.append(torch.stack(seen) if seen else torch.zeros(0, d))
    return cache, table, keys


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("s_q", [1, 3])
@pytest.mark.parametrize("window", [1, 4, 11, 100])
@pytest.mark.parametrize("ring", [False, True])
def test_against_float64(ring, window, s_q, with_sink):
    cache, table, keys = cached(24, s_q, window, ring)
    q = torch.randn(len(LENGTHS), s_q, 3, 24)
    sink = torch.tensor([INF, -INF, 0.4]) if with_sink else None
    out, lse = sliding_window_decode(q, cache, table, i32(LENGTHS), window, 0.3, 16, sink)
    expected, expected_lse, _ = attend_rows(q.flatten(0, 1), keys, 0.3, 16, sink)
    assert_near(out.flatten(0, 1), expected)
    assert_near(lse.transpose(1, 2).flatten(0, 1), expected_lse)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(("d", "width"), [(576, 656), (512, 584)])
def test_byte_caches(d, width, ring):
    cache, table, keys = cached(d, 2, 5, ring, width)
    q = torch.randn(len(LENGTHS), 2, 3, d).bfloat16() / 4
    out, lse = sliding_window_decode(q, cache, table, i32(LENGTHS), 5, d**-0.5, is_fp8_kvcache=True)
    expected, expected_lse, _ = attend_rows(q.flatten(0, 1), keys, d**-0.5, 512)
    assert out.dtype == torch.bfloat16
    assert_near(out.flatten(0, 1), expected, 2e-2)
    assert_near(lse.transpose(1, 2).flatten(0, 1), expected_lse)


def test_a_page_that_is_not_there_holds_no_keys():
    cache, table, keys = cached(24, 1, 100)
    table[4, 1] = 41
    out, _ = sliding_window_decode(torch.zeros(6, 1, 1, 24), cache, table, i32(LENGTHS), 100, 1.0, 8)
    left = torch.cat((keys[4][:PAGE], keys[4][2 * PAGE :]))
    assert_near(out[4, 0, 0], left[:, :8].mean(0))


CACHE, TABLE, COUNTS = torch.zeros(41, 6, 1, 24), torch.zeros(6, 4, dtype=torch.int32), i32(LENGTHS)
HUGE = torch.zeros(1, 1, 1, 24).expand(2**26, 33, 1, 24)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(1, 3, 24)}, r"q: shape must be \[B, s_q, H, d\], got \[1, 3, 24\]"),
        ({"cache": CACHE[..., :16]}, "cache: a last dimension of 16 means d = 16, but q has d = 24"),
        ({"cache": CACHE.squeeze(2)}, r"cache: shape must be \[pages, P, 1, row\], got \[41, 6, 24\]"),
        ({"is_fp8_kvcache": True}, "cache: dtype must be uint8, int8 or float8_e4m3fn with is_fp8_kvcache=True, got"),
        ({"cache": HUGE}, r"cache: must have at most 2\^31 slots, got 67108864 pages of 33"),
        ({"block_table": TABLE[:5]}, r"block_table: shape must be \[6, max_pages\], got \[5, 4\]"),
        ({"cache_seqlens": COUNTS[:5]}, r"cache_seqlens: shape must be \[6\], got \[5\]"),
        ({"window": 0}, "window: must be at least 1, got 0"),
        ({"block_table": None, "window": 7}, r"cache: .* at least window \+ s_q - 1 = 7 keys .* got 41 pages of 6"),
        ({"block_table": None, "cache": CACHE[:5]}, "cache: .* for each of 6 sequences .*, got 5 pages of 6"),
        ({"d_v": 512}, "d_v: must be at most d = 24, got 512"),
        ({"attn_sink": torch.zeros(4)}, r"attn_sink: shape must be \[3\], got \[4\]"),
        ({"softmax_scale": None}, "softmax_scale: must be a number, got NoneType"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    good = {"q": torch.zeros(6, 1, 3, 24), "cache": CACHE, "block_table": TABLE, "cache_seqlens": COUNTS}
    good |= {"window": 4, "softmax_scale": 0.3, "d_v": 16}
    assert_refused(message, sliding_window_decode, **good | changes)
