"""Training's selection by its definition: loops over queries and heads, ties, queries without keys, and errors."""

import pytest
import torch

from dsa.reference import indexer_topk
from tests.reference.common import assert_refused


def cu(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def inputs(lengths_q, lengths_k, heads=3, dim=4):
    """Small whole numbers: scores are exact, and many are equal."""
    queries, keys = sum(lengths_q), sum(lengths_k)
    q, k = torch.randint(-1, 2, (queries, heads, dim)).float(), torch.randint(-1, 2, (keys, dim)).float()
    return q, k, torch.randint(-2, 3, (queries, heads)).float(), cu(*lengths_q), cu(*lengths_k)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("top_k", [1, 3, 20])
def test_in_words(top_k, causal):
    lengths_q, lengths_k = [4, 0, 3, 2], [9, 2, 5, 1]
    q, k, w, cu_q, cu_k = inputs(lengths_q, lengths_k)
    got = indexer_topk(q, k, w, top_k, cu_q, cu_k, 4, 9, causal)
    assert got.shape == (9, 1, top_k) and got.dtype == torch.int32
    row = 0
    for m, n, begin in zip(lengths_q, lengths_k, cu_k.tolist()):
        for i in range(m):
            seen = range(begin, begin + (max(0, n - m + i + 1) if causal else n))
            scores = {s: sum(w[row, j] * max(0.0, float(q[row, j] @ k[s])) for j in range(3)) for s in seen}
            best = sorted(sorted(seen, key=lambda s: -scores[s])[:top_k])
            assert got[row, 0].tolist() == best + [-1] * (top_k - len(best))
            row += 1


def test_nan_is_never_picked():
    q, k, w, cu_q, cu_k = inputs([2], [6])
    k[3] = torch.nan
    assert 3 not in indexer_topk(q, k, w, 6, cu_q, cu_k, 2, 6, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_idx": torch.zeros(6, 5)}, r"k_idx: shape must be \[Tk, 4\], got \[6, 5\] \(sizes as of q_idx\)"),
        ({"w_idx": torch.zeros(2, 3).half()}, "w_idx: dtype must be q_idx's float32, got float16"),
        ({"top_k": 0}, "top_k: must be at least 1, got 0"),
        ({"cu_seqlens_q": cu(3)}, r"cu_seqlens_q: must ascend from 0 to 2, got \[0, 3\] \(sizes as of q_idx\)"),
        ({"max_seqlen_k": -1}, "max_seqlen_k: must be at least 0, got -1"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    names = ("q_idx", "k_idx", "w_idx", "cu_seqlens_q", "cu_seqlens_k")
    good = dict(zip(names, inputs([2], [6]))) | {"top_k": 2, "max_seqlen_q": 2, "max_seqlen_k": 6}
    indexer_topk(**good)
    assert_refused(message, indexer_topk, **good | change)
