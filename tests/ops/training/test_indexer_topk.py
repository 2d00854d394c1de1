"""`indexer_topk` on the CPU: from tiles of scores to the selected keys."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.ops.training import indexer_topk as op
from dsa.runtime import backends

(CASE,) = cases_of("indexer_topk")
LENGTHS = [(300, 300), (0, 5), (129, 400), (1, 1), (5, 0), (200, 70)]


def inputs(lengths=LENGTHS, **sizes):
    return CASE.arguments(lengths=lengths, **sizes)


def plan_of(sequences, queries, keys, causal):
    """Stand in for `make_plan` on the CPU, with an unused q tile at the end."""
    cu_q, cu_k, _, longest = sequences
    q_tiles = []
    for first_q, end_q, first_k, end_k in zip(cu_q.tolist(), cu_q[1:].tolist(), cu_k.tolist(), cu_k[1:].tolist()):
        m, n = end_q - first_q, end_k - first_k
        for i in range(0, m, 128):
            count, seen = min(128, m - i), n - m + i + 1 if causal else n
            last = min(max(seen + causal * (count - 1), 0), n)
            q_tiles.append([first_q + i, count, first_k, n, seen, int(causal), -(-last // 128), 0])
    q_tiles.append([0] * 7 + [-1])
    plan = op.Plan(torch.tensor(q_tiles, dtype=torch.int32), torch.zeros(len(q_tiles) + 1), -(-longest // 128))
    return plan, sequences


def scores_of(q, minus_k, w, q_tiles, scores, active):
    """Stand in for `index_scores`: write the score tiles that have keys, and fill the rest with NaN."""
    scores.fill_(torch.nan)
    for s, (first_q, rows, first_k, keys, _, _, tiles, _) in enumerate(q_tiles.tolist()):
        for j in range(min(tiles, scores.shape[1])):
            own = minus_k[first_k + 128 * j : first_k + min(128 * (j + 1), keys)].float()
            dots = torch.relu(-torch.einsum("thd,sd->ths", q[first_q : first_q + rows].float(), own))
            scores[s, j, :rows, : len(own)] = torch.einsum("ths,th->ts", dots, w[first_q : first_q + rows])


@pytest.fixture
def tiles(kernel_path, monkeypatch):
    monkeypatch.setattr(backends, "runs_kernel", lambda name, *_: name == "indexer_topk")
    monkeypatch.setattr(op, "make_plan", plan_of)
    monkeypatch.setattr(op, "index_scores", scores_of)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [3, 8])
@pytest.mark.parametrize("q_tiles_a_chunk", [1, 3, 100])
def test_tiles_give_the_references_topk_indices(tiles, monkeypatch, causal, heads, q_tiles_a_chunk):
    given = inputs(heads=heads, causal=causal)
    monkeypatch.setattr(op, "LEAST_WORKSPACE", q_tiles_a_chunk * 4 * 128 * 128 * 9)
    CASE.check(given, CASE.results(given))


def test_a_query_of_a_sequence_that_is_longer_than_said_selects_nothing(tiles):
    got = dsa.indexer_topk(**inputs([(300, 300), (100, 100)]) | {"max_seqlen_q": 128, "max_seqlen_k": 128})
    assert (got[128:300] == -1).all() and (got[:128, 0, 0] >= 0).all() and (got[300:, 0, 0] >= 300).all()


@pytest.mark.parametrize("lengths", [[(0, 0)], [(5, 0)], [(0, 5)]])
def test_nothing(tiles, lengths):
    got = dsa.indexer_topk(**inputs(lengths))
    assert got.shape == (lengths[0][0], 1, 50) and (got == -1).all()
