"""The references of attention over sliding windows: NaN, index lists given by the caller, and queries without keys."""

import pytest
import torch

from dsa.cases import CASES
from dsa.cases.mla_windows import attend_windows
from dsa.reference import sliding_window_attention, window_indices, window_sparse_attention
from tests.reference.common import F32, INF, NAN, assert_close, i32

SLIDING = next(case for case in CASES if case.name == "sliding_window_attention")


def lists_of(given):
    return window_indices(given["cu_seqlens_q"], given["cu_seqlens_k"], len(given["q"]), given["window"])


def test_nan_reaches_only_its_windows():
    sequences = ((3, 3), (0, 2), (1, 7), (6, 18), (2, 1))
    given = SLIDING.arguments(sequences=sequences, heads=4, d=24, d_v=16, dtype=F32, window=3)
    given["kv"][26] = NAN  # the key before the last three keys of the fourth sequence
    out, _ = sliding_window_attention(**given)
    touched = (lists_of(given) == 26).any(1)
    assert touched.sum() == 3 and torch.equal(out.isnan().flatten(1).any(1), touched)


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "queries", "keys", "attending"),
    [([1, 3], [0, 4], 5, 4, [1, 2]), ([0, 5], [0, 0], 5, 0, []), ([0, 0], [0, 4], 0, 4, [])],
)
def test_queries_without_a_sequence_or_keys_attend_to_nothing(cu_q, cu_k, queries, keys, attending):
    q, kv, sink = torch.randn(queries, 2, 8), torch.randn(keys, 1, 8), torch.zeros(2)
    out, lse = sliding_window_attention(q, kv, i32(cu_q), i32(cu_k), 2, 1.0, 8, sink)
    others = [t for t in range(queries) if t not in attending]
    assert out.shape == (queries, 2, 8) and lse.shape == (queries, 2) and lse[attending].isfinite().all()
    assert out[others].eq(0).all() and lse[others].eq(INF).all()


def test_a_list_beyond_the_windows_keys_selects_nothing():
    """The list of query 1 contains index 8, and kv has 4 rows. This index must not select row 8 - 4 of the compressed
    keys. Row 4 is NaN, and only query 2 selects it."""
    given = {"q": torch.randn(4, 2, 24), "kv": torch.randn(4, 1, 24), "window": 2, "attn_sink": None}
    given |= {"cu_seqlens_q": i32([0, 4]), "cu_seqlens_k": i32([0, 4]), "compressed": torch.randn(5, 1, 24)}
    given |= {"indices": i32([[0, 1], [2, 3], [4, 0], [1, -1]]), "topk_length": None, "softmax_scale": 0.3}
    given["compressed"][4] = NAN
    near = lists_of(given)
    near[1] = i32([4, 8])
    out, lse = window_sparse_attention(**given, d_v=16, window_indices=near)
    assert out[2].isnan().all()
    rows, expected = [0, 1, 3], attend_windows(given, near, 16)
    assert_close((out[rows], lse[rows]), (expected.out[rows], expected.lse[rows]))


def test_windows_and_selections_without_keys():
    q, kv, compressed = torch.randn(3, 2, 8), torch.randn(3, 1, 8), torch.randn(5, 1, 8)
    cu, indices = i32([0, 3]), i32([[0, 1]] * 3)
    window = sliding_window_attention(q, kv, cu, cu, 2, 1.0, 8)
    for none in ((compressed, indices[:, :0]), (compressed[:0], indices)):
        assert_close(window_sparse_attention(q, kv, cu, cu, 2, *none, 1.0, 8), window)
    out, lse = window_sparse_attention(q, kv[:0], cu, i32([0, 0]), 2, compressed[:0], indices, 1.0, 8, torch.zeros(2))
    assert out.eq(0).all() and lse.eq(INF).all()
