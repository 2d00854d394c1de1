"""The references of attention to windows: fp32, NaN, lists, nothing to attend to, and arguments that are refused."""

import math

import pytest
import torch

import dsa
from dsa.cases import CASES
from dsa.cases.mla_windows import attend_windows
from dsa.reference import sliding_window_attention, window_indices, window_sparse_attention
from tests.reference.common import assert_refused, i32

BY_NAME = {case.name: case for case in CASES}
CASE, JOINED = BY_NAME["sliding_window_attention"], BY_NAME["window_sparse_attention"]
INF, NAN = math.inf, math.nan
# The last sequence has 2 queries and 1 key.
SMALL = {"sequences": ((3, 3), (0, 2), (1, 7), (6, 18), (2, 1)), "heads": 4, "d": 24, "dtype": torch.float32}


@pytest.mark.parametrize("window", [1, 2, 5, 128])
@pytest.mark.parametrize("sink", [False, True])
def test_windows_are_right_in_fp32(window, sink):
    CASE.verify(**SMALL, d_v=16, window=window, sink=sink)
    for counted in (False, True):
        JOINED.verify(**SMALL, d_v=16, window=window, sink=sink, entries=7, top_k=6, invalid=0.3, counted=counted)


def test_nan_stays_in_its_windows():
    given = CASE.arguments(**SMALL, d_v=16, window=3)
    given["kv"][26] = NAN  # the key before the sixth sequence's last three
    out, _ = sliding_window_attention(**given)
    lists = window_indices(given["cu_seqlens_q"], given["cu_seqlens_k"], len(given["q"]), 3)
    touched = (lists == 26).any(1)
    assert touched.sum() == 3 and torch.equal(out.isnan().flatten(1).any(1), touched)


def test_queries_of_no_sequence_and_empty_inputs():
    q, kv = torch.randn(5, 2, 8), torch.randn(4, 1, 8)
    out, lse = sliding_window_attention(q, kv, i32([1, 3]), i32([0, 4]), 2, 1.0, 8, torch.zeros(2))
    assert out[[0, 3, 4]].eq(0).all() and lse[[0, 3, 4]].eq(INF).all() and lse[1:3].isfinite().all()
    out, lse = sliding_window_attention(q, kv[:0], i32([0, 5]), i32([0, 0]), 2, 1.0, 8)
    assert out.eq(0).all() and lse.eq(INF).all()
    out, lse = sliding_window_attention(q[:0], kv, i32([0, 0]), i32([0, 4]), 2, 1.0, 8)
    assert out.shape == (0, 2, 8) and lse.shape == (0, 2)


def test_a_list_stands_for_the_window():
    packed = tuple(CASE.arguments(**SMALL).values())[:4]
    for window in (3, 40):
        expected = sliding_window_attention(*packed, window, 0.3, 16)
        got = sliding_window_attention(*packed, window, 0.3, 16, indices=window_indices(*packed[2:], 14, window))
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_window_and_selected_are_kept_apart():
    """A list that points beyond the window's keys selects nothing, and NaN stays with those who select it."""
    q, kv, compressed = torch.randn(4, 2, 24), torch.randn(4, 1, 24), torch.randn(5, 1, 24)
    compressed[4] = NAN
    packed, indices = (q, kv, i32([0, 4]), i32([0, 4]), 2), i32([[0, 1], [2, 3], [4, 0], [1, -1]])
    near = window_indices(*packed[2:4], 4, 2)
    near[1] = i32([4, 8])
    out, lse = window_sparse_attention(*packed, compressed, indices, 0.3, 16, window_indices=near)
    assert out[2].isnan().all()
    given = dict(zip(("q", "kv", "cu_seqlens_q", "cu_seqlens_k", "window"), packed))
    rest = {"compressed": compressed, "indices": indices, "topk_length": None, "softmax_scale": 0.3, "attn_sink": None}
    expected, some = attend_windows(given | rest, near, 16), [0, 1, 3]
    for got, right in zip((out, lse), expected):
        torch.testing.assert_close(got[some].double(), right[some], rtol=2e-5, atol=2e-5)


def test_window_and_selected_without_keys():
    q, kv, compressed = torch.randn(3, 2, 8), torch.randn(3, 1, 8), torch.randn(5, 1, 8)
    cu, indices = i32([0, 3]), i32([[0, 1]] * 3)
    window, window_lse = sliding_window_attention(q, kv, cu, cu, 2, 1.0, 8)
    for none in ((compressed, indices[:, :0]), (compressed[:0], indices)):
        out, lse = window_sparse_attention(q, kv, cu, cu, 2, *none, 1.0, 8)
        torch.testing.assert_close((out, lse), (window, window_lse), rtol=2e-5, atol=2e-5)
    out, lse = window_sparse_attention(q, kv[:0], cu, i32([0, 0]), 2, compressed[:0], indices, 1.0, 8, torch.zeros(2))
    assert out.eq(0).all() and lse.eq(INF).all()


CU, LIST = i32([0, 5]), i32([[0, 1]] * 5)
GOOD = {"q": torch.zeros(5, 2, 8), "kv": torch.zeros(5, 1, 8), "cu_seqlens_q": CU, "cu_seqlens_k": CU, "window": 2}
GOOD |= {"softmax_scale": 1.0, "d_v": 8}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0}, "window: must be at least 1, got 0"),
        ({"cu_seqlens_q": i32([0, 6])}, r"cu_seqlens_q: must be non-decreasing numbers from 0 to 5, got \[0, 6\]"),
        ({"cu_seqlens_k": i32([3, 1])}, r"cu_seqlens_k: must be non-decreasing numbers from 0 to 5, got \[3, 1\]"),
        ({"cu_seqlens_k": i32([0, 1, 4])}, r"cu_seqlens_k: shape must be \[2\], got \[3\] \(sizes as of cu_seqlens_q"),
        ({"d_v": 512}, "d_v: must be at most d = 8, got 512"),
        ({"indices": LIST[:, :1]}, r"indices: shape must be \[5, 2\], got \[5, 1\]"),
    ],
)
def test_wrong_windows_are_named(changes, message):
    assert_refused(message, dsa.sliding_window_attention, **GOOD | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compressed": torch.zeros(5, 8)}, r"compressed: shape must be \[n, 1, 8\], got \[5, 8\]"),
        ({"indices": LIST[:2]}, r"indices: shape must be \[5, K\], got \[2, 2\]"),
        ({"indices": LIST.long()}, "indices: dtype must be int32, got int64"),
        ({"topk_length": i32([1, 2])}, r"topk_length: shape must be \[5\], got \[2\]"),
        ({"window_indices": LIST[:, :1]}, r"window_indices: shape must be \[5, 2\], got \[5, 1\]"),
        ({"cu_seqlens_k": i32([0, 6])}, r"cu_seqlens_k: must be non-decreasing numbers from 0 to 5, got \[0, 6\]"),
        ({"attn_sink": torch.zeros(3)}, r"attn_sink: shape must be \[2\], got \[3\]"),
    ],
)
def test_wrong_windows_with_selections_are_named(changes, message):
    good = GOOD | {"compressed": torch.zeros(5, 1, 8), "indices": LIST}
    assert_refused(message, dsa.window_sparse_attention, **good | changes)
