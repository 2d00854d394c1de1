import math

import pytest
import torch

from dsa.reference import sliding_window_attention, window_indices, window_sparse_attention
from tests.reference.common import assert_refused, i32
from tests.reference.mla.attention_oracle import assert_near, attend_rows
from tests.reference.mla.packed_windows import CU_K, CU_Q, visible

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("window", [1, 2, 5, 128])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize(("dtype", "d"), [(torch.float32, 24), (torch.bfloat16, 512), (torch.float16, 512)])
def test_window_against_float64(dtype, d, window, with_sink):
    q, kv, scale = torch.randn(12, 4, d).to(dtype), torch.randn(31, 1, d).to(dtype), 1.5 * d**-0.5
    sink = torch.tensor([INF, -INF, 0.4, -1.0]) if with_sink else None
    options = {"d_v": 16} if d == 24 else {}  # 512 by default
    out, lse = sliding_window_attention(q, kv, i32(CU_Q), i32(CU_K), window, scale, attn_sink=sink, **options)
    rows = visible(window)
    assert rows[10] == [] and rows[11] == [30]
    expected, expected_lse, _ = attend_rows(q, [kv[r, 0] for r in rows], scale, options.get("d_v", 512), sink)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert_near(out, expected, 2e-5 if dtype == torch.float32 else 1e-2)
    assert_near(lse, expected_lse)


def test_nan_stays_in_its_windows():
    q, kv = torch.randn(12, 2, 24), torch.randn(31, 1, 24)
    kv[26] = NAN
    out, _ = sliding_window_attention(q, kv, i32(CU_Q), i32(CU_K), 3, 0.3, 16)
    touched = [26 in row for row in visible(3)]
    assert sum(touched) == 3
    assert out.isnan().flatten(1).any(1).tolist() == touched


def test_queries_of_no_sequence_and_empty_inputs():
    q, kv = torch.randn(5, 2, 8), torch.randn(4, 1, 8)
    out, lse = sliding_window_attention(q, kv, i32([1, 3]), i32([0, 4]), 2, 1.0, 8, torch.zeros(2))
    assert out[[0, 3, 4]].eq(0).all() and lse[[0, 3, 4]].eq(INF).all() and lse[1:3].isfinite().all()
    out, lse = sliding_window_attention(q, kv[:0], i32([0, 5]), i32([0, 0]), 2, 1.0, 8)
    assert out.eq(0).all() and lse.eq(INF).all()
    out, lse = sliding_window_attention(q[:0], kv, i32([0, 0]), i32([0, 4]), 2, 1.0, 8)
    assert out.shape == (0, 2, 8) and lse.shape == (0, 2)


def test_a_list_stands_for_the_window():
    q, kv = torch.randn(12, 2, 24), torch.randn(31, 1, 24)
    packed = (q, kv, i32(CU_Q), i32(CU_K))
    for window in (3, 40):
        expected = sliding_window_attention(*packed, window, 0.3, 16)
        got = sliding_window_attention(*packed, window, 0.3, 16, indices=window_indices(*packed[2:], 12, window))
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


COUNTS = [6, 0, 1, 3, 5, 6, 2, -1, 9, 2**31 - 1, 4, -(2**31)]


@pytest.mark.parametrize("window", [1, 4, 128])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("with_counts", [False, True])
def test_window_and_selected_against_float64(with_counts, with_sink, window):
    q, kv, compressed = torch.randn(12, 4, 24), torch.randn(31, 1, 24), torch.randn(7, 1, 24)
    indices = torch.randint(-1, 8, (12, 6)).int()
    indices[3], indices[4, :3] = -1, i32([2**31 - 1, -(2**31), 7])
    sink = torch.tensor([INF, -INF, 0.4, -1.0]) if with_sink else None
    counts = COUNTS if with_counts else [6] * 12
    arguments = (q, kv, i32(CU_Q), i32(CU_K), window, compressed, indices, 0.3, 16, sink)
    out, lse = window_sparse_attention(*arguments, i32(counts) if with_counts else None)
    keys = []
    for near, selected, count in zip(visible(window), indices.tolist(), counts):
        chosen = [j for j in selected[: max(count, 0)] if 0 <= j < 7]
        keys.append(torch.cat((kv[near, 0], compressed[chosen, 0])))
    expected, expected_lse, _ = attend_rows(q, keys, 0.3, 16, sink)
    assert_near(out, expected)
    assert_near(lse, expected_lse)


def test_window_and_selected_are_kept_apart():
    """A list that points beyond the window's keys selects nothing, and NaN stays with those who select it."""
    q, kv, compressed = torch.randn(4, 2, 24), torch.randn(4, 1, 24), torch.randn(5, 1, 24)
    compressed[4] = NAN
    packed, indices = (q, kv, i32([0, 4]), i32([0, 4]), 2), i32([[0, 1], [2, 3], [4, 0], [1, -1]])
    near = window_indices(*packed[2:4], 4, 2)
    near[1] = i32([4, 8])
    out, lse = window_sparse_attention(*packed, compressed, indices, 0.3, 16, window_indices=near)
    keys = [kv[:1, 0], kv[:0, 0], kv[1:3, 0], kv[2:, 0]]
    keys = [torch.cat((k, compressed[[j for j in row if j >= 0], 0])) for k, row in zip(keys, indices.tolist())]
    assert out[2].isnan().all()
    some = [0, 1, 3]
    expected, expected_lse, _ = attend_rows(q[some], [keys[t] for t in some], 0.3, 16)
    assert_near(out[some], expected)
    assert_near(lse[some], expected_lse)


def test_window_and_selected_without_keys():
    q, kv, compressed = torch.randn(3, 2, 8), torch.randn(3, 1, 8), torch.randn(5, 1, 8)
    cu, indices = i32([0, 3]), i32([[0, 1]] * 3)
    window, window_lse = sliding_window_attention(q, kv, cu, cu, 2, 1.0, 8)
    for none in ((compressed, indices[:, :0]), (compressed[:0], indices)):
        out, lse = window_sparse_attention(q, kv, cu, cu, 2, *none, 1.0, 8)
        assert_near(out, window)
        assert_near(lse, window_lse)
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
    assert_refused(message, sliding_window_attention, **GOOD | changes)


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
    assert_refused(message, window_sparse_attention, **good | changes)
