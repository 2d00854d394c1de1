"""Training's selection against the reference, on the GPU."""

import pytest
import torch

import dsa
from dsa.testing import poison_free_memory
from tests.gpu.attention import starts
from tests.gpu.op_checks import replays

LENGTHS = [(300, 300), (0, 5), (129, 400), (1, 1), (5, 0), (200, 70), (700, 3000)]


def inputs(lengths=LENGTHS, heads=8, dim=64, top_k=50):
    """Small whole numbers: scores are exact, and many are equal."""
    bounds = [starts(side) for side in zip(*lengths)]
    queries, keys = (int(x[-1]) for x in bounds)
    shapes = (queries, heads, dim), (keys, dim)
    q, k = (torch.randint(-1, 2, shape, device="cuda").bfloat16() for shape in shapes)
    w = torch.randint(-4, 5, (queries, heads), device="cuda") / 8
    return [q, k, w, top_k, *bounds, *(max(side) for side in zip(*lengths))]


def expected(arguments, causal=True):
    with dsa.use_backend("reference"):
        return dsa.indexer_topk(*arguments, causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (8, 128), (20, 64), (64, 64), (64, 128)])
@pytest.mark.parametrize("top_k", [1, 50, 2048])
def test_exactly_the_references_picks(causal, heads, dim, top_k):
    arguments = inputs(heads=heads, dim=dim, top_k=top_k)
    poison_free_memory(mebibytes=256)
    assert torch.equal(dsa.indexer_topk(*arguments, causal), expected(arguments, causal))


def test_chunks(monkeypatch):
    from dsa.ops.training import indexer_topk as op

    arguments = inputs()
    whole = dsa.indexer_topk(*arguments)
    monkeypatch.setattr(op, "LEAST_WORKSPACE", 2 * 24 * 128 * 128 * 9)
    assert torch.equal(dsa.indexer_topk(*arguments), whole)


def test_a_sequence_longer_than_said_leaves_the_others_alone():
    arguments = inputs([(300, 300), (100, 100)] * 20)
    whole = expected(arguments).view(20, 400, 1, 50)
    got = dsa.indexer_topk(*arguments[:-2], 128, 128).view(20, 400, 1, 50)
    assert torch.equal(got[:, :128], whole[:, :128]) and torch.equal(got[:, 300:], whole[:, 300:])
    assert (got[:, 128:300] == -1).all()


def test_nothing():
    for lengths in ([(0, 0)], [(5, 0)], [(0, 5)]):
        assert (dsa.indexer_topk(*inputs(lengths)) == -1).all()


def test_a_graph_takes_new_data():
    arguments = inputs()
    given, rest = arguments[:3], arguments[3:]

    def call(*tensors):
        return dsa.indexer_topk(*tensors, *rest)

    for got in replays(call, given, lambda: inputs()[:3]):
        assert torch.equal(got, expected(arguments))
