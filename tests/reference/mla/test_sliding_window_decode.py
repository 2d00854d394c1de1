"""The reference of decoding over a window: pages and rings, floats and bytes, and arguments that are refused."""

import pytest
import torch

import dsa
from dsa.cases import CASES
from dsa.reference import sliding_window_decode
from tests.reference.common import assert_refused, i32

CASE = next(case for case in CASES if case.name == "sliding_window_decode")
LENGTHS = (0, 1, 2, 7, 20, 23)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("s_q", [1, 3])
@pytest.mark.parametrize("window", [1, 4, 11, 100])
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("layout", ["bf16, 576", "656 bytes", "584 bytes"])
def test_pages_and_rings_are_right_for_fp32_queries(layout, ring, window, s_q, sink):
    sizes = {"lengths": LENGTHS, "s_q": s_q, "heads": 3, "window": window, "page": window + s_q if ring else 6}
    given = CASE.arguments(**sizes, layout=layout, ring=ring, sink=sink)
    given["q"] = given["q"].float()
    CASE.check(given, sliding_window_decode(**given))


def test_a_page_that_is_not_there_holds_no_keys():
    given = CASE.arguments(layout="bf16, 576", lengths=LENGTHS, s_q=1, heads=3, window=100, page=6)
    given["block_table"][4, 1] = len(given["cache"])
    CASE.check(given, CASE.run(given))


CACHE, TABLE, COUNTS = torch.zeros(41, 6, 1, 24), torch.zeros(6, 4, dtype=torch.int32), i32(LENGTHS)
HUGE = torch.zeros(1, 1, 1, 24).expand(2**26, 33, 1, 24)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(1, 3, 24)}, r"q: shape must be \[B, s_q, H, d\], got \[1, 3, 24\]"),
        ({"cache": CACHE[..., :16]}, "cache: a last dimension of 16 means d = 16, but q has d = 24"),
        ({"cache": CACHE.squeeze(2)}, r"cache: shape must be \[pages, P, 1, row\], got \[41, 6, 24\]"),
        ({"is_fp8_kvcache": True}, "cache: dtype must be uint8, int8 or float8_e4m3fn with is_fp8_kvcache=True, got"),
        ({"cache": HUGE}, r"cache: pages \* P must be at most 2147483648, got 2214592512"),
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
    assert_refused(message, dsa.sliding_window_decode, **good | changes)
