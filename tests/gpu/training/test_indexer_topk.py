"""indexer_topk (the selection in training) on the GPU: exactly the keys with the largest index scores are selected."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.ops.training import indexer_topk as op
from tests.gpu.case_checks import by_sizes, grid, verify

(CASE,) = cases_of("indexer_topk")
LENGTHS = ((300, 300), (0, 5), (129, 400), (1, 1), (5, 0), (200, 70), (700, 3000))


@pytest.mark.parametrize(("heads", "di"), [(1, 64), (8, 128), (20, 64), (64, 64), (64, 128)])
@by_sizes(grid(causal=(True, False), top_k=(1, 50, 2048)))
def test_exactly_the_best_keys_are_selected(sizes, heads, di, record_error):
    verify(CASE, sizes | {"heads": heads, "di": di, "lengths": LENGTHS}, record_error)


def test_chunks_select_the_same_keys(monkeypatch):
    monkeypatch.setattr(op, "LEAST_WORKSPACE", 2 * 24 * 128 * 128 * 9)
    CASE.verify("cuda", lengths=LENGTHS)


def test_a_sequence_longer_than_said_leaves_the_others_alone():
    given = CASE.arguments("cuda", lengths=((300, 300), (100, 100)) * 20)
    short = given | {"max_seqlen_q": 128, "max_seqlen_k": 128}
    whole, got = (dsa.indexer_topk(**x).view(20, 400, 1, 50) for x in (given, short))
    assert torch.equal(got[:, :128], whole[:, :128]) and torch.equal(got[:, 300:], whole[:, 300:])
    assert (got[:, 128:300] == -1).all()


@pytest.mark.parametrize("lengths", [(0, 0), (5, 0), (0, 5)])
def test_without_queries_or_keys_nothing_is_selected(lengths):
    assert (dsa.indexer_topk(**CASE.arguments("cuda", lengths=(lengths,))) == -1).all()
