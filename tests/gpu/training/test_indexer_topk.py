"""Training's selection against the formula, on the GPU."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.testing import poison_free_memory

(CASE,) = cases_of("indexer_topk")
LENGTHS = ((300, 300), (0, 5), (129, 400), (1, 1), (5, 0), (200, 70), (700, 3000))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "di"), [(1, 64), (8, 128), (20, 64), (64, 64), (64, 128)])
@pytest.mark.parametrize("top_k", [1, 50, 2048])
def test_exactly_the_best_keys(causal, heads, di, top_k):
    poison_free_memory(mebibytes=256)
    CASE.verify("cuda", lengths=LENGTHS, causal=causal, heads=heads, di=di, top_k=top_k)


def test_chunks(monkeypatch):
    from dsa.ops.training import indexer_topk as op

    monkeypatch.setattr(op, "LEAST_WORKSPACE", 2 * 24 * 128 * 128 * 9)
    CASE.verify("cuda", lengths=LENGTHS)


def test_a_sequence_longer_than_said_leaves_the_others_alone():
    given = CASE.arguments("cuda", lengths=((300, 300), (100, 100)) * 20)
    whole = dsa.indexer_topk(**given).view(20, 400, 1, 50)
    got = dsa.indexer_topk(**given | {"max_seqlen_q": 128, "max_seqlen_k": 128}).view(20, 400, 1, 50)
    assert torch.equal(got[:, :128], whole[:, :128]) and torch.equal(got[:, 300:], whole[:, 300:])
    assert (got[:, 128:300] == -1).all()


@pytest.mark.parametrize("lengths", [(0, 0), (5, 0), (0, 5)])
def test_nothing(lengths):
    assert (dsa.indexer_topk(**CASE.arguments("cuda", lengths=(lengths,))) == -1).all()
